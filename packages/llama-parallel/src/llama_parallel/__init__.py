"""Data, tensor, pipeline and context parallelism for Llama over torch.distributed."""
