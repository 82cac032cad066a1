"""Batches from the thread are those that would have been made without it, and the thread never outlives its use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llama_parallel.testing import RankError, run_ranks
from llama_train import TrainConfig, train
from llama_train.batches import Batch, TrainingRows
from llama_train.cli import main
from llama_train.data.shard import read_shard
from llama_train.prefetch import Prefetch
from llama_train.prepare import prepare

Make = Callable[[], Any]
ROWS = TrainingRows(np.arange(1000, dtype=np.uint16), 10, seed=0, bos_id=None)


def _make(step: int) -> list[Batch]:
    return ROWS.micro_batches(step, 2, 3)


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batches"]


@pytest.fixture(autouse=True)
def _none_left() -> Iterator[None]:
    yield
    assert _threads() == []


def test_the_same_batches_in_order() -> None:
    with Prefetch(_make, 4, 40) as data:
        for step in range(4, 41):
            for batch, expected in zip(data.take(step), _make(step), strict=True):
                assert torch.equal(batch.tokens, expected.tokens)
                assert torch.equal(batch.targets, expected.targets)


def test_it_works_ahead_but_not_far() -> None:
    """While a step computes, the next ones are made; memory for a few of them is all it takes."""
    made: list[int] = []

    def make(step: int) -> list[Batch]:
        made.append(step)
        return _make(step)

    with Prefetch(make, 1, 100) as data:
        data.take(1)
        deadline = time.monotonic() + 20
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)
        assert made == [1, 2, 3, 4]  # two lie ready, one waits for a place
        data.take(2)
        assert data.waited < 0.01


def test_a_wait_is_measured() -> None:
    def slow(step: int) -> list[Batch]:
        time.sleep(0.05)
        return _make(step)

    with Prefetch(slow, 1, 2) as data:
        data.take(1)
        assert 0.02 < data.waited < 20


def test_an_error_comes_with_the_step_it_belongs_to() -> None:
    def broken(step: int) -> list[Batch]:
        if step == 3:
            raise ValueError("shards/x is damaged")
        return _make(step)

    with Prefetch(broken, 1, 9) as data:
        data.take(1)
        data.take(2)
        with pytest.raises(ValueError, match="shards/x is damaged"):
            data.take(3)


def test_an_early_end_leaves_no_thread() -> None:
    for taken in (0, 1, 3):
        with Prefetch(_make, 1, 10**9) as data:
            for step in range(1, taken + 1):
                data.take(step)
        assert _threads() == []
    with pytest.raises(KeyboardInterrupt), Prefetch(_make, 1, 10**9):
        raise KeyboardInterrupt


def test_a_shard_that_was_damaged_ends_the_run_with_its_name(
    tiny: TrainConfig, tmp_path: Path, recorder: Make, change: Callable[..., TrainConfig]
) -> None:
    """An id beyond the vocabulary, as from a bad disk: the header is whole, so only reading it tells."""
    tokenizer = prepare(tiny.data, tmp_path / "first").tokenizer
    for name, text in (("a", "def f(x):\n"), ("b", "x = 1\n")):
        (tmp_path / f"{name}.txt").write_text(text * 300)
        source = [str(tmp_path / f"{name}.txt"), "--tokenizer", str(tokenizer), "--output", str(tmp_path / name)]
        assert main(["prepare", *source]) == 0
    (path,) = (tmp_path / "a").glob("*.tokens")
    ids = read_shard(path).tokens
    assert isinstance(ids, np.memmap)
    np.memmap(path, dtype=ids.dtype, mode="r+", offset=ids.offset, shape=ids.shape)[:] = 300
    sources = {"data.sources": (str(tmp_path / "a"),), "data.held_out": str(tmp_path / "b")}
    with pytest.raises(ValueError, match=r"is damaged: it holds id 300, the vocabulary 300"):
        train(change(tiny, **sources), recorder())


def test_a_rank_whose_rows_cannot_be_read_tells_it_and_ends_all(
    tiny: TrainConfig, recorder: Make, change: Callable[..., TrainConfig]
) -> None:
    """A bad disk of one host: its message comes first, and nobody hangs in a collective."""
    config = change(tiny, **{"data.micro_batch_size": 2})

    def work(rank: int) -> None:
        original = TrainingRows.rows

        def rows(self: TrainingRows, first: int, count: int) -> Batch:
            if torch.distributed.get_rank() == 1 and first >= 12:
                raise ValueError("train.npy cannot be read: bad disk")
            return original(self, first, count)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TrainingRows, "rows", rows)
            train(config, recorder())

    with pytest.raises(RankError, match=r"train\.npy cannot be read: bad disk"):
        run_ranks(work, 2, timeout=60)
