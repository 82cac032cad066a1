"""Flash attention backward in Triton: the gradients of the forward pass in triton_attention.py.

    P = exp(S - lse)        dv = P^T dout        dP = dout v^T        dS = P * (dP - delta)
    dk = dS^T q / sqrt(D)        dq = dS k / sqrt(D)

with delta = rowsum(dout * out) (FlashAttention-2, arXiv:2307.08691, algorithm 2). One kernel owns a tile of keys and
runs over the queries, one owns a tile of queries and runs over the keys. That recomputes S and dP (7 products and
not 5) but adds nothing up in memory: no atomic additions, so two runs agree bit by bit. The key kernel works on S^T,
so that P^T and dS^T are left operands of the next products and stay in registers. `out` and `lse` may be those of a
longer row than k holds: that is a step of ring attention. Shape legend: attention_call.py.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
from torch import Tensor

from llama_kernels.attention_call import AttentionCall
from llama_kernels.compat import cdiv, device_guard, next_power_of_2, tl, triton
from llama_kernels.triton_attention import find_tile, head_and_tile, layout_arguments, load_tile
from llama_kernels.triton_tiles import (
    LOG2_E,
    Tile,
    backward_tiles,
    bounds_or_none,
    compute_type,
    heads_in_cache,
)


@triton.jit(do_not_specialize=["rows", "seq_q", "heads"])
def _rows_kernel(out_ptr, dout_ptr, lse_ptr, shift_ptr, delta_ptr, rows, seq_q, heads, scale, D: tl.constexpr,
                 BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """What each row adds to its products, (B, H, S), from dense (B, S, H, D): -delta to dP, -lse to S before scaling.

    A row without keys gets -inf, so that its P = exp2(-inf) is 0 with no further test."""
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    inside = (r < rows)[:, None] & (d < D)[None, :]
    out = tl.load(out_ptr + r[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + r[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    token, h = r // heads, r % heads
    to = (token // seq_q * heads + h) * seq_q + token % seq_q
    tl.store(delta_ptr + to, -tl.sum(out * dout, 1), mask=r < rows)
    lse = tl.load(lse_ptr + to, mask=r < rows, other=0.0)
    tl.store(shift_ptr + to, tl.where(lse == float("-inf"), lse, -lse / scale), mask=r < rows)


@triton.jit
def _over_queries(dk, dv, k, v, q_ptr, dout_ptr, shift_ptr, delta_ptr, q_row, dout_row, first, last, q_len, limit,
                  scale_log2, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                  MASKED: tl.constexpr, COMPUTE: tl.constexpr):  # fmt: skip
    """Add what the query rows first .. last contribute to dk, dv of the keys."""
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    q_tile = q_ptr + tl.cast(first, tl.int64) * q_row + (m[:, None] * q_row + d[None, :])
    dout_tile = dout_ptr + tl.cast(first, tl.int64) * dout_row + (m[:, None] * dout_row + d[None, :])
    zero = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in tl.range(first, last, BLOCK_M):
        inside = start + m < q_len
        q = load_tile(q_tile, inside, d, D, BLOCK_D, MASKED, COMPUTE)
        dout = load_tile(dout_tile, inside, d, D, BLOCK_D, MASKED, COMPUTE)
        if MASKED:
            shift = tl.load(shift_ptr + start + m, mask=inside, other=float("-inf"))
            delta = tl.load(delta_ptr + start + m, mask=inside, other=0.0)
        else:
            shift = tl.load(shift_ptr + start + m)
            delta = tl.load(delta_ptr + start + m)
        # -lse and -delta are what the products are added to: they take no registers of their own.
        scores_t = tl.dot(k, tl.trans(q), zero + shift[None, :], input_precision="ieee")
        p_t = tl.exp2(scores_t * scale_log2)
        if MASKED:
            p_t = tl.where(limit[:, None] <= (start + m)[None, :], p_t, 0.0)
        dv = tl.dot(p_t.to(COMPUTE), dout, dv, input_precision="ieee")
        ds_t = p_t * tl.dot(v, tl.trans(dout), zero + delta[None, :], input_precision="ieee")
        dk = tl.dot(ds_t.to(COMPUTE), q, dk, input_precision="ieee")
        q_tile += BLOCK_M * q_row
        dout_tile += BLOCK_M * dout_row
    return dk, dv


@triton.jit(do_not_specialize=["documents", "seq_q", "seq_k", "heads", "kv_heads", "heads_in_all", "tiles", "offset"])
def _key_kernel(q_ptr, k_ptr, v_ptr, dout_ptr, shift_ptr, delta_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, q_batch, q_row,
                q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, documents, seq_q, seq_k, heads, kv_heads,
                heads_in_all, tiles, offset, scale, scale_log2, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
                BOTTOM_RIGHT: tl.constexpr, PACKED: tl.constexpr, DOCUMENTS: tl.constexpr, SECTION: tl.constexpr,
                D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                COMPUTE: tl.constexpr):  # fmt: skip
    """dk and dv of one tile of keys of one key head, over all query heads of its group. Early keys, seen by most
    queries, start first."""
    bh, tile = head_and_tile(tl.program_id(0), tiles, heads_in_all, SECTION)
    b, hk = (bh // kv_heads).to(tl.int64), (bh % kv_heads).to(tl.int64)
    q_from, q_len, k_from, k_len, row = tile * 0, seq_q, tile * 0, seq_k, tile * BLOCK_N
    if PACKED:
        q_from, q_len, k_from, k_len, row = find_tile(
            cu_q_ptr, cu_k_ptr, documents, seq_q, seq_k, tile, True, BLOCK_N, DOCUMENTS
        )
        if row < 0:
            return
    if BOTTOM_RIGHT:
        offset = k_len - q_len
    keys, d = row + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    rows = (k_from + keys).to(tl.int64)
    k_tile = k_ptr + b * k_batch + hk * k_head + rows[:, None] * k_row + d[None, :]
    v_tile = v_ptr + b * v_batch + hk * v_head + rows[:, None] * v_row + d[None, :]
    k = load_tile(k_tile, keys < k_len, d, D, BLOCK_D, True, COMPUTE)
    v = load_tile(v_tile, keys < k_len, d, D, BLOCK_D, True, COMPUTE)

    # Queries from `first` on see the tile's first key, from `full` on all of it; behind `whole` is a partial tile.
    first, full, whole, limit = row * 0, row * 0, q_len // BLOCK_M * BLOCK_M, keys * 0
    if CAUSAL:
        limit = keys - offset
        first = tl.minimum(tl.maximum(row - offset, 0), q_len) // BLOCK_M * BLOCK_M
        full = (tl.maximum(row + BLOCK_N - 1 - offset, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
        full = tl.maximum(tl.minimum(full, whole), first)
        whole = tl.maximum(whole, full)
    q_from_64 = q_from.to(tl.int64)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    for g in range(GROUP):
        h = hk * GROUP + g
        q_head_ptr = q_ptr + b * q_batch + h * q_head + q_from_64 * q_row
        dout_head_ptr = dout_ptr + ((b * seq_q + q_from_64) * heads + h) * D
        shift_head_ptr = shift_ptr + (b * heads + h) * seq_q + q_from_64
        delta_head_ptr = delta_ptr + (b * heads + h) * seq_q + q_from_64
        if CAUSAL:
            dk, dv = _over_queries(dk, dv, k, v, q_head_ptr, dout_head_ptr, shift_head_ptr, delta_head_ptr, q_row,
                                   heads * D, first, full, q_len, limit, scale_log2, D, BLOCK_M, BLOCK_N, BLOCK_D,
                                   True, COMPUTE)  # fmt: skip
        dk, dv = _over_queries(dk, dv, k, v, q_head_ptr, dout_head_ptr, shift_head_ptr, delta_head_ptr, q_row,
                               heads * D, full, whole, q_len, limit, scale_log2, D, BLOCK_M, BLOCK_N, BLOCK_D, False,
                               COMPUTE)  # fmt: skip
        dk, dv = _over_queries(dk, dv, k, v, q_head_ptr, dout_head_ptr, shift_head_ptr, delta_head_ptr, q_row,
                               heads * D, whole, q_len, q_len, limit, scale_log2, D, BLOCK_M, BLOCK_N, BLOCK_D, True,
                               COMPUTE)  # fmt: skip
    to = ((b * seq_k + rows) * kv_heads + hk)[:, None] * D + d[None, :]
    inside = (keys < k_len)[:, None] & (d < D)[None, :]
    tl.store(dk_ptr + to, (dk * scale).to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + to, dv.to(dv_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _over_keys(dq, q, dout, shift, delta, k_ptr, v_ptr, k_row, v_row, first, last, limit, scale_log2, D: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
               COMPUTE: tl.constexpr):  # fmt: skip
    """Add what the keys first .. last contribute to dq."""
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    zero = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    k_tile = k_ptr + tl.cast(first, tl.int64) * k_row + (n[:, None] * k_row + d[None, :])
    v_tile = v_ptr + tl.cast(first, tl.int64) * v_row + (n[:, None] * v_row + d[None, :])
    for start in tl.range(first, last, BLOCK_N):
        k = load_tile(k_tile, start + n < last, d, D, BLOCK_D, MASKED, COMPUTE)
        v = load_tile(v_tile, start + n < last, d, D, BLOCK_D, MASKED, COMPUTE)
        scores = tl.dot(q, tl.trans(k), zero + shift[:, None], input_precision="ieee")
        p = tl.exp2(scores * scale_log2)
        if MASKED:
            p = tl.where((start + n)[None, :] <= limit[:, None], p, 0.0)
        ds = p * tl.dot(dout, tl.trans(v), zero + delta[:, None], input_precision="ieee")
        dq = tl.dot(ds.to(COMPUTE), k, dq, input_precision="ieee")
        k_tile += BLOCK_N * k_row
        v_tile += BLOCK_N * v_row
    return dq


@triton.jit(do_not_specialize=["documents", "seq_q", "seq_k", "heads", "heads_in_all", "tiles", "offset"])
def _query_kernel(q_ptr, k_ptr, v_ptr, dout_ptr, shift_ptr, delta_ptr, dq_ptr, cu_q_ptr, cu_k_ptr, q_batch, q_row,
                  q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, documents, seq_q, seq_k, heads, heads_in_all,
                  tiles, offset, scale, scale_log2, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
                  BOTTOM_RIGHT: tl.constexpr, PACKED: tl.constexpr, DOCUMENTS: tl.constexpr, SECTION: tl.constexpr,
                  D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                  COMPUTE: tl.constexpr):  # fmt: skip
    """dq of one tile of queries: the forward pass's walk over the keys."""
    bh, tile = head_and_tile(tl.program_id(0), tiles, heads_in_all, SECTION)
    tile = tiles - 1 - tile
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    k_ptr += b * k_batch + h // GROUP * k_head
    v_ptr += b * v_batch + h // GROUP * v_head
    q_from, q_len, k_len, row = tile * 0, seq_q, seq_k, tile * BLOCK_M
    if PACKED:
        q_from, q_len, k_from, k_len, row = find_tile(
            cu_q_ptr, cu_k_ptr, documents, seq_q, seq_k, tile, False, BLOCK_M, DOCUMENTS
        )
        k_ptr += k_from.to(tl.int64) * k_row
        v_ptr += k_from.to(tl.int64) * v_row
        if row < 0:
            return
    if BOTTOM_RIGHT:
        offset = k_len - q_len
    m, d = row + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    rows = (q_from + m).to(tl.int64)
    here = ((b * seq_q + rows) * heads + h)[:, None] * D + d[None, :]
    q_tile = q_ptr + b * q_batch + h * q_head + rows[:, None] * q_row + d[None, :]
    q = load_tile(q_tile, m < q_len, d, D, BLOCK_D, True, COMPUTE)
    dout = load_tile(dout_ptr + here, m < q_len, d, D, BLOCK_D, True, COMPUTE)
    to = bh.to(tl.int64) * seq_q + rows
    shift = tl.load(shift_ptr + to, mask=m < q_len, other=float("-inf"))
    delta = tl.load(delta_ptr + to, mask=m < q_len, other=0.0)

    limit = m * 0 + (k_len - 1)
    last, full = k_len, k_len // BLOCK_N * BLOCK_N
    if CAUSAL:
        limit = tl.minimum(limit, m + offset)
        last = tl.maximum(tl.minimum(k_len, row + BLOCK_M + offset), 0)
        full = tl.maximum(tl.minimum(k_len, row + offset + 1), 0) // BLOCK_N * BLOCK_N
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    dq = _over_keys(dq, q, dout, shift, delta, k_ptr, v_ptr, k_row, v_row, 0, full, limit, scale_log2, D, BLOCK_M,
                    BLOCK_N, BLOCK_D, False, COMPUTE)  # fmt: skip
    dq = _over_keys(dq, q, dout, shift, delta, k_ptr, v_ptr, k_row, v_row, full, last, limit, scale_log2, D, BLOCK_M,
                    BLOCK_N, BLOCK_D, True, COMPUTE)  # fmt: skip
    inside = (m < q_len)[:, None] & (d < D)[None, :]
    tl.store(dq_ptr + here, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)


