"""A random permutation of 0 … n-1 that is computed entry by entry, with no table and no state.

A Feistel network permutes the numbers of 2b bits whatever its round function is (Luby & Rackoff 1988);
numbers of n or more are sent through again until they fall below n (cycle walking; Black & Rogaway 2002). So the
order of the data is a function of (seed, epoch, position), and a position is all that a resumed run has to know.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8  # four are random enough for long arrays; for a handful of rows eight are needed


def permute(positions: NDArray[np.int64], n: int, key: int) -> NDArray[np.int64]:
    """Images of `positions`, each in [0, n), under the permutation of [0, n) that `key` chooses."""
    assert n >= 1
    assert positions.size == 0 or (positions.min() >= 0 and positions.max() < n)
    half = max(1, ((n - 1).bit_length() + 1) // 2)  # at most four numbers in the domain for each below n
    round_keys = [mix(key, number) for number in range(_ROUNDS)]
    values = positions.astype(np.uint64)
    pending = np.ones(values.shape, dtype=bool)
    while pending.any():
        values[pending] = _feistel(values[pending], half, round_keys)
        pending = values >= np.uint64(n)
    return values.astype(np.int64)


def mix(*numbers: int) -> int:
    """Hash whole numbers into 64 bits."""
    state = np.zeros(1, np.uint64)
    for number in numbers:
        state = _splitmix(state ^ np.uint64(number % 2**64))
    return int(state[0])


def _feistel(values: NDArray[np.uint64], half: int, round_keys: list[int]) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = values >> shift, values & mask
    for round_key in round_keys:
        scrambled = _splitmix(right ^ np.uint64(round_key))
        left, right = right, left ^ (scrambled & mask)
    return (left << shift) | right


def _splitmix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # The output function of SplitMix64 (Steele, Lea & Flood 2014); arrays of uint64 wrap around silently.
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
