from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llama_train.checkpoint import (
    Checkpoint,
    SaveError,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)


def _tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "model.a": torch.full((3, 2), value),
        "model.b": torch.full((4,), value, dtype=torch.bfloat16),
        "optimizer.step.a": torch.tensor(value),
        "generator.cpu": torch.full((5,), int(value), dtype=torch.uint8),
    }


def test_round_trip_in_place(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path / "c", 7, _tensors(7), keep=2)
    assert saved == Checkpoint(tmp_path / "c" / "step-00000007", 7)
    target = _tensors(0)
    identities = {name: tensor.data_ptr() for name, tensor in target.items()}
    load_checkpoint(saved, target)
    for name, tensor in _tensors(7).items():
        assert torch.equal(target[name], tensor)
        assert target[name].dtype == tensor.dtype
        assert target[name].data_ptr() == identities[name]


def test_only_the_newest_are_kept_and_the_same_step_may_come_again(tmp_path: Path) -> None:
    for step in (1, 2, 10, 10):
        save_checkpoint(tmp_path, step, _tensors(step), keep=2)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [2, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000010"]


def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path) -> None:
    for step in range(1, 7):
        save_checkpoint(tmp_path, step, _tensors(step), keep=9)
    data = next((tmp_path / "step-00000006").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    damaged = next((tmp_path / "step-00000005").glob("*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    (tmp_path / "step-00000003" / "manifest.json").write_text("[]")
    (tmp_path / "step-00000002" / ".metadata").unlink()
    found, passed_over = newest_checkpoint(tmp_path)
    assert found == Checkpoint(tmp_path / "step-00000001", 1)
    reasons = ["not as it was written", "not as it was written", "is missing", "cannot be read", "is missing"]
    assert [reason in line for reason, line in zip(reasons, passed_over, strict=True)] == [True] * 5


def test_nothing_there(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "none") == (None, [])
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-00000003").write_text("a file")
    assert newest_checkpoint(tmp_path) == (None, [])


def test_another_model_is_refused(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, 1, _tensors(1), keep=1)
    with pytest.raises(ValueError, match="does not fit this model"):
        load_checkpoint(saved, {"model.c": torch.zeros(1)})
    with pytest.raises(ValueError, match="does not fit this model"):
        load_checkpoint(saved, {"model.a": torch.zeros(9, 9)})


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: the write fails in the middle of a tensor file."""
    save_checkpoint(tmp_path, 1, _tensors(1), keep=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(SaveError, match=r"step 2 could not be saved in .*: File too large"):
            save_checkpoint(tmp_path, 2, {"a": torch.zeros(1_000_000)}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    found, passed_over = newest_checkpoint(tmp_path)
    assert found is not None
    assert (found.step, passed_over) == (1, [])


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="step 1 could not be saved"):
        save_checkpoint(tmp_path / "file", 1, _tensors(1), keep=1)


# Saves without pause, tells each step that stands, and is killed at an odd moment. Forked, because a fork of a process
# that has imported torch starts at once; in a process of its own, because this one has threads.
_KILLED = """
import json, os, signal, sys, time
from pathlib import Path
import torch
from llama_train.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint

torch.set_num_threads(1)
folder, kills, first = Path(sys.argv[1]), int(sys.argv[2]), 1
for attempt in range(kills):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        tensors = {f"t{n}": torch.full((20_000,), float(first)) for n in range(10)}
        for step in range(first, 1_000_000):
            save_checkpoint(folder, step, tensors, keep=2)
            os.write(write, f"{step} ".encode())
    os.close(write)
    told = os.read(read, 100)
    time.sleep(0.003 * attempt)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while part := os.read(read, 10_000):
        told += part
    os.close(read)
    found, passed_over = newest_checkpoint(folder)
    target = {f"t{n}": torch.zeros(20_000) for n in range(10)}
    load_checkpoint(found, target)
    whole = all(bool((tensor == first).all()) for tensor in target.values())
    print(json.dumps([int(told.split()[-1]), found.step, passed_over, whole]))
    first = found.step + 1
"""


def test_kill_while_saving_never_loses_a_complete_checkpoint(tmp_path: Path) -> None:
    kills = 12
    command = [sys.executable, "-c", _KILLED, str(tmp_path), str(kills)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    results = [json.loads(line) for line in output.splitlines()]
    assert len(results) == kills
    for told, found, passed_over, whole in results:
        assert found in (told, told + 1)  # one more where the kill came between the rename and the telling
        assert passed_over == []
        assert whole


def test_a_damaged_later_checkpoint_does_not_push_out_the_whole_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 9, _tensors(9), keep=1)
    (tmp_path / "step-00000009" / "manifest.json").unlink()  # so the run went back, and saves an earlier step
    saved = save_checkpoint(tmp_path, 5, _tensors(5), keep=1)
    assert newest_checkpoint(tmp_path)[0] == saved
    save_checkpoint(tmp_path, 7, _tensors(7), keep=1)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [7, 9]
