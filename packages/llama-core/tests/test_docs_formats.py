"""The examples of docs/formats.md run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[3] / "docs" / "formats.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_examples_are_found() -> None:
    assert len(BLOCKS) == 2


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_example(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    exec(compile(BLOCKS[index], f"formats.md, example {index}", "exec"), {"__name__": "__main__"})
