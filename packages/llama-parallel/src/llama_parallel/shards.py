"""Weights straight into shards: each rank draws or reads its own part, and none ever holds a whole large parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llama_core import Llama
from llama_core.checkpoint import PIECE_BYTES, Checkpoint, check
from llama_core.file_bytes import Scratch
from llama_core.init import fill_normal
from llama_core.load import open_checkpoint
from llama_core.stored_tensor import StoredTensor

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@torch.no_grad()
def init_shards(model: Llama, seed: int, device: torch.device | str) -> None:
    """Give a parallelized model on meta memory on `device` and fresh weights, the same on every layout, bit for bit.

    The rules are those of `llama_core.init_weights`: matrices ~ N(0, initializer_range²), norm scales 1, biases 0.

    Args:
        model: after `parallelize`.
        seed: of the whole model; ranks need not agree on any other seed.
        device: this rank's.
    """
    model.to_empty(device=device)
    for name, local, shape, offsets in local_parts(model):
        if name.endswith("norm.weight"):
            local.fill_(1.0)
        elif name.endswith("bias"):
            local.fill_(0.0)
        else:
            key = EMBEDDING if name == HEAD and model.config.tie_word_embeddings else name
            fill_normal(local, key, seed, model.config.initializer_range, shape, offsets)


@torch.no_grad()
def load_shards(
    model: Llama, path: str | Path, device: torch.device | str, *, rope_factor: float | None = None
) -> None:
    """Give a parallelized model on meta memory on `device` and a checkpoint's weights, of which it reads its own part.

    Args:
        model: after `parallelize`.
        path: anything `llama_core.load_model` takes.
        device: this rank's.
        rope_factor: as in `llama_core.load_model`.

    Raises:
        CheckpointError: missing, unexpected or misshapen tensors.
        ValueError: the checkpoint's shape is not the model's.
    """
    checkpoint = open_checkpoint(path, rope_factor)
    try:
        check(checkpoint)
        _check_same_model(checkpoint, model)
        model.to_empty(device=device)
        read_shards(checkpoint, dict(model.named_parameters()))
    finally:
        checkpoint.close()


@torch.no_grad()
def read_shards(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors from a checkpoint that was checked; of a DTensor this rank's part is read and no more.

    Args:
        checkpoint: of `llama_core.load.open_checkpoint`.
        tensors: by the names of parameters; of any dtype.
    """
    scratch = Scratch()
    for name, tensor in tensors.items():
        stored = checkpoint.tensors.get(name) or checkpoint.tensors[EMBEDDING]  # a last stage's tied head
        local, _, offsets = local_part(tensor)
        _read(stored, local, offsets, scratch)


def local_parts(model: Llama) -> Iterator[tuple[str, Tensor, tuple[int, ...], tuple[int, ...]]]:
    """Of every parameter: name, this rank's part (the memory itself), shape of the whole, index of the part in it."""
    for name, parameter in model.named_parameters():
        yield name, *local_part(parameter)


def local_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """This rank's part of a tensor (the memory itself), shape of the whole, index of the part in it."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim()
    # Also right where FSDP cuts what TP has cut already along the same dimension (_StridedShard).
    found = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    assert tuple(found[0]) == tuple(local.shape), (found, local.shape)
    return local, tuple(tensor.shape), tuple(found[1])


def _check_same_model(checkpoint: Checkpoint, model: Llama) -> None:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias", "mlp_bias")  # fmt: skip
    stored, wanted = checkpoint.config, model.config
    pairs = [(name, getattr(stored, name), getattr(wanted, name)) for name in names]
    wrong = [f"{name} {a!r} instead of {b!r}" for name, a, b in pairs if a != b]
    if wrong:
        raise ValueError(f"{checkpoint.path} holds another model: {', '.join(wrong)}")


def _read(stored: StoredTensor, local: Tensor, offsets: tuple[int, ...], scratch: Scratch) -> None:
    """Rows [offset, offset + rows) and, of these, the columns wanted, in pieces of about a megabyte."""
    if local.numel() == 0:
        return
    whole_rows = tuple(stored.shape[1:]) == tuple(local.shape[1:])
    columns = 1 if local.dim() == 1 else stored.shape[1]
    step = max(1, PIECE_BYTES // (columns * local.element_size()))
    step = max(stored.granule, step // stored.granule * stored.granule)
    for start in range(0, len(local), step):
        out = local[start : start + step]
        first = offsets[0] + start
        if whole_rows:
            stored.read_rows(first, first + len(out), out, scratch)
        else:
            rows = torch.empty(len(out), columns, dtype=local.dtype, device=local.device)
            stored.read_rows(first, first + len(out), rows, scratch)
            out.copy_(rows[:, offsets[1] : offsets[1] + out.shape[1]])
