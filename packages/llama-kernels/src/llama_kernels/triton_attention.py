"""Flash attention forward in Triton: causal, grouped heads, packed documents, log-sum-exp.

    m' = max(m, max_j S_j)     l' = l exp(m - m') + sum_j exp(S_j - m')     acc' = acc exp(m - m') + exp(S - m') v

over tiles of keys, then out = acc / l and lse = m + log l (FlashAttention-2, arXiv:2307.08691, algorithm 1). Powers
are of two: log2(e) / sqrt(D) is folded into one multiplication. The loop over the tiles that every row sees in full
has no mask; a second one handles the diagonal and the last, partial tile. Loads are plain pointers, which Triton
turns into asynchronous copies `num_stages` deep. Shape legend: attention_call.py; tile sizes: triton_tiles.py.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llama_kernels.attention_call import AttentionCall
from llama_kernels.compat import cdiv, device_guard, next_power_of_2, tl, triton
from llama_kernels.triton_tiles import (
    LOG2_E,
    Tile,
    bounds_or_none,
    compute_type,
    forward_tile,
    heads_in_cache,
)


@triton.jit
def find_tile(cu_q_ptr, cu_k_ptr, documents, total_q, total_k, slot, BY_KEYS: tl.constexpr, TILE: tl.constexpr,
              DOCUMENTS: tl.constexpr):  # fmt: skip
    """The slot-th tile of TILE rows over all documents: (q start, q length, k start, k length, first row or -1).

    There are two documents more than the caller's: the queries behind the last one, which see no key, and the keys
    behind the last one, which no query sees. So every row of every output is written, whatever the bounds leave over,
    and no length is read on the host.
    """
    i = tl.arange(0, DOCUMENTS)
    q_start = tl.load(cu_q_ptr + i, mask=i <= documents, other=total_q)
    k_start = tl.load(cu_k_ptr + i, mask=i <= documents, other=total_k)
    q_end = tl.load(cu_q_ptr + i + 1, mask=i < documents, other=total_q)
    k_end = tl.load(cu_k_ptr + i + 1, mask=i < documents, other=total_k)
    claimed = tl.load(cu_k_ptr + documents)
    k_end = tl.where(i == documents, claimed, k_end)
    k_start = tl.where(i == documents + 1, claimed, k_start)
    if BY_KEYS:
        tiles = (k_end - k_start + TILE - 1) // TILE
    else:
        tiles = (q_end - q_start + TILE - 1) // TILE
    ends = tl.cumsum(tiles, 0)
    mine = (ends > slot) & (ends - tiles <= slot)
    first = tl.max(tl.where(mine, (slot - ends + tiles) * TILE, -1), 0)
    q_from, q_to = tl.sum(tl.where(mine, q_start, 0), 0), tl.sum(tl.where(mine, q_end, 0), 0)
    k_from, k_to = tl.sum(tl.where(mine, k_start, 0), 0), tl.sum(tl.where(mine, k_end, 0), 0)
    return q_from, q_to - q_from, k_from, k_to - k_from, first


@triton.jit
def head_and_tile(pid, tiles, heads, SECTION: tl.constexpr):
    """Order of the programs: SECTION heads at a time (their keys stay in L2), tile by tile across those heads."""
    section = pid // (SECTION * tiles)
    rest = pid % (SECTION * tiles)
    width = tl.minimum(SECTION, heads - section * SECTION)
    return section * SECTION + rest % width, rest // width


@triton.jit
def load_tile(tile, rows, d, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, COMPUTE: tl.constexpr):
    """Rows of D channels; channels D .. BLOCK_D, and rows that are not `rows` where MASKED, come as zeros."""
    if MASKED:
        x = tl.load(tile, mask=rows[:, None] & (d < D)[None, :], other=0.0)
    elif D < BLOCK_D:
        x = tl.load(tile, mask=(d < D)[None, :], other=0.0)
    else:
        x = tl.load(tile)
    return x.to(COMPUTE)


@triton.jit
def _attend(acc, total, top, q, k_ptr, v_ptr, k_row, v_row, first, last, limit, scale_log2, D: tl.constexpr,
            BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, COMPUTE: tl.constexpr):  # fmt: skip
    """Take the keys first .. last into account; limit (rows,) is the last key that each row sees."""
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    k_tile = k_ptr + tl.cast(first, tl.int64) * k_row + (n[:, None] * k_row + d[None, :])
    v_tile = v_ptr + tl.cast(first, tl.int64) * v_row + (n[:, None] * v_row + d[None, :])
    for start in tl.range(first, last, BLOCK_N):
        k = load_tile(k_tile, start + n < last, d, D, BLOCK_D, MASKED, COMPUTE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            scores = tl.where((start + n)[None, :] <= limit[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
        if MASKED:  # a row that has seen no key yet: subtract 0, since -inf - -inf is NaN
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        else:
            shift = new_top
        p = tl.exp2(scores * scale_log2 - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None]
        v = load_tile(v_tile, start + n < last, d, D, BLOCK_D, MASKED, COMPUTE)
        acc = tl.dot(p.to(COMPUTE), v, acc, input_precision="ieee")
        top = new_top
        k_tile += BLOCK_N * k_row
        v_tile += BLOCK_N * v_row
    return acc, total, top


@triton.jit(do_not_specialize=["documents", "seq_q", "seq_k", "heads", "heads_in_all", "tiles", "offset"])
def _forward_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, q_batch, q_row, q_head, k_batch, k_row,
                    k_head, v_batch, v_row, v_head, documents, seq_q, seq_k, heads, heads_in_all, tiles, offset,
                    scale_log2, GROUP: tl.constexpr, CAUSAL: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
                    PACKED: tl.constexpr, DOCUMENTS: tl.constexpr, SECTION: tl.constexpr, D: tl.constexpr,
                    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                    COMPUTE: tl.constexpr):  # fmt: skip
    # Late tiles of a causal call have the most keys: they start first, so that no long one is left for the end.
    bh, tile = head_and_tile(tl.program_id(0), tiles, heads_in_all, SECTION)
    tile = tiles - 1 - tile
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    q_ptr += b * q_batch + h * q_head
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
    q = load_tile(q_ptr + rows[:, None] * q_row + d[None, :], m < q_len, d, D, BLOCK_D, True, COMPUTE)

    limit = m * 0 + (k_len - 1)
    last, full = k_len, k_len // BLOCK_N * BLOCK_N
    if CAUSAL:
        limit = tl.minimum(limit, m + offset)
        last = tl.maximum(tl.minimum(k_len, row + BLOCK_M + offset), 0)  # the tile's last row sees no more
        full = tl.maximum(tl.minimum(k_len, row + offset + 1), 0) // BLOCK_N * BLOCK_N  # its first row sees these
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    acc, total, top = _attend(acc, total, top, q, k_ptr, v_ptr, k_row, v_row, 0, full, limit, scale_log2,
                              D, BLOCK_N, BLOCK_D, False, COMPUTE)  # fmt: skip
    acc, total, top = _attend(acc, total, top, q, k_ptr, v_ptr, k_row, v_row, full, last, limit, scale_log2,
                              D, BLOCK_N, BLOCK_D, True, COMPUTE)  # fmt: skip
    empty = total == 0.0  # rows without keys
    total = tl.where(empty, 1.0, total)
    acc = acc / total[:, None]
    lse = tl.where(empty, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)  # ln 2
    out_rows = (b * seq_q + rows) * heads + h  # packed calls have b = 0
    inside = (m < q_len)[:, None] & (d < D)[None, :]
    tl.store(out_ptr + out_rows[:, None] * D + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + bh.to(tl.int64) * seq_q + rows, lse, mask=m < q_len)


def layout_arguments(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """(batch, row, head) strides of q, k and v; packed tensors are one batch entry."""
    strides: list[int] = []
    for x in (q, k, v):
        strides += [0, *x.stride()[:2]] if call.packed else x.stride()[:3]
    return tuple(strides)


def triton_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """(out like q, lse float32). `tile` overrides the measured table (tuning and tests)."""
    tile = tile or forward_tile(call)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(call.lse_shape, dtype=torch.float32, device=q.device)
    documents = call.batch if call.packed else 0
    tiles = cdiv(call.seq_q, tile.block_m) + (documents + 1 if call.packed else 0)
    heads_in_all = call.num_heads * (1 if call.packed else call.batch)
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages}
    with device_guard(q):
        _forward_kernel[(tiles * heads_in_all,)](
            q, k, v, out, lse, *bounds_or_none(cu_q, cu_k, lse), *layout_arguments(call, q, k, v),
            documents, call.seq_q, call.seq_k, call.num_heads, heads_in_all, tiles, call.q_offset or 0,
            call.scale * LOG2_E, GROUP=call.group, CAUSAL=call.causal, BOTTOM_RIGHT=call.q_offset is None,
            PACKED=call.packed, DOCUMENTS=next_power_of_2(documents + 2), SECTION=heads_in_cache(call),
            D=call.head_dim, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            BLOCK_D=max(16, next_power_of_2(call.head_dim)), COMPUTE=compute_type(call.dtype), **options,
        )  # fmt: skip
    return out, lse
