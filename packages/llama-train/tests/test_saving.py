"""Checkpoints beside training: whole runs and the thread by itself. Kills are in test_kill_report."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_parallel.testing import run_ranks
from llama_train import TrainConfig, checkpoint, train
from llama_train.checkpoint import SaveError, list_checkpoints, load_checkpoint, newest_checkpoint
from llama_train.cli import main
from llama_train.config import CheckpointConfig, ParallelSettings
from llama_train.config_file import dump_config
from llama_train.saving import FAILED, Saver
from llama_train.world import ALONE

Change = Callable[..., TrainConfig]
Make = Callable[[], Any]


@pytest.fixture
def slow_save(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[str]]:
    """Saves wait for the event, and leave their names in the list as they begin."""
    original, may_go, begun = checkpoint.save, threading.Event(), []

    def waiting(tensors: Any, **keys: Any) -> Any:
        begun.append(Path(keys["checkpoint_id"]).name)
        assert may_go.wait(20)
        return original(tensors, **keys)

    monkeypatch.setattr(checkpoint, "save", waiting)
    return may_go, begun


def _values(folder: Path, step: int) -> torch.Tensor:
    target = {"a": torch.zeros(3)}
    load_checkpoint(next(c for c in list_checkpoints(folder) if c.step == step), target)
    return target["a"]


def test_what_is_written_is_the_state_of_the_moment(tmp_path: Path, slow_save: tuple[Any, list[str]]) -> None:
    may_go, begun = slow_save
    tensor = torch.ones(3)
    with Saver(tmp_path, CheckpointConfig(), ALONE) as saver:
        saver.save(1, {"a": tensor})
        tensor += 1  # the next step, while the file is written
        assert (saver.written(), saver.signal, list_checkpoints(tmp_path)) == (None, 0, [])
        may_go.set()
        saver.save(2, {"a": tensor})  # waits for the first
        assert [c.step for c in list_checkpoints(tmp_path)][:1] == [1]
        saver.wait()
        written = saver.written()
        assert written is not None
        assert (written.step, saver.written()) == (2, None)
    assert begun == [".partial-step-00000001", ".partial-step-00000002"]
    assert _values(tmp_path, 1).tolist() == [1, 1, 1]
    assert _values(tmp_path, 2).tolist() == [2, 2, 2]


def test_leaving_waits_for_what_is_being_written(tmp_path: Path, slow_save: tuple[Any, list[str]]) -> None:
    may_go, _ = slow_save
    with pytest.raises(ValueError, match="elsewhere"), Saver(tmp_path, CheckpointConfig(), ALONE) as saver:  # noqa: PT012
        saver.save(1, {"a": torch.ones(3)})
        threading.Timer(0.2, may_go.set).start()
        raise ValueError("elsewhere")
    assert newest_checkpoint(tmp_path)[0] is not None


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_goes_wrong_is_raised_once_and_leaves_nothing(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = checkpoint.save

    def failing(tensors: Any, **keys: Any) -> Any:
        original(tensors, **keys)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Saver(tmp_path, CheckpointConfig(asynchronous=asynchronous), ALONE) as saver:
        saver.save(1, {"a": torch.ones(3)})
        saver.wait()
        monkeypatch.setattr(checkpoint, "save", failing)
        with pytest.raises(SaveError, match=r"step 2 could not be saved .*No space left on device"):  # noqa: PT012
            saver.save(2, {"a": torch.ones(3)})
            saver._join(None)
            assert saver.signal == FAILED
            saver.wait()
        assert saver.signal == 0
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_the_last_is_there_at_once_and_needs_no_copy(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3)}
    with Saver(tmp_path, CheckpointConfig(), ALONE) as saver:
        saver.reserve(tensors)
        saver.save(1, tensors)
        saver.save(2, {"a": torch.full((3,), 2.0)}, last=True)
        assert [c.step for c in list_checkpoints(tmp_path)] == [1, 2]
    assert _values(tmp_path, 2).tolist() == [2, 2, 2]


def test_some_stay_for_ever(tmp_path: Path) -> None:
    with Saver(tmp_path, CheckpointConfig(keep=2, keep_every=4), ALONE) as saver:
        for step in range(1, 12):
            saver.save(step, {"a": torch.ones(3)})
    assert [c.step for c in list_checkpoints(tmp_path)] == [4, 8, 10, 11]


def _losses(folder: str | None) -> list[float]:
    lines = (Path(str(folder)) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["loss"] for record in map(json.loads, lines) if record["kind"] == "train"]


def _state(folder: str | None) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import FileSystemReader

    newest, _ = newest_checkpoint(Path(str(folder)) / "checkpoints")
    assert newest is not None
    metadata = FileSystemReader(newest.path).read_metadata().state_dict_metadata
    state = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in metadata.items()}  # type: ignore[union-attr]
    load_checkpoint(newest, state)
    return state


def _parts(config: TrainConfig, step: int, last: int, recorder: Make, count: int) -> None:
    """Until SIGTERM reaches one rank so that all stop after `step`; then on to the end."""

    def work(rank: int) -> None:
        from llama_train import loop

        original = loop.learning_rate

        def rate(number: int, *rest: Any) -> float:
            if rank == count - 1 and number == step - (count > 1):
                os.kill(os.getpid(), signal.SIGUSR1)  # as Slurm's --signal=USR1@120 does before the limit
            return original(number, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "learning_rate", rate)
            result = train(config, recorder())
        assert (result.step, result.finished) == (step, False)
        assert train(config, recorder()).step == last

    if count == 1:
        work(0)
    else:
        run_ranks(work, count)


@pytest.mark.parametrize("count", [1, 2])
def test_twenty_steps_are_ten_and_ten_with_saves_beside_them(
    count: int, tiny: TrainConfig, change: Change, tmp_path: Path, recorder: Make
) -> None:
    """Bit for bit, on one process and on two; the resumed half starts from what a thread wrote beside the steps."""
    base = change(tiny, **{"checkpoint.every": 3, "data.micro_batch_size": 4 // count})
    base = replace(base, parallel=ParallelSettings(dp_shard=count))
    plain = change(base, folder=str(tmp_path / "whole"), **{"checkpoint.every": 0, "checkpoint.asynchronous": False})
    parts = replace(base, folder=str(tmp_path / "parts"))
    if count == 1:
        train(plain, recorder())
    else:
        run_ranks(lambda rank: train(plain, recorder()).step, count)
    _parts(parts, 10, 20, recorder, count)
    assert _losses(parts.folder) == _losses(plain.folder)
    expected, found = _state(plain.folder), _state(parts.folder)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_failure_of_one_ranks_thread_ends_all_at_one_step(
    tiny: TrainConfig, change: Change, tmp_path: Path, recorder: Make
) -> None:
    base = change(tiny, **{"checkpoint.every": 4, "data.micro_batch_size": 2})
    config = replace(base, parallel=ParallelSettings(dp_shard=2))

    def work(rank: int) -> tuple[str, int]:
        original, steps = checkpoint._fingerprint, []

        def full(path: Path) -> Any:
            if rank == 1 and "step-00000008" in str(path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(path)

        from llama_train import loop

        rate = loop.learning_rate
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "_fingerprint", full)
            patch.setattr(loop, "learning_rate", lambda step, *rest: (steps.append(step), rate(step, *rest))[1])
            try:
                train(config, recorder())
            except Exception as error:
                return f"{error} {error.__cause__}", steps[-1]
        return "unreached", 0

    (first, first_step), (second, second_step) = run_ranks(work, 2)
    assert first_step == second_step
    assert "step 8 could not be saved" in first + second
    assert "No space left on device" in first
    assert "No space left on device" in second
    assert [path.name for path in (Path(str(config.folder)) / "checkpoints").iterdir()] == ["step-00000004"]


@contextmanager
def _small_files(size: int) -> Iterator[None]:
    """No file may grow beyond it: the disk is full in the middle of one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_file_that_cannot_grow(asynchronous: bool, tmp_path: Path) -> None:
    with Saver(tmp_path, CheckpointConfig(asynchronous=asynchronous), ALONE) as saver:
        saver.save(1, {"a": torch.ones(3)})
        saver.wait()
        with _small_files(100_000), pytest.raises(SaveError, match=r"step 2 .*: File too large"):  # noqa: PT012
            saver.save(2, {"a": torch.zeros(1_000_000)})
            saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    try:
        if subprocess.run(mount, check=False, capture_output=True).returncode:
            pytest.skip("only an administrator can mount a small disk; test_a_file_that_cannot_grow stands for it")
    except FileNotFoundError:
        pytest.skip("this system has no mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("asynchronous", ["asynchronous", "no-asynchronous"])
def test_a_full_disk_ends_the_run_with_the_last_checkpoint(
    asynchronous: str, small_disk: Path, tiny: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Room for three or so checkpoints, and all are to stay: one of them fills the disk."""
    config = tmp_path / "tiny.toml"
    config.write_text(dump_config(tiny), encoding="utf-8")
    flags = ["--folder", small_disk / "run", "--checkpoint.every", 2, "--checkpoint.keep", 99]
    command = ["run", config, *flags, f"--checkpoint.{asynchronous}"]
    assert main(list(map(str, command))) == 1
    error = capsys.readouterr().err
    assert error.startswith("llama-train: ")
    assert "No space left on device" in error
    assert error.count("\n") == 1
    folder = small_disk / "run" / "checkpoints"
    last, passed_over = newest_checkpoint(folder)
    assert last is not None
    assert passed_over == []
    assert f"step {last.step + 2} could not be saved" in error
    # with more room the same command goes on
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    assert main(list(map(str, command))) == 0
    assert f"resumed    step {last.step}" in capsys.readouterr().out
