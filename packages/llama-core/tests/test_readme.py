"""Every Python example of README.md runs by itself, in an empty folder, without a warning."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

# see test_compile.py
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

README = Path(__file__).parents[1] / "README.md"
SECTION = re.compile(r"^## (?P<title>[^\n]+)\n(?P<body>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = {
    f"{section['title']} {number}": block["code"]
    for section in SECTION.finditer(README.read_text(encoding="utf-8"))
    for number, block in enumerate(FENCE.finditer(section["body"]))
    if block["language"] == "python"
}


def test_every_block_is_found() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(BLOCKS) == text.count("```python\n") >= 8


@pytest.mark.parametrize("name", BLOCKS)
def test_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[name], f"README.md, {name}", "exec"), {"__name__": "__main__"})
    assert not list(tmp_path.iterdir())
