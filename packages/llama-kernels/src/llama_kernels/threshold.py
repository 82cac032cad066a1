"""The k-th largest logit, or where the nucleus ends, without a sort: pieces of the `sample` kernel.

A logit is a float32; `key_of` maps it to an int32 of the same order, so that a threshold can be bisected. To find
one, guess a bracket, narrow it by tallying the row at two points until few tokens are inside (at most BLOCK), gather
those, and bisect them in registers: exact whatever the guess was.

The guess. The first walk over the row keeps each lane's maximum; the k-th largest of these is no larger than the k-th
largest of all, and where the distribution is peaked hardly smaller. Where it is flat, the quantile of a sample of the
row is near, with a margin of MARGIN standard deviations. If the sample says that few tokens are so near, they are
gathered at once, and the same walk tells whether the guess was right; one row in some thousands has to go on.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from llama_kernels.compat import tl, triton

MARGIN = tl.constexpr(3.25)
FEW = tl.constexpr(128)  # so many tokens are compared each with each instead of bisected: one exchange, not thirty


@triton.jit
def key_of(x):
    """float32 → int32 with the same order."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # −0 becomes +0: they are equal
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(key):
    """The inverse of `key_of`; takes an int64 within int32's range."""
    key = key.to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def load_tokens(row_ptr, column, vocabulary):
    return tl.load(row_ptr + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def load_sample(row_ptr, vocabulary, BLOCK: tl.constexpr):
    """BLOCK tokens in stretches of eight neighbours from all over the vocabulary, whose order is not random."""
    lane = tl.arange(0, BLOCK)
    x = load_tokens(row_ptr, lane // 8 * tl.maximum(vocabulary * 8 // BLOCK, 8) + lane % 8, vocabulary)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def largest_with(keys, weights, low, high, target):
    """The largest t in [low, high) with Σ_{keys ≥ t} weights ≥ target, given that low has it and high has not."""
    while high - low > 1:
        middle = (low + high) >> 1
        enough = tl.sum(tl.where(keys >= middle.to(tl.int32), weights, 0.0), axis=0) >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _roughly_with(values, weights, low, high, target):
    """A value t in [low, high) with Σ_{values ≥ t} weights ≥ target if low has it, near the largest such t."""
    for _ in range(11):
        middle = 0.5 * (low + high)
        enough = tl.sum(tl.where(values >= middle, weights, 0.0), axis=0) >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def tally(row_ptr, vocabulary, first, second, top, inverse_t, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Number and weight of the tokens with key ≥ first, and ≥ second."""
    lane = tl.arange(0, BLOCK)
    first, second = first.to(tl.int32), second.to(tl.int32)
    count_1 = tl.zeros((BLOCK,), tl.int32)
    count_2 = tl.zeros((BLOCK,), tl.int32)
    mass_1 = tl.zeros((BLOCK,), tl.float32)
    mass_2 = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, vocabulary, BLOCK, num_stages=STAGES):
        x = load_tokens(row_ptr, start + lane, vocabulary)
        key = key_of(x)
        weight = tl.exp((x - top) * inverse_t)
        count_1 += (key >= first).to(tl.int32)
        count_2 += (key >= second).to(tl.int32)
        mass_1 += tl.where(key >= first, weight, 0.0)
        mass_2 += tl.where(key >= second, weight, 0.0)
    return tl.sum(count_1, axis=0), tl.sum(count_2, axis=0), tl.sum(mass_1, axis=0), tl.sum(mass_2, axis=0)


@triton.jit
def _gather(
    row_ptr, kept_ptr, place_ptr, blocks_ptr, vocabulary, low, high, above, top, inverse_t,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Put the tokens with low ≤ key < high side by side, in order; the first BLOCK of them.

    Returns how many there are, and, where high < above, the number (unless BY_MASS) and weight of those from high up;
    `blocks_ptr` gets that weight per block. Otherwise nothing is up there.
    """
    square = tl.arange(0, BLOCK // 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    kept, count_high, mass_high = 0, 0, 0.0
    for start in tl.range(0, vocabulary, BLOCK, num_stages=STAGES):
        x = load_tokens(row_ptr, start + square, vocabulary)
        key = key_of(x)
        inside = ((key >= low.to(tl.int32)) & (key < high.to(tl.int32))).to(tl.int32)
        # A running count over 16 neighbours and one over their sums take a tenth of one over all.
        here = tl.sum(inside, axis=1)
        at = kept + (tl.cumsum(here, axis=0) - here)[:, None] + tl.cumsum(inside, axis=1) - 1
        fits = (inside > 0) & (at < BLOCK)
        tl.store(kept_ptr + at, x, mask=fits)
        tl.store(place_ptr + at, start + square, mask=fits)
        if high < above:
            weight = tl.where(key >= high.to(tl.int32), tl.exp((x - top) * inverse_t), 0.0)
            in_block = tl.sum(tl.sum(weight, axis=1), axis=0)
            tl.store(blocks_ptr + start // BLOCK, in_block)
            mass_high += in_block
            if not BY_MASS:
                here += tl.sum((key >= high.to(tl.int32)).to(tl.int32), axis=1) << 16  # a tile has 8192 at most
        both = tl.sum(here, axis=0)
        kept += both & 0xFFFF
        count_high += both >> 16
    return kept, count_high, mass_high


@triton.jit
def _load_kept(kept_ptr, lane, kept, top, inverse_t, BY_MASS: tl.constexpr):
    """Keys, weights, and what is summed up to the target: weights, or ones."""
    x = tl.load(kept_ptr + lane, mask=lane < kept, other=float("-inf"))
    weight = tl.exp((x - top) * inverse_t)
    if BY_MASS:
        return key_of(x), weight, weight
    else:
        return key_of(x), weight, (lane < kept).to(tl.float32)


@triton.jit
def _among_few(kept_ptr, kept, low, top, inverse_t, target, BY_MASS: tl.constexpr):
    keys, weight, share = _load_kept(kept_ptr, tl.arange(0, FEW), kept, top, inverse_t, BY_MASS)
    from_up = tl.sum(tl.where(keys[None, :] >= keys[:, None], share[None, :], 0.0), axis=1)
    t = tl.max(tl.where((from_up >= target) & (tl.arange(0, FEW) < kept), keys, -2147483647), axis=0)
    t = tl.maximum(t.to(tl.int64), low)
    return t, tl.sum(tl.where(keys >= t.to(tl.int32), weight, 0.0), axis=0)


@triton.jit
def _among_many(kept_ptr, kept, low, high, top, inverse_t, target, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    keys, weight, share = _load_kept(kept_ptr, tl.arange(0, BLOCK), kept, top, inverse_t, BY_MASS)
    t = largest_with(keys, share, low, high, target)
    return t, tl.sum(tl.where(keys >= t.to(tl.int32), weight, 0.0), axis=0)


@triton.jit
def among_kept(kept_ptr, kept, low, high, top, inverse_t, target, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """(t, weight from t up) among the gathered tokens, t as of `largest_with`."""
    if kept <= FEW:
        t, mass = _among_few(kept_ptr, kept, low, top, inverse_t, target, BY_MASS)
    else:
        t, mass = _among_many(kept_ptr, kept, low, high, top, inverse_t, target, BY_MASS, BLOCK)
    return t, mass


@triton.jit
def threshold(
    row_ptr, kept_ptr, place_ptr, blocks_ptr, vocabulary, low, top, inverse_t, target, lane_best, fraction,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The largest key t ≥ low with F(t) ≥ target, where F counts or weighs (exp((x − top) / T)) the tokens from t up.

    `fraction` is the target's share of F(low). Returns t; the weight from t up; how many tokens `kept_ptr` holds, −1 if
    there were more; and the key `high`. Kept are all tokens with t ≤ key < high and perhaps a few below t, their places
    in `place_ptr`. `blocks_ptr` has the weight at and above high in each block, where anything is.
    """
    above = key_of(top).to(tl.int64) + 1
    sampled = load_sample(row_ptr, vocabulary, BLOCK)  # again, rather than hold registers that a walk needs
    high, count_high, mass_high, count_low = above, 0, 0.0, vocabulary

    in_lanes, in_sample = key_of(lane_best) >= low.to(tl.int32), key_of(sampled) >= low.to(tl.int32)
    if BY_MASS:
        lane_weight = tl.where(in_lanes, tl.exp((lane_best - top) * inverse_t), 0.0)
        sample_weight = tl.where(in_sample, tl.exp((sampled - top) * inverse_t), 0.0)
    else:
        lane_weight, sample_weight = in_lanes.to(tl.float32), in_sample.to(tl.float32)
    floor = tl.min(tl.where(in_sample, sampled, top), axis=0)
    first, second = low, high
    hopeful = low > high  # never: a tensor that says False
    if tl.sum(lane_weight, axis=0) >= target:
        bottom = tl.min(tl.where(in_lanes, lane_best, top), axis=0)
        guess = _roughly_with(lane_best, lane_weight, bottom, top, target)
        low = tl.maximum(low, key_of(guess).to(tl.int64))  # certain: the lanes alone reach the target there
        count_low = BLOCK  # hoped: gathering will tell
    else:
        aim = fraction * tl.sum(sample_weight, axis=0)
        guess = _roughly_with(sampled, sample_weight, floor, top, aim)
        # Deviation of that sum: the share f of it that is above varies as (1 − f) times its weights, the rest as f.
        part = sample_weight * tl.where(sampled >= guess, 1.0 - fraction, fraction)
        margin = MARGIN * tl.sqrt(tl.sum(part * part, axis=0))
        first = key_of(_roughly_with(sampled, sample_weight, floor, top, aim + margin)).to(tl.int64)
        second = key_of(_roughly_with(sampled, sample_weight, floor, top, aim - margin)).to(tl.int64)
        near = (key_of(sampled) >= first.to(tl.int32)) & (key_of(sampled) < second.to(tl.int32))
        # A tenth more than expected would still fit.
        hopeful = tl.sum(near.to(tl.int32), axis=0).to(tl.float32) * vocabulary <= 0.9 * BLOCK * BLOCK

    kept, tries = 0, 0
    searching = True
    while searching:
        settled = (count_low - count_high <= BLOCK) | (high - low <= 1)  # what is between fits, or may well
        first = tl.where(settled, low, tl.minimum(tl.maximum(first, low), high - 1))
        second = tl.where(settled, high, tl.minimum(tl.maximum(second, first), high))
        if settled | hopeful:
            kept, count_2, mass_2 = _gather(
                row_ptr, kept_ptr, place_ptr, blocks_ptr, vocabulary, first, second, above, top, inverse_t, BY_MASS,
                BLOCK, STAGES,
            )  # fmt: skip
            if settled:
                count_low = kept + count_high
                searching = (kept > BLOCK) & (high - low > 1)
            else:  # was the guess right?
                tl.debug_barrier()
                _, weight, _ = _load_kept(kept_ptr, tl.arange(0, BLOCK), kept, top, inverse_t, BY_MASS)
                f_2 = mass_2 if BY_MASS else count_2.to(tl.float32)
                f_1 = f_2 + (tl.sum(weight, axis=0) if BY_MASS else kept.to(tl.float32))
                found = (kept <= BLOCK) & (f_2 < target) & (f_1 >= target)
                low, high = tl.where(found, first, low), tl.where(found, second, high)
                count_high, mass_high = tl.where(found, count_2, count_high), tl.where(found, mass_2, mass_high)
                searching = not found
        else:
            count_1, count_2, mass_1, mass_2 = tally(row_ptr, vocabulary, first, second, top, inverse_t, BLOCK, STAGES)
            if BY_MASS:
                reached_1, reached_2 = mass_1 >= target, mass_2 >= target
            else:
                reached_1, reached_2 = count_1.to(tl.float32) >= target, count_2.to(tl.float32) >= target
            low = tl.where(reached_2, second, tl.where(reached_1, first, low))
            count_low = tl.where(reached_2, count_2, tl.where(reached_1, count_1, count_low))
            high = tl.where(reached_2, high, tl.where(reached_1, second, first))
            count_high = tl.where(reached_2, count_high, tl.where(reached_1, count_2, count_1))
            mass_high = tl.where(reached_2, mass_high, tl.where(reached_1, mass_2, mass_1))
        if not hopeful:  # next, thirds of the values while that makes sense, then thirds of the keys, which always end
            tries += 1
            bottom = tl.maximum(_value(low), floor)
            third = (tl.minimum(_value(high - 1), top) - bottom) / 3.0
            by_value = (tries < 8) & (third > 0.0)
            first = tl.where(by_value, key_of(bottom + third).to(tl.int64), low + (high - low) // 3)
            second = tl.where(by_value, key_of(bottom + 2.0 * third).to(tl.int64), low + 2 * (high - low) // 3)
        hopeful = low > high
    tl.debug_barrier()
    if BY_MASS:
        t, mass = among_kept(
            kept_ptr, tl.minimum(kept, BLOCK), low, high, top, inverse_t, target - mass_high, BY_MASS, BLOCK
        )
    else:
        t, mass = among_kept(
            kept_ptr, tl.minimum(kept, BLOCK), low, high, top, inverse_t, target - count_high, BY_MASS, BLOCK
        )
    mass += mass_high
    if kept > BLOCK:  # more equal logits than fit: t is their key, and their weight has to be counted
        _, _, mass, _ = tally(row_ptr, vocabulary, t, t, top, inverse_t, BLOCK, STAGES)
        kept = -1
    tl.debug_barrier()
    return t, mass, kept, high
