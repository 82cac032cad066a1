"""Attention where ranks share a sequence: which kind, and what it must know of the documents in it."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from llama_core import Attend, LlamaConfig

from .collectives import Axis
from .documents import DocumentAttend, number_documents
from .ring_attention import RingAttend
from .sequence_shards import pieces_of_ranks, shards_of_ranks, unshard_sequence
from .ulysses import UlyssesAttend


def check_context(model: LlamaConfig, mesh: DeviceMesh, context: str) -> None:
    """Raise ValueError for a context that is unknown or, with Ulysses, for heads that do not divide over tp · cp."""
    cp, heads = mesh["cp"].size(), model.num_attention_heads // mesh["tp"].size()
    pieces_of_ranks(cp, context)
    if context == "ulysses" and heads % cp:
        raise ValueError(f"{heads} attention heads of a tensor-parallel rank do not divide over cp {cp}")


def context_attend(
    mesh: DeviceMesh, context: str, documents: Tensor | None = None, backend: str | None = None
) -> Attend:
    """Causal attention for this rank's shard of the sequences, over any backend of `llama_kernels.attention`.

    With documents and cp > 1 this is a collective call of the ranks of cp: they tell each other their numbers, once for
    all layers.

    Args:
        mesh: of `build_mesh`.
        context: "ring" or "ulysses", as `shard_sequence` cut the rows.
        documents: (B, S / cp), this rank's shard of numbers that change from one document to the next; `None` means one
            document for each row.
        backend: of `llama_kernels.attention`; `None` means the fastest that can serve.

    Raises:
        ValueError: an unknown context; documents of another shape; with the ring, the backend "sdpa".
    """
    axis = Axis.of(mesh, "cp")
    if axis.size == 1:
        return DocumentAttend(documents, backend)
    whole = None if documents is None else number_documents(unshard_sequence(documents, mesh, context))
    if context == "ulysses":
        return UlyssesAttend(axis, DocumentAttend(whole, backend))
    return RingAttend(axis, None if whole is None else shards_of_ranks(whole, axis.size, context), backend)
