"""A folder in Meta's own format: params.json beside consolidated.00.pth, consolidated.01.pth, …

The shards are those of Meta's tensor parallelism: projections cut by rows or columns, norms repeated, the embedding
cut over the vocabulary (Llama 3) or over the width (Llama 1 and 2).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint import Checkpoint
from .config import LlamaConfig
from .errors import CheckpointError, listed
from .file_bytes import Scratch
from .generation_config import read_json_object
from .meta_config import config_from_params
from .pth_file import load_pth
from .stored_tensor import JoinedRows, PairedRows, StoredTensor, TensorRows

PARAMS = "params.json"
MAX_SHARDS = 64  # Meta published up to 16
TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_IGNORED = ("rope.freqs",)
_SHARD = re.compile(r"consolidated\.(\d{2,})\.pth")


def hf_name(meta_name: str) -> str | None:
    """`layers.3.attention.wq.weight` → `model.layers.3.self_attn.q_proj.weight`; `None` for unknown names."""
    if meta_name in TOP:
        return TOP[meta_name]
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", meta_name)
    if match and match[2] in LAYER:
        return f"model.layers.{match[1]}.{LAYER[match[2]]}.weight"
    return None


def split_dim(name: str, llama3: bool) -> int | None:
    """Along which dimension Meta cuts a parameter (Hugging Face name) into shards; `None`: all shards hold it whole."""
    if "norm" in name:
        return None
    if name == "model.embed_tokens.weight":
        return 0 if llama3 else 1
    return 1 if "o_proj" in name or "down_proj" in name else 0


def open_meta(folder: Path, rope_factor: float | None = None) -> Checkpoint:
    """Open a folder; the weights stay on disk (mapped) until they are read.

    Args:
        rope_factor: see `config_from_params`.

    Raises:
        CheckpointError: a shard is missing, damaged or carries code; the message names it.
    """
    params = read_json_object(folder / PARAMS)
    paths = _shard_paths(folder)
    shards = [load_pth(path) for path in paths]
    try:
        _check_shards(paths, shards, params)
        head = shards[0].get("output.weight", shards[0].get("tok_embeddings.weight"))
        if head is None or head.dim() != 2:
            raise ValueError(f"{paths[0].name} holds no matrix output.weight or tok_embeddings.weight")
        vocab_size = head.shape[0] * (len(shards) if "output.weight" in shards[0] else 1)
        tied = "output.weight" not in shards[0] or _same(shards)
        config = config_from_params(params, vocab_size, tied, rope_factor)
        tensors = {
            hf_name(name) or name: _joined(name, config, paths, [shard[name] for shard in shards])
            for name in shards[0]
            if name not in _IGNORED
        }
    except ValueError as error:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"{folder / PARAMS}: {error}") from None
    return Checkpoint(folder, config, tensors)


def _shard_paths(folder: Path) -> list[Path]:
    numbered = {int(match[1]): path for path in folder.iterdir() if (match := _SHARD.fullmatch(path.name))}
    if not numbered:
        raise CheckpointError(f"{folder} holds {PARAMS} and no consolidated.00.pth")
    if missing := [index for index in range(max(numbered) + 1) if index not in numbered][:20]:
        raise CheckpointError(f"{folder}: missing {listed(_file(index) for index in missing)}")
    return [numbered[index] for index in sorted(numbered)]


def _file(index: int) -> str:
    return f"consolidated.{index:02d}.pth"


def _check_shards(paths: Sequence[Path], shards: Sequence[Mapping[str, Tensor]], params: Mapping[str, Any]) -> None:
    query, dim = shards[0].get("layers.0.attention.wq.weight"), params.get("dim")
    if query is not None and query.dim() == 2 and query.shape[0] and isinstance(dim, int):
        count = dim // query.shape[0]  # the query rows of all shards together are dim
        whole = count * query.shape[0] == dim and count <= MAX_SHARDS
        if whole and (missing := [_file(index) for index in range(len(paths), count)]):
            raise CheckpointError(f"{paths[0].parent} holds {len(paths)} of {count} shards; missing {listed(missing)}")
    for path, shard in zip(paths[1:], shards[1:]):
        if odd := sorted(set(shard) ^ set(shards[0])):
            raise CheckpointError(f"{path} and {paths[0].name} do not hold the same names: {listed(odd)}")
        if odd := [n for n in shard if shard[n].shape != shards[0][n].shape or shard[n].dtype != shards[0][n].dtype]:
            raise CheckpointError(f"{path} and {paths[0].name} differ in shape or type: {listed(odd)}")


def _same(shards: Sequence[Mapping[str, Tensor]]) -> bool:
    """Head and embedding hold the same values: Meta writes both also where the model has one matrix for both."""
    heads = [shard["output.weight"] for shard in shards]
    tables = [shard.get("tok_embeddings.weight") for shard in shards]
    if any(table is None or table.dim() != 2 for table in tables) or heads[0].dim() != 2:
        return False
    embedding, head = JoinedRows([TensorRows(t) for t in tables if t is not None], 0), heads[0]
    if tables[0] is not None and tables[0].shape[1] != head.shape[1]:
        embedding = JoinedRows(embedding.parts, 1)
    if embedding.shape != (head.shape[0] * len(heads), head.shape[1]) or embedding.dtype != head.dtype:
        return False
    return _equal(embedding, JoinedRows([TensorRows(h) for h in heads], 0))


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    scratch, step = Scratch(), 256
    for start in range(0, one.shape[0], step):
        stop = min(start + step, one.shape[0])
        rows = [torch.empty((stop - start, *one.shape[1:]), dtype=one.dtype) for _ in range(2)]
        one.read_rows(start, stop, rows[0], scratch)
        other.read_rows(start, stop, rows[1], scratch)
        if not torch.equal(*rows):
            return False
    return True


def _joined(name: str, config: LlamaConfig, paths: Sequence[Path], parts: Sequence[Tensor]) -> StoredTensor:
    """One parameter out of its shards."""
    target = hf_name(name)
    if target is None or len(parts) == 1:
        joined: StoredTensor = TensorRows(parts[0])
    else:
        dim = split_dim(target, llama3=True)
        if target == "model.embed_tokens.weight" and parts[0].dim() == 2 and parts[0].shape[1] != config.hidden_size:
            dim = 1  # cut over the width, as Llama 1 and 2 are
        if dim is None:
            for path, part in zip(paths[1:], parts[1:]):
                if not torch.equal(part, parts[0]):
                    raise CheckpointError(f"{name} must be the same in all shards; {path} differs from {paths[0].name}")
            joined = TensorRows(parts[0])
        elif parts[0].dim() != 2:
            raise CheckpointError(f"{paths[0]}: {name} has shape {list(parts[0].shape)}; it must be a matrix")
        else:
            if ".k_proj" in target or ".v_proj" in target:  # more shards than heads: neighbours repeat a head
                parts = parts[:: max(1, len(parts) // config.kv_heads)]
            joined = JoinedRows([TensorRows(part) for part in parts], dim)
    if target and (".q_proj" in target or ".k_proj" in target):
        if len(joined.shape) != 2 or joined.shape[0] % config.head_width:
            raise CheckpointError(
                f"{paths[0]}: {name} has shape {list(joined.shape)} after joining {len(parts)} shards; "
                f"its rows must be a multiple of the head width {config.head_width}"
            )
        joined = PairedRows(joined, config.head_width)
    return joined
