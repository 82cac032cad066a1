"""The quickstart, stopped by SIGTERM and started again, ends with the same loss, bit for bit: shortened and in full."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_train.cli import main

EXAMPLE = Path(__file__).parents[3] / "examples" / "quickstart.toml"


def _records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _figures(folder: Path) -> list[tuple[Any, ...]]:
    """Step and losses of every line, training's and the last one of the held-out text."""
    return [(r["kind"], r["step"], r.get("loss"), r.get("grad_norm")) for r in _records(folder) if "loss" in r]


def test_shortened(
    tmp_path: Path, text_folder: Path, stop_after: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, with checkpoints beside training on the way."""
    short = [
        "--data.source",
        text_folder,
        "--data.vocab-size",
        300,
        "--schedule.steps",
        24,
        "--schedule.warmup-steps",
        4,
    ]
    often = ["--checkpoint.every", 4, "--logging.every", 1, "--evaluation.sample-tokens", 0]
    command = list(map(str, ["run", EXAMPLE, "--device", "cpu", *short, *often]))
    whole, parts = (["--folder", str(tmp_path / name)] for name in ("whole", "parts"))
    assert main([*command, *whole]) == 0
    with pytest.MonkeyPatch.context() as patch:
        stop_after(10, patch)
        assert main([*command, *parts]) == 0
    assert "stopped    by SIGTERM after step 10 of 24" in capsys.readouterr().out
    assert main([*command, *parts]) == 0
    assert "resumed    step 10" in capsys.readouterr().out
    assert _figures(tmp_path / "parts") == _figures(tmp_path / "whole")
    assert _figures(tmp_path / "whole")[-1][:2] == ("held_out", 24)


@pytest.mark.slow  # two quickstarts: a quarter of an hour on two cores
def test_in_full(tmp_path: Path) -> None:
    """Processes of their own, and a signal from outside at whatever moment it comes."""
    command = [sys.executable, "-m", "llama_train", "run", str(EXAMPLE), "--device", "cpu", "--logging.every", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole, parts = (["--folder", str(tmp_path / name)] for name in ("whole", "parts"))
    with subprocess.Popen([*command, *parts], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        output = ""
        for line in process.stdout:
            output += line
            if line.startswith("step  700/"):
                process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
    assert "stopped    by SIGTERM after step 70" in output
    for folder in (parts, whole):
        subprocess.run([*command, *folder], check=True, stdout=subprocess.DEVNULL, env=environment)
    assert _figures(tmp_path / "parts") == _figures(tmp_path / "whole")
    assert _figures(tmp_path / "whole")[-1][:2] == ("held_out", 1600)
