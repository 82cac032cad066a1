"""Writing a folder in Meta's format: params.json and consolidated.NN.pth, cut as Meta's own code expects them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from .config import LlamaConfig
from .meta_checkpoint import LAYER, PARAMS, TOP, split_dim
from .meta_config import LLAMA3_VOCABULARY, params_from_config
from .safetensors_write import Done

STALE = ("consolidated.*.pth", PARAMS)
_META = {hf: meta for meta, hf in (*TOP.items(), *LAYER.items())}


def meta_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` → `layers.3.attention.wq.weight`."""
    if name in _META:
        return _META[name]
    _, _, layer, module = name.removesuffix(".weight").split(".", 3)
    return f"layers.{layer}.{_META[module]}.weight"


def write_meta(
    folder: Path,
    config: LlamaConfig,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    shards: int = 1,
    done: Done | None = None,
) -> None:
    """Write into an existing folder. One shard is held in main memory at a time.

    Args:
        folder: must hold none of the files that are written.
        config: must be one that Meta's format can say.
        tensors: under their Hugging Face names. A tied head is written as well; Meta's code wants one.
        dtype: to convert to on the way; `None` keeps the tensors'.
        shards: files to write; must divide the heads and every dimension that is cut.
        done: called after every part with its bytes in memory.

    Raises:
        ValueError: a setting that the format does not have, or a number of shards that does not divide.
    """
    params = params_from_config(config)
    if config.tie_word_embeddings:
        tensors = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    cuts = {name: split_dim(name, config.vocab_size == LLAMA3_VOCABULARY) for name in tensors}
    sizes = {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.kv_heads}
    sizes |= {name: tensors[name].shape[dim] for name, dim in cuts.items() if dim is not None}
    if uneven := [f"{name} {size}" for name, size in sizes.items() if size % shards]:
        raise ValueError(f"shards is {shards}; it must divide {uneven[0]}")
    (folder / PARAMS).write_text(json.dumps(params, indent=2) + "\n", encoding="utf-8")
    for index in range(shards):
        shard = {}
        for name, tensor in tensors.items():
            dim = cuts[name]
            part = tensor.detach() if dim is None else tensor.detach().chunk(shards, dim)[index]
            if ".q_proj" in name or ".k_proj" in name:
                part = interleave(part, config.head_width)
            if done is not None:
                done(part.nbytes)
            part = part.to("cpu", dtype or tensor.dtype)
            part = part.contiguous()
            # torch.save writes the whole storage behind a view
            shard[meta_name(name)] = part.clone() if part.untyped_storage().nbytes() != part.nbytes else part
        torch.save(shard, folder / f"consolidated.{index:02d}.pth")


def interleave(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of rotated halves into the order of interleaved pairs: within a head, row s·d/2 + j becomes row 2j + s."""
    pairs: Tensor = rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
    return pairs
