"""`load_model`: whatever a Llama comes in, to a ready model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from .checkpoint import DTYPES, Checkpoint, Progress, check, check_tied_head, fill, stored_dtype
from .errors import CheckpointError
from .gguf_weights import open_gguf
from .hf_checkpoint import open_hf
from .hub import local_path
from .meta_checkpoint import PARAMS, open_meta
from .model import Llama
from .ops import Ops


def load_model(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    ops: Ops | None = None,
    *,
    rope_factor: float | None = None,
    progress: Progress | None = None,
) -> Llama:
    """Load a model from a Hugging Face folder, a folder in Meta's format or a `.gguf` file, in evaluation mode.

    Weights go straight onto `device` in `dtype`, piece by piece: beside the model itself only a few megabytes are
    used. The result shares nothing with the files.

    Args:
        path: folder with config.json and safetensors, or with params.json and consolidated.NN.pth, or a GGUF file, or
            a name on the hub (`org/name`, `org/name@revision`, `org/name/file.gguf`; extra `hub`).
        dtype: of the weights; `None` keeps the file's (the one of most elements; float32 for quantised GGUF).
        device: where the weights go.
        ops: the operations the model computes with, plain torch by default.
        rope_factor: for Meta's folders of Llama 3.1 and later, whose params.json does not tell by which factor the
            context was extended: 8 for 3.1 and 3.3, 32 for 3.2 1B and 3B. For nothing else.
        progress: called with the bytes of the model that are there, and all of them.

    Raises:
        CheckpointError: a `ValueError` whose message lists everything missing, unexpected, misshapen or damaged.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; it must be one of {', '.join(map(str, DTYPES))}")
    checkpoint = open_checkpoint(path, rope_factor)
    try:
        check(checkpoint)
        return load_checkpoint(checkpoint, dtype, device, ops, progress=progress)
    finally:
        checkpoint.close()


def load_checkpoint(
    checkpoint: Checkpoint,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    ops: Ops | None = None,
    *,
    prepare: Callable[[Llama], None] | None = None,
    progress: Progress | None = None,
) -> Llama:
    """`load_model` from a checkpoint that is open and has passed `check`.

    Args:
        prepare: called with the model while it has no memory; modules that it replaces with others, weights and all,
            stay as they are.
    """
    with torch.device("meta"):
        model = Llama(checkpoint.config, ops)
    model = model.to(dtype or stored_dtype(checkpoint))
    if prepare is not None:
        prepare(model)
    # What to_empty does, but with torch.empty: the first empty_like of a meta tensor imports sympy, 0.4 s.
    model._apply(lambda x: torch.empty(x.shape, dtype=x.dtype, device=device) if x.is_meta else x)
    fill(checkpoint, dict(model.named_parameters()), progress)
    if checkpoint.config.tie_word_embeddings:
        check_tied_head(checkpoint, model.get_parameter("model.embed_tokens.weight"))
    return model.eval()


def open_checkpoint(path: str | Path, rope_factor: float | None = None) -> Checkpoint:
    """Open whatever lies at `path` and read its headers; close it after use.

    Raises:
        CheckpointError: nothing there, nothing known, or a damaged header.
    """
    try:
        return _open(local_path(path), rope_factor)
    except OSError as error:  # closed to us, a name too long, a failing disk
        raise CheckpointError(f"{error.filename or path} cannot be read: {error.strerror}") from None


def _open(path: Path, rope_factor: float | None) -> Checkpoint:
    if path.is_dir() and (path / PARAMS).is_file() and not (path / "config.json").is_file():
        return open_meta(path, rope_factor)
    if rope_factor is not None:
        raise ValueError(f"rope_factor is {rope_factor}; only folders in Meta's format ({PARAMS}) need it, not {path}")
    if path.is_file():
        with open(path, "rb") as file:
            magic = file.read(4)
        if path.suffix == ".gguf" or magic == b"GGUF":
            return open_gguf(path)
        raise CheckpointError(f"{path} is no GGUF file; give a GGUF file or a folder with config.json")
    if path.is_dir():
        if (path / "config.json").is_file():
            return open_hf(path)
        if (path / "adapter_config.json").is_file():
            raise CheckpointError(
                f"{path} holds an adapter, no model: load its base model, then llama_core.lora.merge_lora"
            )
        if ggufs := sorted(path.glob("*.gguf")):
            raise CheckpointError(f"{path} holds GGUF files; name one of them, for example {ggufs[0]}")
        raise CheckpointError(f"{path} holds neither config.json nor {PARAMS}")
    raise CheckpointError(f"{path} does not exist")
