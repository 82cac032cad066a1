"""The model that comes as a Python package, as what llama-infer takes where no model is named."""

from __future__ import annotations

from pathlib import Path

from llama_core.embedded import INSTALL as INSTALL
from llama_core.embedded import NAME as NAME
from llama_core.embedded import PACKAGE as PACKAGE
from llama_core.embedded import find_embedded as find_embedded

SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""What the model's card samples with (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct); a GGUF file has no
generation_config.json."""


def embedded_model() -> Path:
    """The GGUF file of the installed package.

    Raises:
        ValueError: it is not installed; the message says how to get it.
    """
    path = find_embedded()
    if path is None:
        raise ValueError(f"no --model given, and {NAME} is not installed; give a model, or: {INSTALL}")
    return path
