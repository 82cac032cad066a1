"""How a run stands, from what it left behind."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_train.cli import main
from llama_train.config import TrainConfig
from llama_train.config_file import dump_config, load_config
from llama_train.manage.history import read_history
from llama_train.manage.run_files import find_runs, find_settings, is_run, last_checkpoint
from llama_train.manage.run_state import noted_outcome, run_state
from llama_train.out_of_memory import OutOfMemory
from llama_train.run_folder import open_run_folder


def _state(run: Path) -> str:
    return run_state(run, read_history(run / "metrics.jsonl"))[0]


@pytest.fixture
def run(tiny: TrainConfig, tmp_path: Path) -> Path:
    """The folder of a run of 20 steps that has begun."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(dump_config(tiny), encoding="utf-8")
    (folder / ".lock").touch()
    return folder


def _start(run: Path) -> None:
    """As a start does: the settings are written anew."""
    later = os.stat(run / "config.toml").st_mtime_ns + 10**9
    os.utime(run / "config.toml", ns=(later, later))


def test_the_command_leaves_its_outcome(
    tiny: TrainConfig,
    tmp_path: Path,
    stop_after: Callable[[int, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(dump_config(tiny), encoding="utf-8")
    assert _state(tmp_path / "run") == "new"
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        assert main(["run", str(path)]) == 0
    assert _state(tmp_path / "run") == "stopped"
    assert main(["run", str(path)]) == 0
    assert _state(tmp_path / "run") == "finished"
    with open_run_folder(load_config(tmp_path / "run" / "config.toml")):
        assert _state(tmp_path / "run") == "running"
    assert main(["run", str(path), "--schedule.steps", "30", "--optimizer.learning-rate", "1e30"]) == 1
    state, reason = run_state(tmp_path / "run", read_history(tmp_path / "run" / "metrics.jsonl"))
    assert state == "fail"
    assert reason.startswith("NonFiniteLoss")
    assert main(["run", str(path), "--resume", "never"]) == 2  # refused: the folder is as it was
    assert _state(tmp_path / "run") == "fail"


def test_out_of_memory_of_any_process_is_what_counts(
    tiny: TrainConfig, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        """Rank 0 around rank 1, which fails first."""
        monkeypatch.setenv("RANK", "0")
        with noted_outcome(tiny):
            monkeypatch.setenv("RANK", "1")
            with contextlib.suppress(OutOfMemory), noted_outcome(tiny):
                now = time.time_ns()
                os.utime(run / "config.toml", ns=(now, now))
                raise OutOfMemory("asked for 3 GB more")
            assert _state(run) == "oom"
            raise RuntimeError("another process failed")

    with pytest.raises(RuntimeError, match="another"):
        work()
    assert _state(run) == "oom"


def test_a_failure_before_the_folder_was_taken_is_not_the_runs(tiny: TrainConfig, run: Path) -> None:
    with pytest.raises(OSError), noted_outcome(tiny):
        raise OSError("no network")
    assert not (run / "outcome.json").exists()


def test_without_a_note_what_lies_there_tells(tiny: TrainConfig, run: Path) -> None:
    assert _state(run) == "fail"
    (run / "metrics.jsonl").write_text(json.dumps({"kind": "train", "step": 4, "loss": 1.0}) + "\n", encoding="utf-8")
    assert _state(run) == "fail"
    (run / "checkpoints" / "step-00000004").mkdir(parents=True)
    assert _state(run) == "stopped"
    (run / "slurm").mkdir()
    (run / "slurm" / "1.out").write_text(
        "slurmstepd: error: *** JOB 1 CANCELLED DUE TO TIME LIMIT ***\n", encoding="utf-8"
    )
    assert _state(run) == "timeout"
    (run / "slurm" / "2.out").write_text("error: Detected 1 oom_kill event in StepId=2.0\n", encoding="utf-8")
    os.utime(run / "slurm" / "1.out", ns=(1, 1))
    assert _state(run) == "oom"
    (run / "checkpoints" / "step-00000020").mkdir()
    assert _state(run) == "finished"
    assert last_checkpoint(run) == 20


def test_an_older_note_does_not_count_and_a_damaged_one_neither(run: Path) -> None:
    (run / "outcome.json").write_text(json.dumps({"state": "finished", "message": ""}), encoding="utf-8")
    assert _state(run) == "finished"
    _start(run)
    os.utime(run / "outcome.json", ns=(1, 1))
    assert _state(run) == "fail"
    (run / "outcome.json").write_text("{", encoding="utf-8")
    os.utime(run / "outcome.json", ns=(2**61, 2**61))
    assert _state(run) == "fail"


def test_runs_and_settings_are_told_apart(run: Path, tmp_path: Path, tiny: TrainConfig) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "a.toml").write_text(dump_config(tiny), encoding="utf-8")
    (run / "checkpoints" / "step-00000004").mkdir(parents=True)
    (run / "inner.toml").write_text("", encoding="utf-8")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "b.toml").write_text("", encoding="utf-8")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "sweep" / "cases").mkdir(parents=True)
    (tmp_path / "sweep" / "sweep.json").touch()
    (tmp_path / "sweep" / "cases" / "c.toml").touch()
    assert find_runs(tmp_path) == [run]
    assert find_runs(run) == [run]
    assert find_settings(tmp_path) == [tmp_path / "deep" / "er" / "a.toml"]
    assert not is_run(tmp_path)
    with pytest.raises(ValueError, match="is no folder"):
        find_runs(tmp_path / "none")


def test_a_folder_with_jobs_alone_can_be_taken(tiny: TrainConfig, tmp_path: Path) -> None:
    (tmp_path / "run" / "slurm").mkdir(parents=True)
    with open_run_folder(tiny) as (folder, changes):
        assert folder.config.is_file()
    assert changes == []
