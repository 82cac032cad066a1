from __future__ import annotations

import numpy as np
import pytest

from llama_train.shuffle import mix, permute


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_every_number_comes_once(n: int) -> None:
    assert sorted(permute(np.arange(n), n, key=7)) == list(range(n))


def test_entries_do_not_depend_on_their_company() -> None:
    together = permute(np.arange(100), 100, key=3)
    alone = [int(permute(np.array([position]), 100, key=3)[0]) for position in range(100)]
    assert together.tolist() == alone


def test_keys_give_unlike_orders() -> None:
    orders = {tuple(permute(np.arange(50), 50, key)) for key in range(200)}
    assert len(orders) == 200
    assert tuple(range(50)) not in orders


def test_images_are_spread_evenly() -> None:
    # Over many keys each position must reach each place about equally often: chi-square with 8 · 7 degrees of freedom
    # has mean 56 and standard deviation 10.6; 110 is five deviations off.
    n, keys = 8, 1000
    counts = np.zeros((n, n))
    for key in range(keys):
        counts[np.arange(n), permute(np.arange(n), n, mix(key))] += 1
    assert ((counts - keys / n) ** 2 / (keys / n)).sum() < 110


def test_neighbours_are_not_kept_together() -> None:
    order = permute(np.arange(10_000), 10_000, key=1)
    assert (np.abs(np.diff(order)) == 1).sum() < 20  # two are expected by chance
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05


def test_mix_is_a_fixed_function() -> None:
    assert mix(1, 2) == mix(1, 2)
    assert mix(1, 2) != mix(2, 1)
    assert mix(-1) == mix(2**64 - 1)
    assert 0 <= mix(5) < 2**64
