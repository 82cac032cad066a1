"""Best-fit packing of documents into rows (Ding et al. 2024, "Fewer Truncations Improve Language Modeling")."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray


def best_fit(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Which bin each item goes into, by best-fit-decreasing: the longest first, each into the fullest bin it fits.

    Items of one length and bins of one free space are alike, so both are handled in groups: the time goes by how many
    different lengths there are, not by how many items.

    Args:
        lengths: (N,) from 1 to capacity.
        capacity: of every bin.

    Returns:
        (N,) numbers of bins, from 0 without gaps.
    """
    bins = np.empty(len(lengths), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    free: dict[int, NDArray[np.int64]] = {}  # space left → the bins that have it
    spaces: list[int] = []  # its keys, rising

    def put(space: int, numbers: NDArray[np.int64]) -> None:
        if space == 0 or not len(numbers):
            return
        if space in free:
            free[space] = np.concatenate([free[space], numbers])
        else:
            free[space] = numbers
            insort(spaces, space)

    opened, at = 0, 0
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist()):
        left = count
        while left:
            place = bisect_left(spaces, size)
            if place == len(spaces):  # none has the space
                new = -(-left // (capacity // size))
                put(capacity, np.arange(opened, opened + new))
                opened += new
                continue
            space = spaces.pop(place)
            numbers = free.pop(space)
            # A bin that still has the space after one item has the least of all that have it: it takes the next, too.
            each = space // size
            whole = min(len(numbers), left // each)
            bins[order[at : at + whole * each]] = np.repeat(numbers[:whole], each)
            put(space - each * size, numbers[:whole])
            at, left, numbers = at + whole * each, left - whole * each, numbers[whole:]
            if left and len(numbers):  # fewer than fill a bin
                bins[order[at : at + left]] = numbers[0]
                put(space - left * size, numbers[:1])
                at, left, numbers = at + left, 0, numbers[1:]
            put(space, numbers)
    return bins
