"""The finished model as a Hugging Face folder, and its adapter as PEFT's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from llama_core import Llama, Tokenizer, save_model
from llama_core.lora import save_adapter

from .config import TrainConfig
from .lora import take_adapters
from .run_folder import RunFolder

ADAPTER = "adapter"


def export_run(
    model: Llama, tokenizer: Tokenizer, config: TrainConfig, folder: RunFolder, note: Callable[[str], None]
) -> None:
    """Write what a run ends with: RUN/hf, and with [lora] the adapter alone in RUN/adapter.

    Args:
        model: whole; one with adapters is merged in place.
        tokenizer, config, folder: of the run.
        note: receives a line for each.
    """
    if config.lora.rank:
        adapter = take_adapters(model, config)
        save_adapter(adapter, folder.path / ADAPTER, overwrite=True)
        note(f"exported   {folder.path / ADAPTER} (the adapter alone)")
    export_model(model, tokenizer, folder.export)
    note(f"exported   {folder.export}")


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
