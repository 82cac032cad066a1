"""Documents packed into rows, as attention kernels want them: bounds, and no mask of scores.

In a packed call document n is the queries cu_q[n] … cu_q[n + 1] and sees the keys cu_k[n] … cu_k[n + 1]. All rows of a
batch lie one after the other, so that a row's end is a document's end.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

import llama_kernels

# Shape legend: B batch, S sequence, H query heads, K key/value heads, D head width

Bounds = tuple[Tensor, Tensor]
"""cu_q and cu_k, int32, (documents + 1,) each."""


def number_documents(documents: Tensor) -> Tensor:
    """(B, S) numbers that change from one document to the next → rising ones, none of which comes twice in a row.

    Raises:
        ValueError: another shape.
    """
    if documents.dim() != 2:
        raise ValueError(f"documents have shape {tuple(documents.shape)}; (batch, sequence) is wanted")
    return F.pad((documents[:, 1:] != documents[:, :-1]).cumsum(1), (1, 0))


def document_bounds(numbers: Tensor) -> Bounds:
    """Of queries and keys alike, for (B, S) document numbers. Waits for the device: the number of documents is data."""
    starts = torch.ones_like(numbers, dtype=torch.bool)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    bounds = F.pad(starts.flatten().nonzero().squeeze(1), (0, 1), value=numbers.numel()).int()
    return bounds, bounds


def crossing_bounds(numbers_q: Tensor, numbers_k: Tensor) -> Bounds:
    """Of queries (B, Sq) that all stand behind the keys (B, Sk) of their row; numbers as of `number_documents`.

    Only one document can reach from the keys to the queries: that of the last key. It is the end of the keys and the
    beginning of the queries. So each row has three documents, of which the middle one has both: keys that no query
    sees, the crossing one, and queries that see no key. Their number is no data, and nothing waits for the device.
    """
    (rows, length_q), length_k = numbers_q.shape, numbers_k.shape[1]
    last = numbers_k[:, -1:]
    head = (numbers_q == last).sum(1)
    tail = torch.where(head > 0, (numbers_k == last).sum(1), 0)
    start_q, start_k = (torch.arange(rows, device=numbers_q.device) * length for length in (length_q, length_k))
    cu_q = torch.stack((start_q, start_q, start_q + head), 1).flatten()
    cu_k = torch.stack((start_k, start_k + length_k - tail, start_k + length_k), 1).flatten()
    return F.pad(cu_q, (0, 1), value=numbers_q.numel()).int(), F.pad(cu_k, (0, 1), value=numbers_k.numel()).int()


class DocumentAttend:
    """Causal attention within the documents of whole rows, through `llama_kernels.attention`.

    Args:
        documents: (B, S), numbers that change from one document to the next; `None` means one for each row.
        backend: of `llama_kernels.attention`; `None` means the fastest that can serve.
    """

    def __init__(self, documents: Tensor | None, backend: str | None = None) -> None:
        self.bounds = None if documents is None else document_bounds(number_documents(documents))
        self.backend = backend

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, S, H, D), k and v (B, S, K, D) → (B, S, H, D)."""
        if self.bounds is None:
            return cast(Tensor, llama_kernels.attention(q, k, v, causal=True, backend=self.backend))
        rows, length = q.shape[:2]
        cu_q, cu_k = self.bounds
        packed = (x.flatten(0, 1) for x in (q, k, v))
        out: Tensor = llama_kernels.attention(
            *packed, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=length, max_seqlen_k=length,
            backend=self.backend,
        )  # fmt: skip
        return out.unflatten(0, (rows, length))  # type: ignore[no-any-return]
