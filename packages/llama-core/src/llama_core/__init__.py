"""The Llama model and everything about its files: checkpoints, tokenizers, chat templates."""
