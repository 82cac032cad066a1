"""Attention over a paged key/value cache in Triton, split over the keys, and the joining of the splits.

A program takes some queries of one sequence, all query heads that share one key head, and one stretch of the keys: each
key is read once for its whole group of heads. A decode step is a tile with one query in it, so prompts and decode steps
mix in one launch. Long sequences are cut into `splits` stretches, or a single sequence would keep only K of the
multiprocessors busy (Flash-Decoding, Dao et al. 2023); partial results are float32 and joined as in merge.py.

Legend: T query tokens of all sequences, B sequences, H query heads, K key heads, D head width.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
from torch import Tensor

from llama_kernels.attention_call import dense_rows
from llama_kernels.compat import INTERPRETING, cdiv, device_guard, multiprocessors, next_power_of_2, tl, triton
from llama_kernels.one_row import launch_options, let_next_start, wait_for_previous
from llama_kernels.triton_tiles import LOG2_E, compute_type


@triton.jit
def _over_pages(acc, total, top, q, table_ptr, k_ptr, v_ptr, k_page, k_row, v_page, v_row, first, last, limit,
                scale_log2, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                MASKED: tl.constexpr, COMPUTE: tl.constexpr):  # fmt: skip
    """Take the keys first .. last into account; limit (rows,) is the last key that each row sees."""
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    for start in tl.range(first, last, BLOCK_N):
        key = start + n
        if MASKED:
            page = tl.load(table_ptr + key // PAGE, mask=key < last, other=0).to(tl.int64)
            inside = (key < last)[:, None] & (d < D)[None, :]
        else:
            page = tl.load(table_ptr + key // PAGE).to(tl.int64)
            inside = (n >= 0)[:, None] & (d < D)[None, :]
        k_tile = k_ptr + (page * k_page + (key % PAGE) * k_row)[:, None] + d[None, :]
        v_tile = v_ptr + (page * v_page + (key % PAGE) * v_row)[:, None] + d[None, :]
        if MASKED or D < BLOCK_D:
            k = tl.load(k_tile, mask=inside, other=0.0).to(COMPUTE)
            v = tl.load(v_tile, mask=inside, other=0.0).to(COMPUTE)
        else:
            k = tl.load(k_tile).to(COMPUTE)
            v = tl.load(v_tile).to(COMPUTE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if MASKED:
            scores = tl.where(key[None, :] <= limit[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
        p = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(COMPUTE), v, acc * fade[:, None], input_precision="ieee")
        top = new_top
    return acc, total, top


@triton.jit(do_not_specialize=["sequences", "tokens"])
def _paged_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, table_ptr, lens_ptr, cu_ptr, q_token, q_head, k_page, k_row,
                  k_head, v_page, v_row, v_head, table_row, k_scale_ptr, v_scale_ptr, sequences, tokens, kv_heads,
                  splits, scale_log2,
                  GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DECODE: tl.constexpr, SEQUENCES: tl.constexpr,
                  SPLIT: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, COMPUTE: tl.constexpr, SCALED: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """Output of one tile over one stretch of keys; where SPLIT, a partial one (splits, T, H, D) with its lse."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    pid = tl.program_id(0)
    split, hk, slot = pid % splits, pid // splits % kv_heads, pid // (splits * kv_heads)
    if DECODE:
        sequence, first, q_from, q_len = slot, slot * 0, slot, slot * 0 + 1
    else:  # the slot-th tile of BLOCK_M // GROUP_PAD queries, counted over all sequences
        i = tl.arange(0, SEQUENCES)
        starts = tl.load(cu_ptr + i, mask=i < sequences, other=0)
        lengths = tl.load(cu_ptr + i + 1, mask=i < sequences, other=0) - starts
        tiles = (lengths * GROUP_PAD + BLOCK_M - 1) // BLOCK_M
        ends = tl.cumsum(tiles, 0)
        mine = (ends > slot) & (ends - tiles <= slot)
        sequence = tl.max(tl.where(mine, i, -1), 0)
        if sequence < 0:
            return
        first = tl.sum(tl.where(mine, slot - ends + tiles, 0), 0) * (BLOCK_M // GROUP_PAD)
        q_from, q_len = tl.sum(tl.where(mine, starts, 0), 0), tl.sum(tl.where(mine, lengths, 0), 0)
    row, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query, g = first + row // GROUP_PAD, row % GROUP_PAD
    valid = (query < q_len) & (g < GROUP)
    token, h = (q_from + query).to(tl.int64), hk * GROUP + g
    inside = valid[:, None] & (d < D)[None, :]
    q_tile = q_ptr + (token * q_token + h * q_head)[:, None] + d[None, :]
    q = tl.load(q_tile, mask=inside, other=0.0).to(COMPUTE)

    # The last query of a sequence sees all its keys. Keys are cut at multiples of BLOCK_N into equal stretches.
    k_len = tl.load(lens_ptr + sequence)
    limit = query + (k_len - q_len)
    seen = tl.maximum(tl.minimum(first + BLOCK_M // GROUP_PAD, q_len) + k_len - q_len, 0)
    stretch = tl.cdiv(tl.cdiv(seen, BLOCK_N), splits) * BLOCK_N
    begin = tl.minimum(split * stretch, seen)
    end = tl.minimum(begin + stretch, seen)
    full = tl.maximum(tl.minimum(end, first + k_len - q_len + 1), begin)  # the tile's first query sees these
    full = begin + (full - begin) // BLOCK_N * BLOCK_N
    table_ptr += sequence.to(tl.int64) * table_row
    k_ptr += hk.to(tl.int64) * k_head
    v_ptr += hk.to(tl.int64) * v_head
    if SCALED:  # of the head's keys: taken into the scale of the scores
        scale_log2 *= tl.load(k_scale_ptr + hk)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    acc, total, top = _over_pages(acc, total, top, q, table_ptr, k_ptr, v_ptr, k_page, k_row, v_page, v_row, begin,
                                  full, limit, scale_log2, PAGE, D, BLOCK_N, BLOCK_D, False, COMPUTE)  # fmt: skip
    acc, total, top = _over_pages(acc, total, top, q, table_ptr, k_ptr, v_ptr, k_page, k_row, v_page, v_row, full, end,
                                  limit, scale_log2, PAGE, D, BLOCK_N, BLOCK_D, True, COMPUTE)  # fmt: skip
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    if SCALED:
        acc *= tl.load(v_scale_ptr + hk)
    to = token * (kv_heads * GROUP) + h
    if SPLIT:
        to += split.to(tl.int64) * tokens * (kv_heads * GROUP)
        tl.store(lse_ptr + to, tl.where(empty, float("-inf"), top + tl.log2(total)), mask=valid)
    tl.store(out_ptr + to[:, None] * D + d[None, :], (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "splits"])
def _join_kernel(part_ptr, lse_ptr, out_ptr, rows, splits, SPLITS: tl.constexpr, D: tl.constexpr,
                 BLOCK_D: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One row of the output from its parts (splits, rows, D) and their base-2 log-sum-exp (splits, rows)."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    lse = tl.load(lse_ptr + s.to(tl.int64) * rows + row, mask=s < splits, other=float("-inf"))
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    inside = (lse > float("-inf"))[:, None] & (d < D)[None, :]  # parts without keys were perhaps never written
    part = tl.load(part_ptr + (s.to(tl.int64) * rows + row)[:, None] * D + d[None, :], mask=inside, other=0.0)
    total = tl.sum(weight, 0)
    out = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


def splits_for(programs: int, slots: int, most: int) -> int:
    """Into how many stretches to cut the keys so that `programs` tiles fill `slots` places in whole rounds.

    The fewest that waste at most a tenth of the last round: every stretch more costs a little in the joining.
    """
    waste = {}
    for splits in range(1, most + 1):
        rounds = cdiv(programs * splits, slots)
        waste[splits] = 1 - programs * splits / (rounds * slots)
        if waste[splits] <= 0.1:
            return splits
    return min(waste, key=lambda splits: waste[splits])


def triton_paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    splits: int | None = None,
    tile: tuple[int, int, int, int] | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """`paged_attention` on checked, non-empty arguments. `splits` and `tile` override the choice (tuning and tests)."""
    tokens, heads, width = q.shape
    kv_heads, page = k_cache.shape[2], k_cache.shape[1]
    group = heads // kv_heads
    group_pad = next_power_of_2(group)
    q = dense_rows(q)
    decode = cu_seqlens_q is None
    if tile is None:
        wide = q.dtype == torch.float32 or width > 128
        if INTERPRETING:
            tile = (max(16, group_pad), 16, 4, 1)
        elif decode or max_seqlen_q * group_pad <= 16:  # bound by memory: many small programs, four to a processor
            tile = (max(16, group_pad), 32 if wide else 64, 2, 3)
        else:
            tile = (max(64, group_pad), 32 if wide else 64, 4, 2 if wide else 3)
    block_m, block_n, warps, stages = tile
    sequences = seq_lens.numel()
    tiles = sequences if decode else sequences + tokens * group_pad // block_m
    if splits is None:
        most = max(1, min(128, cdiv(max_seqlen_k, 2 * block_n)))  # none shorter than two tiles
        splits = splits_for(tiles * kv_heads, 4 * multiprocessors(q), most)
    block_d = max(16, next_power_of_2(width))
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if decode else q.new_zeros(q.shape)
    part, lse = out, out
    if splits > 1:
        part = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
        lse = torch.empty((splits, tokens, heads), dtype=torch.float32, device=q.device)
        if not decode:  # rows behind the last sequence belong to no tile
            lse.fill_(float("-inf"))
    with device_guard(q):
        _paged_kernel[(tiles * kv_heads * splits,)](
            q, k_cache, v_cache, part, lse, block_tables, seq_lens, seq_lens if decode else cu_seqlens_q,
            *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], block_tables.stride(0),
            seq_lens if k_scale is None else k_scale, seq_lens if v_scale is None else v_scale,
            sequences, tokens, kv_heads, splits, width**-0.5 * LOG2_E, GROUP=group, GROUP_PAD=group_pad,
            DECODE=decode, SEQUENCES=next_power_of_2(sequences), SPLIT=splits > 1, PAGE=page, D=width,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, COMPUTE=compute_type(q.dtype),
            SCALED=k_scale is not None, num_warps=warps, num_stages=stages, **launch_options(q),
        )  # fmt: skip
        if splits > 1:
            _join_kernel[(tokens * heads,)](
                part, lse, out, tokens * heads, splits, SPLITS=next_power_of_2(splits), D=width, BLOCK_D=block_d,
                num_warps=4, **launch_options(q),
            )  # fmt: skip
    return out
