"""Generating with Llama models: engine, command line and server."""
