from __future__ import annotations

import json
from pathlib import Path

import pytest

from llama_core import preset
from llama_train.cli import main


def test_a_layout_for_seventy_billion_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    """Issue 5's command, with one size of micro-batch, which is quicker."""
    flags = "--model llama-3-70b --gpus 64 --gpu-memory 80 --seq 8192 --global-batch 512 --micro-batch 1"
    assert main(["plan", *flags.split()]) == 0
    out = capsys.readouterr().out
    assert "Recommended: " in out
    assert "GB a GPU: weights" in out


def test_nothing_fits_and_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-3-70b", "--gpus", "4", "--micro-batch", "1"]) == 1
    out = capsys.readouterr().out
    assert "Nothing fits." in out
    assert "would do" in out


def test_json_and_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(preset("llama-3-8b").to_hf()), encoding="utf-8")
    answers = []
    for model in ("llama-3-8b", str(tmp_path)):
        flags = ["--gpus", "8", "--global-batch", "8", "--micro-batch", "1", "--limit", "2", "--json"]
        assert main(["plan", "--model", model, *flags]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]
    assert answers[0]["fits"] is True
    assert len(answers[0]["candidates"]) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model llama-9 --gpus 8", "llama-9"),
        ("--model tiny --gpus 0", "--gpus is 0; it must be at least 1"),
        ("--model tiny --gpus 99999999999999999999", "it must be 1 to 131072"),
        ("--model tiny --gpus 8 --seq 99999999999999999999", "it must be 1 to 134217728"),
        ("--model tiny", "--gpus"),
    ],
)
def test_mistakes(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["plan", *flags.split()])
    except SystemExit as error:  # tyro's own way out
        status = int(str(error.code))
    assert status == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
