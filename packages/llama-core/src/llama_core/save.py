"""`save_model`: a model into a checkpoint that others read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import gguf_write, hf_write, meta_write
from .atomic import new_file, new_folder
from .checkpoint import DTYPES, Progress
from .errors import CheckpointError, listed
from .model import Llama
from .parameter_shapes import parameter_shapes
from .safetensors_write import Done
from .tokenizer import Tokenizer

FORMATS = ("hf", "meta", "gguf")


def save_model(
    model: Llama,
    path: str | Path,
    format: str = "hf",
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: int | float = 5e9,
    overwrite: bool = False,
    generation: Mapping[str, Any] | None = None,
    shards: int = 1,
    tokenizer: Tokenizer | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a model. The target appears complete or not at all.

    Args:
        model: whole (no pipeline stage, no sharded parameters), on any device, packed or not.
        path: the folder to write (the file for "gguf"); must not exist or be empty unless `overwrite`.
        format: "hf": config.json, generation_config.json and safetensors, in files of up to `max_shard_bytes`; a tied
            head is not written. "meta": params.json and `shards` files consolidated.NN.pth. "gguf": one file.
        dtype: to convert to on the way; `None` keeps the model's. For "gguf" also "Q8_0" or "Q4_0".
        max_shard_bytes: bytes of tensors in one file ("hf").
        overwrite: replace a checkpoint in `path`; files of other names stay.
        generation: content of generation_config.json ("hf"); the special token ids of the configuration by default.
        shards: files of tensor-parallel parts ("meta"); must divide the heads.
        tokenizer: written into the same folder ("hf") or file ("gguf", where llama.cpp needs it). "meta" has no place
            for one: copy the original tokenizer.model.
        progress: called with the bytes of the model that are dealt with, and all of them.

    Raises:
        CheckpointError: the target is taken, or the model is not whole.
        ValueError: an argument out of range, or a setting that the format cannot say.
        OSError: the disk is full or not writable; nothing is left behind.
    """
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}; it must be one of {', '.join(FORMATS)}")
    if not max_shard_bytes >= 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; it must be at least 1")
    if shards < 1:
        raise ValueError(f"shards is {shards}; it must be at least 1")
    tensors = whole_weights(model)
    done = _counter(progress, sum(tensor.nbytes for tensor in tensors.values()))
    if format == "gguf":
        kind = _gguf_kind(dtype or next(iter(tensors.values())).dtype)
        with new_file(path, overwrite) as file:
            gguf_write.write_gguf(file, model.config, tensors, kind, tokenizer, done)
        return
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; it must be one of {', '.join(map(str, DTYPES))}")
    assert not isinstance(dtype, str)
    if tokenizer is not None and format == "meta":
        raise ValueError("tokenizer: Meta's format has no place for one; copy the original tokenizer.model")
    stale = (*hf_write.STALE, *meta_write.STALE)
    with new_folder(path, overwrite, stale) as folder:
        if format == "hf":
            hf_write.write_hf(folder, model.config, tensors, dtype, int(max_shard_bytes), generation, done)
            if tokenizer is not None:
                tokenizer.save(folder)
        else:
            meta_write.write_meta(folder, model.config, tensors, dtype, shards, done)


def _counter(progress: Progress | None, total: int) -> Done | None:
    """Adds up pieces. Meta's format repeats norms and a tied head: what is beyond the model does not count."""
    if progress is None:
        return None
    tell, so_far = progress, 0

    def done(count: int) -> None:
        nonlocal so_far
        so_far = min(so_far + count, total)
        tell(so_far, total)

    return done


def _gguf_kind(dtype: torch.dtype | str) -> str:
    kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    kind = dtype.upper() if isinstance(dtype, str) else kinds.get(dtype)
    if kind not in gguf_write.TYPES:
        raise ValueError(f"dtype is {dtype!r}; for GGUF it must be one of {', '.join(gguf_write.TYPES)}")
    return kind


def whole_weights(model: Llama) -> dict[str, Tensor]:
    """Every parameter under its Hugging Face name, a tied head left out.

    Raises:
        CheckpointError: parts are missing, sharded, on the meta device or of another shape than the configuration says.
    """
    present = model.state_dict()
    expected = parameter_shapes(model.config)
    if missing := [name for name in expected if name not in present]:
        raise CheckpointError(f"only whole models are saved; this one lacks {listed(missing)}")
    if extra := [name for name in present if name not in expected and name != "lm_head.weight"]:
        raise CheckpointError(f"the model has more than a Llama's weights; merge or undo it first: {listed(extra)}")
    tensors = {name: present[name] for name in expected}
    if sharded := [name for name, tensor in tensors.items() if hasattr(tensor, "full_tensor")]:
        raise CheckpointError(f"only whole models are saved; sharded over processes: {listed(sharded)}")
    wrong = [f"{name} is {list(t.shape)}" for name, t in tensors.items() if t.shape != expected[name] or t.is_meta]
    if wrong:
        raise CheckpointError(
            f"parameters of another shape than the configuration's, or without values: {listed(wrong)}"
        )
    return tensors
