"""Generating with Llama models: engine, command line and server."""

from .sampling_params import SamplingParams as SamplingParams