def triton_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: AttentionCall,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    tiles: tuple[Tile, Tile] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv). dout, out and lse must be dense. `tiles` overrides the measured table (tuning and tests)."""
    for_keys, for_queries = tiles or backward_tiles(call)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    shift, delta = torch.empty_like(lse), torch.empty_like(lse)
    batch = 1 if call.packed else call.batch
    documents = call.batch if call.packed else 0
    extra = documents + 1 if call.packed else 0
    section = heads_in_cache(call)
    block_d = max(16, next_power_of_2(call.head_dim))
    shared = {
        "GROUP": call.group, "CAUSAL": call.causal, "BOTTOM_RIGHT": call.q_offset is None, "PACKED": call.packed,
        "DOCUMENTS": next_power_of_2(documents + 2), "D": call.head_dim, "BLOCK_D": block_d,
        "COMPUTE": compute_type(call.dtype),
    }  # fmt: skip
    inputs = (*bounds_or_none(cu_q, cu_k, lse), *layout_arguments(call, q, k, v), documents, call.seq_q, call.seq_k)
    scales = (call.q_offset or 0, call.scale, call.scale * LOG2_E)
    with device_guard(q):
        rows = batch * call.seq_q * call.num_heads
        _rows_kernel[(cdiv(rows, 64),)](
            out, dout, lse, shift, delta, rows, call.seq_q, call.num_heads, call.scale,
            D=call.head_dim, BLOCK=64, BLOCK_D=block_d,
        )  # fmt: skip
        count = cdiv(call.seq_k, for_keys.block_n) + extra
        _key_kernel[(count * batch * call.num_kv_heads,)](
            q, k, v, dout, shift, delta, dk, dv, *inputs, call.num_heads, call.num_kv_heads,
            batch * call.num_kv_heads, count, *scales, **shared, SECTION=max(1, section // call.group),
            BLOCK_M=for_keys.block_m, BLOCK_N=for_keys.block_n, num_warps=for_keys.warps, num_stages=for_keys.stages,
        )  # fmt: skip
        count = cdiv(call.seq_q, for_queries.block_m) + extra
        _query_kernel[(count * batch * call.num_heads,)](
            q, k, v, dout, shift, delta, dq, *inputs, call.num_heads, batch * call.num_heads, count, *scales, **shared,
            SECTION=section, BLOCK_M=for_queries.block_m, BLOCK_N=for_queries.block_n, num_warps=for_queries.warps,
            num_stages=for_queries.stages,
        )  # fmt: skip
    return dq, dk, dv
