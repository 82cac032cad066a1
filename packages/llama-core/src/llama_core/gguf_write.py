"""Writing a model as a GGUF file that llama.cpp reads: F32, F16, BF16, Q8_0 or Q4_0, with its tokenizer.

Vectors stay F32, as llama.cpp wants them. Rows whose length is no multiple of a block's 32 values become F16. In Q4_0
files embedding and head are Q8_0, because errors there reach every token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .config import LlamaConfig
from .errors import CheckpointError
from .gguf_file_write import TensorToWrite, write_gguf_file
from .gguf_rope import llama3_divisors, metadata_from_rope
from .gguf_tokenizer_write import gguf_tokenizer_metadata
from .gguf_weights import LAYER, ROPE_DIVISORS, TOP
from .meta_write import interleave
from .safetensors_write import Done, host_rows
from .tokenizer import Tokenizer

BLOCK = 32
# name → GGML type, bytes and values of a block, llama.cpp's number for a file that is mostly of this type
TYPES = {
    "F32": (0, 4, 1, 0),
    "F16": (1, 2, 1, 1),
    "BF16": (30, 2, 1, 32),
    "Q8_0": (8, 34, BLOCK, 7),
    "Q4_0": (2, 18, BLOCK, 2),
}
_TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_GGUF = {hf: gguf for gguf, hf in (*TOP.items(), *LAYER.items())}


def gguf_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` → `blk.3.attn_q.weight`."""
    if name in _GGUF:
        return _GGUF[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_GGUF[module]}.{kind}"


def write_gguf(
    file: BinaryIO,
    config: LlamaConfig,
    tensors: Mapping[str, Tensor],
    kind: str,
    tokenizer: Tokenizer | None = None,
    done: Done | None = None,
) -> None:
    """Write a whole file, one tensor in memory at a time.

    Args:
        tensors: under their Hugging Face names.
        kind: one of `TYPES`, for the matrices.
        tokenizer: goes into the file with its chat templates. Without one llama.cpp cannot turn text into ids.
        done: called after every piece with its bytes in memory.

    Raises:
        ValueError: a rotary scaling or tokenizer that GGUF cannot say.
        CheckpointError: the package `gguf`, which quantises, is missing.
    """
    if kind in ("Q8_0", "Q4_0"):
        _quants()
    metadata = {**_metadata(config, kind), **_token_metadata(config, tokenizer)}
    rows = [_tensor(name, tensor, kind, config.head_width, done) for name, tensor in tensors.items()]
    if config.rope.rope_type == "llama3":
        divisors = torch.tensor(llama3_divisors(config.rope, config.head_width), dtype=torch.float32)
        rows.append(TensorToWrite(ROPE_DIVISORS, tuple(divisors.shape), 0, divisors.nbytes, [divisors.numpy().data]))
    write_gguf_file(file, metadata, rows)


def _metadata(config: LlamaConfig, kind: str) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "general.name": str(config.extra.get("_name_or_path") or "llama"),
        "general.file_type": TYPES[kind][3],
        "general.quantization_version": 2,
        "llama.vocab_size": config.vocab_size,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.kv_heads,
        "llama.attention.key_length": config.head_width,
        "llama.attention.value_length": config.head_width,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "llama.rope.dimension_count": config.head_width,
        **{f"llama.{key}": value for key, value in metadata_from_rope(config.rope).items()},
    }


def _token_metadata(config: LlamaConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    if tokenizer is not None:
        return gguf_tokenizer_metadata(tokenizer, config.vocab_size)
    eos = config.eos_token_ids
    ids = {"bos": config.bos_token_id, **dict(zip(("eos", "eot", "eom"), eos)), "padding": config.pad_token_id}
    known = {f"tokenizer.ggml.{name}_token_id": value for name, value in ids.items() if value is not None}
    return {"tokenizer.ggml.model": "no_vocab", **known}


def _tensor(name: str, tensor: Tensor, kind: str, head_dim: int, done: Done | None) -> TensorToWrite:
    if tensor.dim() == 1:
        kind = "F32"
    elif kind == "Q4_0" and name in TOP.values():
        kind = "Q8_0"
    number, size, block, _ = TYPES[kind]
    if tensor.shape[-1] % block:
        kind = "F16"
        number, size, block, _ = TYPES[kind]
    total = tensor.numel() // block * size
    return TensorToWrite(
        gguf_name(name), tuple(tensor.shape), number, total, _pieces(name, tensor, kind, head_dim, done)
    )


def _pieces(name: str, tensor: Tensor, kind: str, head_dim: int, done: Done | None) -> Iterator[Any]:
    if ".q_proj." in name or ".k_proj." in name:
        tensor = interleave(tensor.detach(), head_dim)
    for rows in host_rows(tensor, _TORCH.get(kind, torch.float32), done):
        if kind in _TORCH:
            yield rows.view(torch.uint8).numpy().data.cast("B")
            continue
        gguf = _quants()
        step = max(
            1, (1 << 18) // math.prod(rows.shape[1:])
        )  # quantising takes a dozen temporaries of its input's size
        for part in rows.split(step):
            yield gguf.quants.quantize(part.numpy(), gguf.GGMLQuantizationType[kind]).data.cast("B")


def _quants() -> Any:
    try:
        import gguf
    except ImportError:
        raise CheckpointError("quantising needs the package `gguf`; install llama-core[gguf]") from None
    return gguf
