"""Draw the next token of each row: temperature, top-k, top-p, min-p and the draw itself, in one launch without a sort.

The filters apply in transformers' order, temperature → top-k → top-p → min-p, and each is a threshold on the logit, so
together they are one: the largest of three. With w(x) = exp((x − max) / T),

    top-k: the k-th largest logit (its equals stay)         top-p: the largest t with Σ_{x ≥ t} w ≥ p · Σ_{top-k} w
    min-p: max + T · log(min_p)

A program owns a row and walks over it two or three times, rarely more; `threshold` says how a threshold is found.

The draw inverts the cumulative sum in two steps with a random number each, first over blocks and then inside one, so
that 24 random bits resolve even the rarest of 128k tokens. Random numbers are Philox of (seed, offset).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from collections.abc import Callable

import torch
from torch import Tensor

from llama_kernels import reference
from llama_kernels.compat import cdiv, device_guard, next_power_of_2, runs_triton, shared_memory, tl, triton
from llama_kernels.operators import operator
from llama_kernels.threshold import among_kept, key_of, load_sample, load_tokens, tally, threshold

BLOCK = 8192  # tokens per step of a walk, and tokens that may be left in a bracket
Setting = float | Tensor


@triton.jit
def _sample_kernel(
    logits_ptr, ids_ptr, kept_ptr, place_ptr, blocks_ptr, seeds_ptr, offsets_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row_stride, vocabulary,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    kept_ptr += row * BLOCK
    place_ptr += row * BLOCK
    blocks_ptr += row * BLOCKS
    lane = tl.arange(0, BLOCK)
    temperature = tl.load(temperature_ptr + row)
    inverse_t = 1.0 / tl.maximum(temperature, 1e-30)

    # About the largest logit, so that weights need no rescaling on the first walk.
    base = tl.max(load_sample(row_ptr, vocabulary, BLOCK), axis=0)
    base = tl.where(base == float("-inf"), 0.0, base)

    # First walk: the largest logit and its first place, each lane's largest, and the weight of everything.
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = lane
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, vocabulary, BLOCK, num_stages=STAGES):
        x = load_tokens(row_ptr, start + lane, vocabulary)
        place = tl.where(x > best, start + lane, place)
        best = tl.where(x > best, x, best)  # never NaN
        total += tl.exp(tl.minimum((x - base) * inverse_t, 80.0))
    top = tl.max(best, axis=0)
    greedy = tl.min(tl.where(best == top, place, vocabulary - 1), axis=0)
    if (temperature <= 0.0) | (top == float("-inf")) | (top != top):
        tl.store(ids_ptr + row, greedy.to(tl.int64))
    else:
        t = key_of(tl.full((), float("-inf"), tl.float32)).to(tl.int64) + 1  # −∞ is never drawn
        above = key_of(top).to(tl.int64) + 1
        rise = (top - base) * inverse_t
        mass = tl.sum(total, axis=0) * tl.exp(-rise)
        if rise > 60.0:  # the sample missed the peak, and weights were cut off
            _, _, mass, _ = tally(row_ptr, vocabulary, t, t, top, inverse_t, BLOCK, STAGES)
        kept, high = -1, above
        k = tl.load(top_k_ptr + row)
        if (k > 0) & (k < vocabulary):
            t, mass, kept, high = threshold(
                row_ptr, kept_ptr, place_ptr, blocks_ptr, vocabulary, t, top, inverse_t, k.to(tl.float32), best,
                k.to(tl.float32) / vocabulary, False, BLOCK, STAGES,
            )  # fmt: skip
        p = tl.load(top_p_ptr + row)
        if p < 1.0:
            if (kept >= 0) & (high == above):  # everything that top-k left has been gathered
                t, _ = among_kept(kept_ptr, kept, t, above, top, inverse_t, p * mass, True, BLOCK)
            else:
                t, mass, kept, high = threshold(
                    row_ptr, kept_ptr, place_ptr, blocks_ptr, vocabulary, t, top, inverse_t, p * mass, best, p,
                    True, BLOCK, STAGES,
                )  # fmt: skip
        min_p = tl.load(min_p_ptr + row)
        if min_p > 0.0:
            t = tl.maximum(t, key_of(top + tl.log(min_p) * temperature).to(tl.int64))
        t = tl.minimum(t, above - 1)  # the largest logit always stays
        limit = t.to(tl.int32)

        # What stays is, if tokens were gathered, some of those and all from high up, whose weight per block is known.
        gathered = (kept >= 0) & (t <= high)
        x = tl.load(kept_ptr + lane, mask=lane < tl.where(gathered, kept, 0), other=float("-inf"))
        kept_weight = tl.where(key_of(x) >= limit, tl.exp((x - top) * inverse_t), 0.0)
        kept_mass = tl.sum(kept_weight, axis=0)
        if not gathered:  # else a last walk weighs the blocks
            high = t
            for start in tl.range(0, vocabulary, BLOCK, num_stages=STAGES):
                x = load_tokens(row_ptr, start + lane, vocabulary)
                weight = tl.where(key_of(x) >= limit, tl.exp((x - top) * inverse_t), 0.0)
                tl.store(blocks_ptr + start // BLOCK, tl.sum(weight, axis=0))
            tl.debug_barrier()
        index = tl.arange(0, BLOCKS)
        block_weight = tl.load(
            blocks_ptr + index, mask=index * BLOCK < tl.where(high < above, vocabulary, 0), other=0.0
        )
        block_mass = tl.sum(block_weight, axis=0)

        # The draw: a block or the gathered tokens, then the token.
        seed, offset = tl.load(seeds_ptr + row), tl.load(offsets_ptr + row).to(tl.int32) * 2
        point = tl.rand(seed, offset) * (block_mass + kept_mass)
        uniform = tl.rand(seed, offset + 1)
        if (kept_mass > 0.0) & (point >= block_mass):
            token = tl.load(place_ptr + _invert(lane, kept_weight, uniform))
        else:
            block = _invert(index, block_weight, point / block_mass)
            x = load_tokens(row_ptr, block * BLOCK + lane, vocabulary)
            weight = tl.where(key_of(x) >= high.to(tl.int32), tl.exp((x - top) * inverse_t), 0.0)
            token = block * BLOCK + _invert(lane, weight, uniform)
        tl.store(ids_ptr + row, token.to(tl.int64))


@triton.jit
def _invert(index, weight, uniform):
    """The first index whose cumulative weight passes uniform · total; never one without weight."""
    cumulative = tl.cumsum(weight, axis=0)
    passed = (cumulative > uniform * tl.max(cumulative, axis=0)) & (weight > 0.0)
    last = tl.max(tl.where(weight > 0.0, index, 0), axis=0)
    return tl.min(tl.where(passed, index, last), axis=0)


@operator("llama_kernels::sample")
def _sample(
    logits: Tensor, seeds: Tensor, offsets: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    rows, vocabulary = logits.shape
    if not runs_triton(logits):
        return reference.sample(logits, seeds, offsets, temperature, top_k, top_p, min_p)
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return ids
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    block = min(BLOCK, next_power_of_2(max(vocabulary, 16)))
    blocks = next_power_of_2(cdiv(vocabulary, block))
    kept = torch.empty(rows, block, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, block, dtype=torch.int32, device=logits.device)
    sums = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    stages = 3 if shared_memory(logits) >= 160_000 else 2  # steps of a walk that are under way, 32 KB each
    with device_guard(logits):
        _sample_kernel[(rows,)](
            logits, ids, kept, places, sums, seeds, offsets, temperature, top_k, top_p, min_p,
            logits.stride(0), vocabulary, BLOCK=block, BLOCKS=blocks, STAGES=stages,
            num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
    return ids


@_sample.register_fake
def _(logits, seeds, offsets, temperature, top_k, top_p, min_p):
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


def _per_row(name: str, value: Setting, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        if value.shape not in ((), (rows,)):
            raise ValueError(f"{name} {tuple(value.shape)} must be one number or ({rows},)")
        return value.to(device, dtype, non_blocking=True).expand(rows).contiguous()
    return torch.full((rows,), value, dtype=dtype, device=device)


def sample(
    logits: Tensor,
    seeds: Tensor,
    *,
    offsets: Setting = 0,
    temperature: Setting = 1.0,
    top_k: Setting = 0,
    top_p: Setting = 1.0,
    min_p: Setting = 0.0,
) -> Tensor:
    """Draw one token per row. What a row draws depends on its logits, settings, seed and offset alone.

    Args:
        logits: (B, V), any strides.
        seeds: (B,) int64, one for each sequence.
        offsets: how many tokens this seed has drawn before: a sequence keeps its seed and counts up.
        temperature: ≥ 0; at 0 the row's largest logit is taken, the first of equals.
        top_k: keep the k largest logits and any equal to the k-th; 0 or −1 keeps all.
        top_p: in (0, 1]; keep the fewest most probable tokens that sum to at least this, and any equal to the last.
        min_p: in [0, 1]; keep tokens at least this probable relative to the most probable one.
        Each may be one number or a tensor (B,); numbers are checked, tensors are taken as they are.

    Returns:
        (B,) int64. The same on every GPU; the plain path (no Triton) draws from torch's generator instead.

    Raises:
        ValueError: shapes that do not fit, or a number outside its range.
    """
    if logits.dim() != 2 or not logits.shape[1]:
        raise ValueError(f"logits {tuple(logits.shape)} must be (rows, vocabulary)")
    rows = logits.shape[0]
    if seeds.shape != (rows,) or seeds.dtype != torch.int64:
        raise ValueError(f"seeds {tuple(seeds.shape)} {seeds.dtype} must be ({rows},) int64")
    ranges: list[tuple[str, Setting, Callable[[float], bool]]] = [
        ("temperature", temperature, lambda v: 0 <= v < float("inf")),
        ("top_k", top_k, lambda v: v == int(v) and v >= -1),
        ("top_p", top_p, lambda v: 0 < v <= 1),
        ("min_p", min_p, lambda v: 0 <= v <= 1),
        ("offsets", offsets, lambda v: v == int(v) and 0 <= v < 2**30),
    ]
    for name, value, right in ranges:
        if not isinstance(value, Tensor) and not right(value):
            raise ValueError(f"{name} is {value}; see the ranges in sample's description")
    floats = [
        _per_row(name, value, rows, torch.float32, logits.device)
        for name, value in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p))
    ]
    integers = [
        _per_row("offsets", offsets, rows, torch.int64, logits.device),
        _per_row("top_k", top_k, rows, torch.int32, logits.device),
    ]
    ids: Tensor = _sample(logits, seeds.contiguous(), integers[0], floats[0], integers[1], floats[1], floats[2])
    return ids
