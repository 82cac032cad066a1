"""Fast kernels for Llama: Triton and flash attention, each with a plain-torch oracle."""
