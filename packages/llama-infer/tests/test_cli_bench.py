"""`llama-infer bench --heads` on a tiny shape and a tiny model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_infer import cli

TINY = ["bench", "--heads", "--shape", "tiny", "--tokens", "5", "--tp", "2", "--max-tokens", "3", "--device", "cpu"]


def test_table_and_claims(
    save: Callable[..., Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    folder = save(max_position_embeddings=128)
    assert cli.main([*TINY, "--model", str(folder)]) == 0
    out = capfd.readouterr().out
    assert [line.split()[:2] for line in out.splitlines() if re.match(r" +(one|loop|batched) ", line)] == [
        *(["one", "1"], ["loop", "4"], ["batched", "4"], ["loop", "2"], ["batched", "2"], ["loop", "1"]),
        *(["batched", "1"], ["one", "head"]),
    ]
    for claim in ("2.3 ms", "4.1 ms for 32", "40% less", "3.2 ×", "saves 50% of keys and values, 25.0% of weights"):
        assert claim in out
    assert "the same ids" in out


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["bench"], "nothing to measure; give --heads"),
        ([*TINY, "--shape", "tinny"], "no preset 'tinny'; did you mean 'tiny'?"),
        ([*TINY, "--tp", "3"], "tp is 3; 4 heads do not divide over it"),
        ([*TINY, "--max-tokens", "0"], "--max-tokens is 0; it must be at least 1"),
        ([*TINY, "--model", "nowhere"], "nowhere does not exist"),
    ],
)
def test_mistakes_are_one_line(capfd: pytest.CaptureFixture[str], argv: list[str], line: str) -> None:
    assert cli.main(argv) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"llama-infer: {line}")
    assert err.count("\n") == 1
