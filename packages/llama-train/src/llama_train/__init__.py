"""Training Llama models, from one CPU to many hosts."""
