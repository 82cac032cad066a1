"""Processes that tell each other words, and whose failure it is that the user reads."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llama_parallel import Process
from llama_parallel.testing import RankError as Ended
from llama_parallel.testing import run_ranks
from llama_train.failures import RankError, RemoteError, is_mine_to_tell
from llama_train.world import ALONE, World, enter_world

CPU = torch.device("cpu")


def _fail() -> None:
    raise OSError("no space")


def test_alone_everything_is_what_it_is() -> None:
    assert (ALONE.size, ALONE.is_main, ALONE.gather(3), ALONE.main_does(lambda: 4)) == (1, True, [3], 4)
    assert (ALONE.start_largest(lambda: 5)(), ALONE.start_sum(6)()) == (5, 6)
    ALONE.barrier()
    with pytest.raises(OSError, match="no space"):
        ALONE.all_do(_fail)
    with enter_world(Process(), CPU, 1.0) as world:
        assert world.control is None


def test_together() -> None:
    def work(rank: int) -> list[Any]:
        with enter_world(Process(rank, 3, rank), CPU, 30.0) as world:
            sums = world.start_largest(lambda: rank), world.start_sum(rank)
            return [world.gather(rank), world.main_does(lambda: f"from {rank}"), *(get() for get in sums)]

    assert run_ranks(work, 3) == [[[0, 1, 2], "from 0", 2, 3]] * 3


def test_what_fails_on_one_fails_on_all() -> None:
    def work(rank: int) -> list[tuple[str, str]]:
        world = World(Process(rank, 2, rank), CPU, dist.new_group(backend="gloo"))
        caught = []
        for attempt in (
            lambda: world.main_does(_fail),
            lambda: world.all_do(_fail if rank == 1 else lambda: None),
        ):
            with pytest.raises((OSError, RemoteError)) as error:
                attempt()
            caught.append((type(error.value).__name__, str(error.value)))
        return caught

    assert run_ranks(work, 2) == [
        [("OSError", "no space"), ("RemoteError", "rank 1: no space")],
        [("RemoteError", "no space"), ("OSError", "no space")],
    ]


def test_the_first_failure_is_told_and_its_echoes_are_not() -> None:
    def both_find_it(rank: int) -> tuple[str, bool]:
        process = Process(rank, 2, rank)
        try:
            with enter_world(process, CPU, 20.0):
                raise ValueError("the same on both")
        except Exception as error:
            return type(error).__name__, is_mine_to_tell(error, process)

    outcomes = run_ranks(both_find_it, 2)
    assert sorted(outcomes) == [("RemoteError", False), ("ValueError", True)]


def test_a_process_that_dies_is_told_by_one_that_misses_it() -> None:
    def work(rank: int) -> str:
        with enter_world(Process(rank, 2, rank), CPU, 20.0):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1))
        return "unreached"

    with pytest.raises(Ended, match="rank 1 of 2 died with exit code -9"):
        run_ranks(work, 2)

    def survivor(rank: int) -> str:
        try:
            with enter_world(Process(rank, 2, rank), CPU, 20.0):
                if rank == 1:
                    dist.destroy_process_group()
                    return "left"
                dist.all_reduce(torch.ones(1))
        except RankError as error:
            return str(error)
        return "unreached"

    told, left = run_ranks(survivor, 2)
    assert left == "left"
    assert told.startswith("rank 0 lost another process, which died or hangs")
