import gc
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from llama_parallel.testing import RankError, run_ranks


def children() -> set[int]:
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
        return {int(pid) for pid in file.read().split()}


def test_every_rank_answers_in_order_and_collectives_work() -> None:
    def work(rank: int, factor: int) -> tuple[int, float, int]:
        total = torch.tensor(float(rank))
        dist.all_reduce(total)
        return rank * factor, float(total), torch.get_num_threads()

    assert run_ranks(work, 4, 10) == [(0, 6.0, 1), (10, 6.0, 1), (20, 6.0, 1), (30, 6.0, 1)]


def test_a_rank_that_is_done_waits_for_those_that_are_still_connecting() -> None:
    assert run_ranks(lambda rank: dist.get_world_size(), 16) == [16] * 16  # about a second on an idle machine


def test_first_traceback_comes_back_and_nobody_is_left() -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise KeyError("the cause")
        dist.barrier()  # fails only because rank 1 is gone

    before, start = children(), time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 3 raised[\s\S]*in work[\s\S]*KeyError: 'the cause'"):
        run_ranks(work, 3, timeout=60)
    assert time.monotonic() - start < 30
    assert children() <= before


def test_death_without_a_word_ends_all() -> None:
    def work(rank: int) -> None:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    before = children()
    with pytest.raises(RankError, match="rank 2 of 3 died with exit code -9"):
        run_ranks(work, 3, timeout=60)
    assert children() <= before


def test_abort_says_where() -> None:
    def aborts_here(rank: int) -> None:
        if rank == 1:
            os.abort()
        dist.barrier()

    with pytest.raises(RankError, match=r"rank 1 of 2 died with exit code -6[\s\S]*aborts_here"):
        run_ranks(aborts_here, 2)


def test_hang_ends_in_time_and_says_where() -> None:
    def stuck_here(rank: int) -> None:
        if rank == 0:
            time.sleep(1000)

    before, start = children(), time.monotonic()
    with pytest.raises(RankError, match=r"ranks \[0\] of 2 have not finished in time[\s\S]*stuck_here"):
        run_ranks(stuck_here, 2, timeout=3)
    assert time.monotonic() - start < 20
    assert children() <= before


def test_results_may_be_large() -> None:
    # Larger than a pipe holds: a parent that waited for the processes first would wait for ever.
    results = run_ranks(lambda rank: torch.full((1 << 18,), float(rank)), 2, backend=None)
    assert [float(result.sum()) for result in results] == [0.0, float(1 << 18)]


def test_a_ranks_collector_leaves_the_parents_garbage_alone() -> None:
    """A process group of gloo has threads, which a fork does not copy: freeing one in a rank would wait for them."""
    gc.collect()
    gc.disable()
    try:
        cycle: list[object] = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1)]
        cycle.append(cycle)
        del cycle
        assert run_ranks(lambda rank: gc.collect() >= 0, 2, timeout=20, backend=None) == [True, True]
    finally:
        gc.enable()
        gc.collect()
