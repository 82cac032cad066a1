"""`llama-infer convert` between all formats, with the weights compared bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llama_core import load_model, load_tokenizer
from llama_infer import cli


@pytest.fixture(name="source")
def source_fixture(save: Callable[..., Path]) -> Path:
    """An HF folder with settings for generation and a tokenizer that cuts text as GPT-2 does, which GGUF can say."""
    folder = save({"eos_token_id": [257, 258], "temperature": 0.6})
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["pre_tokenizer"]["use_regex"] = True
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


def convert(*argv: str | Path) -> int:
    return cli.main(["convert", *map(str, argv)])


def assert_same(a: Path, b: Path) -> None:
    ours, theirs = load_model(a).state_dict(), load_model(b).state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_around_all_formats_and_back(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(source, tmp_path / "m.gguf") == 0
    assert convert(tmp_path / "m.gguf", tmp_path / "meta", "--format", "meta") == 0
    assert convert(tmp_path / "meta", tmp_path / "hf") == 0
    assert_same(source, tmp_path / "hf")
    out, err = capsys.readouterr()
    assert f"{tmp_path / 'm.gguf'}: gguf, " in out
    assert "tokenizer.model" in err  # Meta's folder has lost the tokenizer, and was told so


def test_tokenizer_and_generation_settings_go_along(source: Path, tmp_path: Path) -> None:
    assert convert(source, tmp_path / "hf", "--dtype", "bfloat16") == 0
    assert load_model(tmp_path / "hf").lm_head.weight.dtype == torch.bfloat16  # type: ignore[union-attr]
    assert load_tokenizer(tmp_path / "hf").encode("abc") == load_tokenizer(source).encode("abc")
    assert json.loads((tmp_path / "hf/generation_config.json").read_text())["temperature"] == 0.6
    assert convert(source, tmp_path / "m.gguf", "--dtype", "Q8_0") == 0
    assert load_tokenizer(tmp_path / "m.gguf").encode("abc") == load_tokenizer(source).encode("abc")


@pytest.mark.parametrize("taken", ["file.gguf", "folder"])
def test_what_is_there_stays(source: Path, tmp_path: Path, taken: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / taken
    if taken == "folder":
        target.mkdir()
    kept = target / "kept.txt" if taken == "folder" else target
    kept.write_text("mine")
    assert convert(source, target) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert kept.read_text() == "mine"
    if taken == "file.gguf":
        assert convert(source, target, "--overwrite") == 0
        assert_same(source, target)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("{source}", "{tmp}/x", "--dtype", "Q4_0"), "Q4_0 is a type of GGUF"),
        (("{tmp}/absent", "{tmp}/x"), "absent"),
        (("{source}", "{source}", "--overwrite"), "both"),
        (("{source}", "{tmp}/x", "--rope-factor", "8"), "rope_factor"),
        (("{source}", "{tmp}/x", "--format", "onnx"), "onnx"),
    ],
)
def test_mistakes_write_nothing(
    argv: tuple[str, ...], words: str, source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert convert(*(part.format(source=source, tmp=tmp_path) for part in argv)) == 2
    out, err = capfd.readouterr()
    assert words in out + err
    assert "Traceback" not in out + err
    assert sorted(tmp_path.rglob("*")) == before
