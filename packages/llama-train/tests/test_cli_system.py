"""`llama-train run` where the system refuses: one line, no traceback, and a lost log does not end a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llama_train import cli
from llama_train.config import TrainConfig
from llama_train.config_file import dump_config


def test_a_folder_that_cannot_be_made(tiny: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.toml"
    config.write_text(dump_config(tiny), encoding="utf-8")
    assert cli.main(["run", str(config), "--folder", str(config / "run")]) == 1
    assert capsys.readouterr().err == f"llama-train: {config / 'run'}: Not a directory\n"


def test_a_shape_that_is_not_given_is_told_before_the_text_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.toml"
    config.write_text("", encoding="utf-8")
    assert cli.main(["run", str(config), "--folder", str(tmp_path / "run")]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("llama-train: the model's shape is not given: set model.preset, or model.hidden_size")
    assert out == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
@pytest.mark.parametrize("redirection", [">/dev/full", ">&-", "| true"])
def test_a_lost_log_does_not_end_the_run(tiny: TrainConfig, tmp_path: Path, redirection: str) -> None:
    config = tmp_path / "c.toml"
    config.write_text(dump_config(tiny), encoding="utf-8")
    command = f"'{sys.executable}' -m llama_train run '{config}' {redirection}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()
