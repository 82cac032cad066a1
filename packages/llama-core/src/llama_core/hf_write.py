"""Writing a Hugging Face folder: config.json, generation_config.json, one safetensors file or several and an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import LlamaConfig
from .hf_checkpoint import INDEX, SINGLE
from .safetensors_write import Done, write_safetensors

STALE = ("model.safetensors", "model-*-of-*.safetensors", INDEX)
"""Weights of an older checkpoint in the same folder; left beside new ones they would be read instead."""


def write_hf(
    folder: Path,
    config: LlamaConfig,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    generation: Mapping[str, Any] | None = None,
    done: Done | None = None,
) -> None:
    """Write into an existing folder.

    Args:
        folder: must hold none of the files that are written.
        config: written as config.json, with the dtype of the weights.
        tensors: under their Hugging Face names.
        dtype: to convert to on the way; `None` keeps the tensors'.
        max_shard_bytes: no file holds more bytes of tensors than this, except for a single larger tensor.
        generation: content of generation_config.json; the special token ids of `config` by default.
        done: called after every piece with its bytes in memory.
    """
    kind = str(dtype or next(iter(tensors.values())).dtype).removeprefix("torch.")
    _write_json(folder / "config.json", {**config.to_hf(), "dtype": kind, "torch_dtype": kind})
    _write_json(folder / "generation_config.json", generation_defaults(config) if generation is None else generation)
    shards = _split(tensors, dtype, max_shard_bytes)
    if len(shards) == 1:
        write_safetensors(folder / SINGLE, tensors, dtype, done=done)
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / name, shard, dtype, done=done)
        weight_map.update(dict.fromkeys(shard, name))
    total = sum(_bytes(tensor, dtype) for tensor in tensors.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def generation_defaults(config: LlamaConfig) -> dict[str, Any]:
    """What a configuration alone says about generating: which tokens begin, end and pad."""
    ids = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    known = {key: list(value) if isinstance(value, tuple) else value for key, value in ids.items() if value is not None}
    return {"_from_model_config": True, **known}


def _split(tensors: Mapping[str, Tensor], dtype: torch.dtype | None, limit: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        size += _bytes(tensor, dtype)
        if shards[-1] and size > limit:
            shards.append({})
            size = _bytes(tensor, dtype)
        shards[-1][name] = tensor
    return shards


def _bytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    return tensor.numel() * (dtype or tensor.dtype).itemsize


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
