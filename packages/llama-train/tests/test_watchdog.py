from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from llama_parallel import Process
from llama_parallel.testing import RankError, run_ranks
from llama_train import TrainConfig, train, watchdog
from llama_train.config import ParallelSettings
from llama_train.watchdog import Watchdog, backend_limit


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_LOOK", 0.02)
    monkeypatch.setattr(watchdog, "_GRACE", 0.5)


class _Watched:
    """Two processes' watchdogs in one process, with a store between them, and a clock that the test moves."""

    def __init__(self, folder: Path, limit: float) -> None:
        self.now = 0.0
        self.ended = threading.Event()
        store = dist.HashStore()
        self.path = folder / "stacks"
        self.file = self.path.open("w")
        self.dogs = [
            Watchdog(
                Process(rank, 2),
                store,
                limit,
                file=self.file.fileno(),
                end=lambda status: self.ended.set(),
                clock=lambda: self.now,
            )
            for rank in range(2)
        ]

    def pass_time(self, seconds: float) -> None:
        """And let the threads look at the clock some times."""
        self.now += seconds
        time.sleep(0.2)

    def close(self) -> str:
        for dog in self.dogs:
            dog.close()
        self.file.close()
        return self.path.read_text()


def test_one_whose_time_is_up_makes_all_print_where_they_stand(tmp_path: Path) -> None:
    watched = _Watched(tmp_path, 600)
    watched.dogs[1].expect("step 7")
    watched.pass_time(601)
    assert watched.ended.wait(10)
    text = watched.close()
    for rank in (0, 1):
        assert f"rank {rank}: llama-train: rank 1 has been in step 7 for 601 s" in text
        assert f"rank {rank}:   File " in text
    assert "in test_one_whose_time_is_up" in text  # the main thread's stack


def test_resting_and_slow_steps_are_no_fault(tmp_path: Path) -> None:
    watched = _Watched(tmp_path, 600)
    dog = watched.dogs[0]
    dog.expect("step 1", parts=3)  # the first: three micro-batches may take the limit each
    watched.pass_time(1700)
    dog.rest()
    watched.pass_time(10_000)  # an evaluation, a save
    dog.expect("step 2")  # slower than the first, not twice as slow
    watched.pass_time(3300)
    dog.expect("step 3")
    watched.pass_time(6500)
    assert not watched.ended.is_set()
    watched.pass_time(200)
    assert watched.ended.wait(10)
    assert "rank 0 has been in step 3" in watched.close()


def test_torchs_own_limit_comes_later() -> None:
    assert backend_limit(600.0) > timedelta(seconds=600)


def test_a_rank_that_hangs_ends_the_run_and_all_stacks_are_printed(
    tiny: TrainConfig,
    change: Callable[..., TrainConfig],
    recorder: Callable[[], Any],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """On gloo; on NCCL the waiting ranks stand where they read the loss."""
    base = change(tiny, **{"data.micro_batch_size": 2, "checkpoint.every": 2})
    config = replace(base, parallel=ParallelSettings(dp_shard=2, timeout=8.0))

    def work(rank: int) -> None:
        from llama_train import loop

        original = loop.learning_rate

        def lost_in_thought(step: int, *rest: Any) -> float:
            if rank == 1 and step == 5:
                time.sleep(1000)
            return original(step, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "learning_rate", lost_in_thought)
            train(config, recorder())

    began = time.monotonic()
    with pytest.raises(RankError, match="died with exit code 1"):
        run_ranks(work, 2, timeout=100)
    assert time.monotonic() - began < 60
    printed = capfd.readouterr().err
    for rank in (0, 1):
        stacks = [line for line in printed.splitlines() if line.startswith(f"rank {rank}: ")]
        assert "rank 1 has been" in stacks[0] or "rank 0 has been" in stacks[0]
        assert re.search(r"in step 5 for \d+ s, and may be for \d+ \(parallel.timeout\); every process ends", stacks[0])
        assert any("in steps" in line for line in stacks)
    assert any("in lost_in_thought" in line for line in printed.splitlines() if line.startswith("rank 1: "))
    assert not any("in lost_in_thought" in line for line in printed.splitlines() if line.startswith("rank 0: "))
    records = (Path(str(config.folder)) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(records[-1])["step"] == 4
