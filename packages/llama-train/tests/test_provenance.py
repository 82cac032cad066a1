from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_train import TrainConfig, load_config, train
from llama_train.cli import main
from llama_train.provenance import describe_start, revision
from llama_train.run_folder import RunFolder

Make = Callable[[], Any]


def test_every_start_leaves_a_line(tiny: TrainConfig, recorder: Make) -> None:
    for _ in range(2):
        folder = train(tiny, recorder()).folder
    first, second = (json.loads(line) for line in RunFolder(folder).starts.read_text(encoding="utf-8").splitlines())
    assert first["command"] == second["command"] == sys.argv
    assert torch.__version__.startswith(first["versions"]["torch"])
    assert first["versions"]["python"].startswith("3.")
    assert (first["processes"], first["restarts"], first["cuda"]) == (1, 0, None)


def test_the_settings_in_the_folder_repeat_the_run(
    tiny: TrainConfig, recorder: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(train(tiny, recorder()).folder)
    assert load_config(run.config).device == "cpu"
    assert main(["run", str(run.config), "--folder", str(tmp_path / "again")]) == 0
    assert "step 20/20" in capsys.readouterr().out

    def losses(folder: Path) -> list[float]:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [record["loss"] for record in map(json.loads, lines) if "loss" in record]

    assert losses(run.path) == losses(tmp_path / "again")


def test_the_revision_is_that_of_the_source_not_of_a_folder_around_it(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        git("init", "-q")
    except FileNotFoundError:
        pytest.skip("no git here")
    source = tmp_path / "source.py"
    source.write_text("1\n")
    assert revision(source) == revision(tmp_path / "absent.py")  # not tracked: what the installer noted, if anything
    git("add", "source.py")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert revision(source) == commit
    source.write_text("2\n")
    assert revision(source) == f"{commit}+changes"


def test_processes_are_counted(tiny: TrainConfig, change: Callable[..., TrainConfig]) -> None:
    config = change(tiny, **{"parallel.dp_shard": 2, "parallel.tp": 2, "parallel.pp": 2})
    assert describe_start(config, ["llama-train"])["processes"] == 8
