"""Speed-up and efficiency: the arithmetic, and a small measurement through the command."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from llama_train.cli import main
from llama_train.scaling import Measurement, plot, points


def test_speedup_and_efficiency_by_hand() -> None:
    """Ten seconds alone; six on two processes; weak scaling does twice the work in 12.5."""
    one = Measurement(1, 8, 10.0, 0.0)
    strong = points([one, Measurement(2, 8, 6.0, 0.2)], weak=False)
    assert [(round(p.speedup, 4), round(p.efficiency, 4)) for p in strong] == [(1.0, 1.0), (1.6667, 0.8333)]
    weak = points([one, Measurement(2, 16, 12.5, 0.2)], weak=True)
    assert [(p.speedup, p.efficiency) for p in weak] == [(1.0, 1.0), (1.6, 0.8)]
    root = ElementTree.fromstring(plot({"strong": strong, "weak": weak}))
    lines = [item for item in root if item.tag.endswith("polyline")]
    assert len(lines) == 4  # axes, the ideal, two curves
    assert [item.text for item in root if item.text in ("strong", "weak")] == ["strong", "weak"]


def test_the_command_prints_both_kinds_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "scaling.svg"
    flags = "--device cpu --processes 2 --rows 2 --sequence-length 16 --hidden-size 32 --layers 1 --steps 1"
    assert main(["bench", "scaling", *flags.split(), "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    rows = re.findall(r"^(strong|weak)\s+(\d)\s+(\d)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s+(\d+)%$", out, re.MULTILINE)
    assert [row[:3] for row in rows] == [
        ("strong", "1", "4"), ("strong", "2", "4"), ("weak", "1", "2"), ("weak", "2", "4"),
    ]  # fmt: skip
    assert [row[4:6] for row in rows if row[1] == "1"] == [("1.00", "1.00")] * 2
    assert all(int(row[6]) > 0 for row in rows if row[1] == "2")
    assert ElementTree.fromstring(picture.read_text(encoding="utf-8")).tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["latency"], "unknown benchmark 'latency'; there is: scaling, sweep"),
        (["scaling", "--dimension", "pp", "--layers", "1"], "1 layers are fewer than pp 2"),
        (["scaling", "--processes", "999999"], "numbers from 1 to 256"),
        (["scaling", "--plot", "x.png"], "the name of an .svg file"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["bench", *arguments])
    except SystemExit as error:  # tyro's own way out
        status = int(str(error.code))
    assert status == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
