"""Attention over a paged key/value cache (PagedAttention, Kwon et al. 2023, arXiv:2309.06180).

The cache is a pool of pages; a block table says which pages, in order, hold a sequence's keys and values. Prompts,
parts of prompts and decode steps may be mixed in one call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llama_kernels.attention import attention_forward
from llama_kernels.attention_call import check_document_bounds
from llama_kernels.compat import runs_triton
from llama_kernels.operators import operator
from llama_kernels.triton_paged import triton_paged_attention
from llama_kernels.write_kv import check_scales, from_fp8


@operator("llama_kernels::paged_attention")
def _paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    if q.numel() == 0 or seq_lens.numel() == 0 or k_cache.numel() == 0 or block_tables.numel() == 0:
        return q.new_zeros(q.shape)
    if runs_triton(q):
        return triton_paged_attention(
            q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k,
            k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
    return gathered_attention(q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, k_scale, v_scale)


@_paged_attention.register_fake
def _(q, *_arguments):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape)


def gathered_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """The plain path: for each sequence, copy its pages side by side and attend. Reads the lengths to the host.

    Raises:
        ValueError: if a length or a page number is out of range (the GPU path cannot look without waiting).
    """
    lengths = seq_lens.tolist()
    cuts = list(range(len(lengths) + 1))
    if cu_seqlens_q is not None:
        cuts = check_document_bounds("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    pages, size = k_cache.shape[:2]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for i, length in enumerate(lengths):
        rows = slice(cuts[i], cuts[i + 1])
        if not 0 <= length <= block_tables.shape[1] * size:
            raise ValueError(f"seq_lens[{i}] = {length} must lie in 0 .. {block_tables.shape[1] * size}")
        table = block_tables[i, : -(-length // size)].long()
        if length and rows.stop > rows.start:
            if int(table.min()) < 0 or int(table.max()) >= pages:
                raise ValueError(f"block_tables[{i}] = {table.tolist()} must lie in 0 .. {pages - 1}")
            k = _gathered(k_cache, table, k_scale, q.dtype)[None, :length]
            v = _gathered(v_cache, table, v_scale, q.dtype)[None, :length]
            out[rows] = attention_forward(q[None, rows], k, v, causal=True)[0][0]
    return out


def _gathered(cache: Tensor, table: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The table's pages side by side, (tokens, K, D)."""
    if scale is None:
        return cache[table].flatten(0, 1)
    # As bytes: torch indexes no fp8.
    return from_fp8(cache.view(torch.uint8)[table].view(cache.dtype), scale, dtype).flatten(0, 1)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Causal attention of the newest tokens of some sequences over all their cached keys. Inference only: no gradient.

    The keys and values of the new tokens must be in the cache already (`write_kv`).

    Args:
        q: (T, H, D), the new tokens of sequence 0, then those of sequence 1, ...
        k_cache, v_cache: (pages, page size, K, D), any strides with dense D. H is a multiple of K.
        block_tables: (B, P) int32. Position t of sequence b is row t % page size of page
            block_tables[b, t // page size]. Entries past a sequence's last page are not read.
        seq_lens: (B,) int32, keys of each sequence, its new tokens included. 0 gives zero rows (padding of a batch).
        cu_seqlens_q: (B + 1,) int32, rows of q of each sequence; its last row is the sequence's last position.
            None is a decode step: T = B, one token each. Rows behind the last sequence are zero.
        max_seqlen_q: an upper bound on the new tokens of one sequence; None is T.
        max_seqlen_k: an upper bound on seq_lens, which says how finely to split the keys; None is P x page size. Keep
            it fixed where a CUDA graph is replayed.
        k_scale, v_scale: (K,) float32, for a cache of float8_e4m3fn that `write_kv` has filled with the same.

    Returns:
        (T, H, D) in the type of q. Nothing is read on the host from a GPU.

    Raises:
        ValueError: on shapes, types or devices that do not fit; on the CPU also for lengths or pages out of range.
    """
    if q.dim() != 3 or k_cache.dim() != 4 or k_cache.shape != v_cache.shape or q.shape[-1] != k_cache.shape[-1]:
        raise ValueError(
            f"q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)} "
            "must be (T, H, D) and twice (pages, page size, K, D)"
        )
    if k_cache.shape[2] < 1 or q.shape[1] % k_cache.shape[2] or not 1 <= q.shape[2] <= 256:
        raise ValueError(
            f"{q.shape[1]} query heads of width {q.shape[2]} on {k_cache.shape[2]} key heads: "
            "heads must be a multiple, and the width 1 to 256"
        )
    check_scales(k_cache, v_cache, k_scale, v_scale)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if (x.dtype != q.dtype and k_scale is None) or x.device != q.device or x.stride(-1) != 1:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}, strides {x.stride()}; expected {q.dtype} on {q.device}, dense D"
            )
    batch = seq_lens.numel()
    wanted = {"block_tables": (block_tables, 2), "seq_lens": (seq_lens, 1), "cu_seqlens_q": (cu_seqlens_q, 1)}
    for name, (y, dims) in wanted.items():
        if y is not None and (y.dtype != torch.int32 or y.dim() != dims or y.device != q.device or y.stride(-1) != 1):
            raise ValueError(f"{name} is {y.dtype} {tuple(y.shape)} on {y.device}; expected dense int32 on {q.device}")
    rows = q.shape[0] + 1 if cu_seqlens_q is None else cu_seqlens_q.numel()
    if block_tables.shape[0] != batch or rows != batch + 1:
        raise ValueError(
            f"{batch} lengths, block tables for {block_tables.shape[0]} sequences and query rows for {rows - 1}: "
            "the three must agree"
        )
    room = block_tables.shape[1] * k_cache.shape[1]
    out: Tensor = _paged_attention(
        q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q,
        min(q.shape[0], max_seqlen_q if max_seqlen_q is not None else q.shape[0]),
        min(room, max_seqlen_k if max_seqlen_k is not None else room),
        k_scale,
        v_scale,
    )  # fmt: skip
    return out
