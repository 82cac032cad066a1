"""What a backend must know about one attention call, apart from the tensors' contents.

Shape legend of the attention files: B batch, S sequence, T packed tokens, H query heads, K key/value heads, D head
width, G = H / K query heads that share one key/value head. Query head h reads key/value head h // G.

A causal mask is described by an offset: query i of a sequence sees key j when j <= i + offset. With Sq queries and Sk
keys the usual anchor is the bottom-right corner, offset = Sk - Sq: the last query sees every key.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionCall:
    """Everything static about a call. Hashable, so that the choice of a backend is made once per kind of call."""

    device: torch.device
    dtype: torch.dtype
    batch: int  # sequences of a dense call, documents of a packed one
    seq_q: int  # rows of one sequence; in a packed call all rows, T
    seq_k: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    q_offset: int | None  # None: bottom-right of each document (packed calls only; dense calls have the number)
    packed: bool
    same_documents: bool  # queries and keys are cut at the same places
    max_q: int  # no document has more queries or keys than these
    max_k: int

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """Softmax scale, 1 / sqrt(D)."""
        return float(self.head_dim**-0.5)

    @property
    def bottom_right(self) -> bool:
        """The causal mask, if any, ends at the last key of the last query."""
        return not self.causal or self.q_offset == (None if self.packed else self.seq_k - self.seq_q)

    @property
    def top_left(self) -> bool:
        """The causal mask, if any, lets query i see the keys 0 .. i."""
        return not self.causal or self.q_offset == 0 or (self.q_offset is None and self.same_documents)

    @property
    def may_have_empty_rows(self) -> bool:
        """Some row might see no key: early queries of a causal call, or documents whose lengths are not known here."""
        return self.packed or (self.causal and self.q_offset is not None and self.q_offset < 0)

    @property
    def lse_dtype(self) -> torch.dtype:
        """float32, except that float64 inputs keep float64 (parity tests need all of it)."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return (self.num_heads, self.seq_q) if self.packed else (self.batch, self.num_heads, self.seq_q)


def dense_rows(x: Tensor) -> Tensor:
    """x, copied if its last dimension is not dense or a dimension is expanded (stride 0).

    No backend may be handed the latter: torch 2.11's CPU kernel reads past them, and ours would read them many times.
    """
    if x.stride(-1) == 1 and all(stride > 0 for stride, size in zip(x.stride(), x.shape) if size > 1):
        return x
    return x.contiguous()


def describe(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal: bool,
    q_offset: int | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> AttentionCall:
    """The call in normal form: a mask that hides nothing is dropped, offsets of dense calls are numbers."""
    packed = cu_seqlens_q is not None
    seq_q, seq_k = q.shape[-3], k.shape[-3]
    if not packed and q_offset is None:
        q_offset = seq_k - seq_q
    max_q = seq_q if max_seqlen_q is None else min(max_seqlen_q, seq_q)
    max_k = seq_k if max_seqlen_k is None else min(max_seqlen_k, seq_k)
    if q_offset is not None and q_offset >= max_k - 1:
        causal = False  # the first query already sees every key: one decoded token, for example
    if not causal:
        q_offset = None if packed else seq_k - seq_q
    same = not packed
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        same = cu_seqlens_q.data_ptr() == cu_seqlens_k.data_ptr() and cu_seqlens_q.shape == cu_seqlens_k.shape
    return AttentionCall(
        device=q.device,
        dtype=q.dtype,
        batch=cu_seqlens_q.numel() - 1 if cu_seqlens_q is not None else q.shape[0],
        seq_q=seq_q,
        seq_k=seq_k,
        num_heads=q.shape[-2],
        num_kv_heads=k.shape[-2],
        head_dim=q.shape[-1],
        causal=causal,
        q_offset=q_offset,
        packed=packed,
        same_documents=same and (packed or seq_q == seq_k),
        max_q=max_q,
        max_k=max_k,
    )


def check_tensors(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> None:
    """Raise ValueError on shapes, types or devices that no backend could serve. Reads no device memory."""
    packed = cu_seqlens_q is not None
    if packed != (cu_seqlens_k is not None):
        raise ValueError("cu_seqlens_q and cu_seqlens_k come together: one is given and the other is None")
    layout = "(T, H, D) for packed documents" if packed else "(B, S, H, D)"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != (3 if packed else 4):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {layout}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, but q is {q.dtype} on {q.device}; they must agree")
    if not q.dtype.is_floating_point or q.dtype.itemsize < 2:
        raise ValueError(f"attention takes float16, bfloat16, float32 or float64, not {q.dtype}")
    if k.shape != v.shape:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must have one shape")
    if q.shape[-1] != k.shape[-1] or not 1 <= q.shape[-1] <= 256:
        raise ValueError(f"head width is {q.shape[-1]} in q and {k.shape[-1]} in k; they must be equal, 1 to 256")
    if k.shape[-2] < 1 or q.shape[-2] < 1 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"{q.shape[-2]} query heads are no multiple of {k.shape[-2]} key/value heads")
    if not packed and q.shape[0] != k.shape[0]:
        raise ValueError(f"q has batch {q.shape[0]} and k has batch {k.shape[0]}; they must be equal")
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu.dtype != torch.int32 or cu.dim() != 1 or cu.numel() < 1 or cu.device != q.device:
            raise ValueError(
                f"{name} is {cu.dtype} {tuple(cu.shape)} on {cu.device}; expected int32 (documents + 1,) on {q.device}"
            )
    if cu_seqlens_q.numel() != cu_seqlens_k.numel():
        raise ValueError(
            f"cu_seqlens_q has {cu_seqlens_q.numel()} entries and cu_seqlens_k {cu_seqlens_k.numel()}; "
            "they must describe the same documents"
        )


def check_document_bounds(name: str, cu_seqlens: Tensor, total: int) -> list[int]:
    """The bounds as Python numbers; ValueError unless 0 = cu[0] <= cu[1] <= ... <= T. Only for tensors on the CPU."""
    bounds = [int(x) for x in cu_seqlens.tolist()]
    if bounds[0] != 0 or bounds[-1] > total or any(a > b for a, b in pairwise(bounds)):
        raise ValueError(f"{name} = {bounds} must start at 0, never fall, and end at or before {total} tokens")
    return bounds
