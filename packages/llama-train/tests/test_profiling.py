from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_parallel import Process
from llama_parallel.testing import run_ranks
from llama_train import TrainConfig, train
from llama_train.config import ParallelSettings, ProfileConfig
from llama_train.flight_recorder import flight_recorder

Change = Callable[..., TrainConfig]
Make = Callable[[], Any]


def _operations(path: Path) -> list[str]:
    return [event["name"] for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]]


def test_a_trace_holds_the_steps_that_were_asked_for(tiny: TrainConfig, change: Change, recorder: Make) -> None:
    reporter = recorder()
    config = change(tiny, **{"profile.steps": (3, 4), "schedule.steps": 6})
    folder = train(config, reporter).folder
    (path,) = (folder / "traces").iterdir()
    assert path.name == "steps-rank-0.json"
    assert f"traced     {path}" in reporter.text
    names = _operations(path)
    assert sum(name.startswith("Optimizer.step") for name in names) == 2
    assert "aten::mm" in names


def test_each_rank_writes_its_own(tiny: TrainConfig, change: Change, recorder: Make) -> None:
    base = change(tiny, **{"profile.steps": (2, 2), "schedule.steps": 6, "data.micro_batch_size": 2})
    config = replace(base, parallel=ParallelSettings(dp_shard=2))
    run_ranks(lambda rank: train(config, recorder()).step, 2)
    traces = sorted((Path(str(config.folder)) / "traces").iterdir())
    assert [path.name for path in traces] == ["steps-rank-0.json", "steps-rank-1.json"]
    for path in traces:
        assert any("reduce_scatter" in name for name in _operations(path))


def test_a_run_that_ends_early_leaves_what_it_traced(
    tiny: TrainConfig, change: Change, recorder: Make, stop_after: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(3, monkeypatch)
    folder = train(change(tiny, **{"profile.steps": (2, 10)}), recorder()).folder
    names = _operations(folder / "traces" / "steps-rank-0.json")
    assert sum(name.startswith("Optimizer.step") for name in names) == 2


def test_memory_is_a_gpus(tiny: TrainConfig, change: Change, recorder: Make) -> None:
    with pytest.raises(ValueError, match=r"profile.memory is true; .* device is 'cpu'"):
        train(change(tiny, **{"profile.memory": True}), recorder())


@pytest.mark.gpu
def test_a_snapshot_of_memory(tiny: TrainConfig, change: Change, recorder: Make) -> None:
    keys = {"device": "cuda", "dtype": "float32", "profile.memory": True, "profile.steps": (2, 3)}
    folder = train(change(tiny, **keys), recorder()).folder
    assert (folder / "traces" / "memory-rank-0.pickle").stat().st_size > 1000
    assert any("cuda" in name.lower() for name in _operations(folder / "traces" / "steps-rank-0.json"))
    assert torch.cuda.is_available()


@pytest.mark.parametrize(
    ("steps", "entries"), [((0, 3), 0), ((4, 3), 0), ((1, 1), -1)], ids=["before the first", "backwards", "negative"]
)
def test_bad_values(steps: tuple[int, int], entries: int) -> None:
    with pytest.raises(ValueError, match=r"profile.(steps|flight_recorder) is"):
        ProfileConfig(steps=steps, flight_recorder=entries)


def test_the_flight_recorders_switches_are_set_for_the_run_only_and_a_users_stay(tmp_path: Path) -> None:
    environ = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    with flight_recorder(2000, tmp_path / "traces", Process(1, 2, 1), environ) as dump:
        assert environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
        assert environ["TORCH_FR_BUFFER_SIZE"] == environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"
        assert environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "traces" / "collectives-")
        dump()  # no NCCL, no pipe
        pipe = Path(environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "1.pipe")
        os.mkfifo(pipe)  # as ProcessGroupNCCL makes it
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        dump()
        assert os.read(reader, 10)
        os.close(reader)
    assert environ == {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    assert not pipe.parent.exists()
    with flight_recorder(0, tmp_path, Process(), environ) as dump:
        dump()
    assert len(environ) == 1
