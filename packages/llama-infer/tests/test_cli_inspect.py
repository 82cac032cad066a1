"""`llama-infer inspect`: on the embedded model once, mistakes on a tiny one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llama_infer import cli
from llama_infer.inspection.stored import stored_tensors


def test_report_of_the_embedded_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "seen.html"
    argv = ["inspect", "--prompt", "The capital of France is", "--output", str(report), "--layer", "-1"]
    assert cli.main([*argv, "--heads", "0", "8"]) == 0
    out = capfd.readouterr().out
    text = report.read_text(encoding="utf-8")
    for word in ("·France(4649)", "·Paris", f"report: {report}"):
        assert word in out
    for word in ("4649", "·Paris", "Attention in layer 29", "Head 8, which reads key/value head 2", "Q4_1", "49152"):
        assert word in text


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--layer", "2"], "--layer 2: the model's layers are 0 to 1"),
        (["--layer", "-3"], "--layer -3: the model's layers are 0 to 1"),
        (["--heads", "0", "4"], "--heads 4: the model's heads are 0 to 3"),
        (["--output", "no/such/r.html"], "--output no/such/r.html: there is no folder no/such"),
        (["--prompt", ""], "the prompt is empty; give --prompt TEXT"),
        (["--model", "nowhere"], "nowhere does not exist"),
    ],
)
def test_mistakes_are_one_line(
    save: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    argv: list[str],
    line: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["inspect", "--model", str(save()), "--prompt", "x", *argv]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"llama-infer: {line}")
    assert err.count("\n") == 1
    assert not (tmp_path / "inspect.html").exists()


def test_default_heads_fit_a_model_of_one(
    save: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = save(num_attention_heads=1, num_key_value_heads=1, head_dim=32)
    assert cli.main(["inspect", "--model", str(folder), "--prompt", "x"]) == 0
    assert "Head 0" in (tmp_path / "inspect.html").read_text(encoding="utf-8")


def test_stored_sizes_are_the_files(save: Callable[..., Path]) -> None:
    folder = save()
    stored = stored_tensors(folder)
    assert {tensor.kind for tensor in stored} == {"float32"}
    header = 8 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    assert sum(tensor.nbytes for tensor in stored) == (folder / "model.safetensors").stat().st_size - header
