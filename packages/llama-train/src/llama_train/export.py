"""The finished model as a Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from llama_core import Llama, Tokenizer, save_model


def export_model(model: Llama, tokenizer: Tokenizer, path: Path) -> None:
    """Write weights, config.json and the tokenizer; an earlier export is replaced once the new one is whole."""
    new, old = path.with_name(path.name + ".new"), path.with_name(path.name + ".old")
    for left in (new, old):  # of an export that was killed
        if left.exists():
            shutil.rmtree(left)
    save_model(model, new, format="hf")
    tokenizer.save(new)
    if path.exists():
        path.rename(old)
    new.rename(path)
    if old.exists():
        shutil.rmtree(old)
