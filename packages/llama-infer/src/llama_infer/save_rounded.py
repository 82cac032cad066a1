"""A model with rounded weights as a Hugging Face folder that other engines read too (compressed-tensors' format)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama_core import Llama, Tokenizer
from llama_core.atomic import new_folder
from llama_core.compressed_tensors import KEY
from llama_core.hf_write import STALE, write_hf
from llama_core.save import whole_weights

from .rounding import GROUP, SETTINGS, round_weight


def save_rounded(
    model: Llama,
    path: str | Path,
    kind: str,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    generation: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a model with the linear layers of its decoder layers rounded; complete or not at all.

    Loading it gives the weights that rounding when loading gives, to the bit, for the same `dtype`.

    Args:
        model: whole and not rounded.
        path: the folder to write; must not exist or be empty unless `overwrite`.
        kind: one of `QUANTIZATIONS`.
        dtype: of everything else, and of what is rounded before it is; None keeps the model's.
        generation, tokenizer, progress: as in `llama_core.save_model`.

    Raises:
        ValueError: a shape that does not fit the kind (`CheckpointError` where the target is taken).
    """
    dense = whole_weights(model)
    rounded = [name for name in dense if name.endswith("_proj.weight")]
    each = {"int4": GROUP, "int8": 4, "fp8": 1}[kind]
    for name in rounded:
        if dense[name].shape[1] % each:
            raise ValueError(f"{kind} rounds or packs {each} inputs together; {name} has {dense[name].shape[1]}")
    total, done = sum(tensor.nbytes for tensor in dense.values()), 0
    tensors: dict[str, Tensor] = {}
    for name, tensor in dense.items():
        cast = tensor.detach() if dtype is None else tensor.detach().to(dtype)
        if name in rounded:
            tensors.update(round_weight(cast, kind).stored(name.removesuffix(".weight")))
        else:
            tensors[name] = cast
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
    config = model.config.replace(extra={**model.config.extra, KEY: SETTINGS[kind]})
    with new_folder(path, overwrite, STALE) as folder:
        write_hf(folder, config, tensors, None, generation=generation)
        if tokenizer is not None:
            tokenizer.save(folder)
