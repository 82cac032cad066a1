"""`llama-train collect`: rows against numbers by hand, CSV that reads back, and what is left alone."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llama_train.cli import main
from llama_train.config import TrainConfig
from llama_train.config_file import dump_config
from llama_train.manage.history import read_history
from llama_train.manage.run_files import METRICS
from llama_train.manage.summary import steady, summarize


def _train(step: int, loss: float, speed: float, **more: object) -> dict[str, object]:
    return {"kind": "train", "step": step, "tokens": 64 * step, "loss": loss, "tokens_per_second": speed, **more}


@pytest.fixture
def runs(tmp_path: Path, tiny: TrainConfig, change) -> Path:  # type: ignore[no-untyped-def]
    """Two runs: one of 20 steps that ended, on two by two processes; one that died in step 4, with a cut line."""
    whole = change(tiny, **{"parallel.dp_shard": 2, "parallel.tp": 2})
    records = [_train(step, 10.0 - 0.1 * step, 5.0 if step < 4 else 100.0 + step, mfu=0.01 * step, memory=10**9 + step)
               for step in range(1, 21)]  # fmt: skip
    held = [{"kind": "held_out", "step": step, "loss": loss, "tokens": 7} for step, loss in ((10, 8.5), (20, 8.6))]
    for name, config, lines in (("b/whole", whole, [*records, *held]), ("a", tiny, records[:3])):
        folder = tmp_path / "runs" / name
        (folder / "checkpoints" / "step-00000020").mkdir(parents=True) if name == "b/whole" else folder.mkdir()
        (folder / "config.toml").write_text(dump_config(config), encoding="utf-8")
        (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    with (tmp_path / "runs" / "a" / METRICS).open("a", encoding="utf-8") as file:
        file.write('{"kind": "train", "st')
    return tmp_path / "runs"


def test_a_row_by_hand(runs: Path) -> None:
    row = summarize(runs / "b" / "whole", runs)
    assert (row.name, row.state, row.layout, row.processes) == ("b/whole", "finished", "dp_shard 2 tp 2", 4)
    assert (row.step, row.steps, row.tokens, row.saved_step) == (20, 20, 1280, 20)
    assert row.rows_per_step == 8  # 4 rows × 1 × dp 2
    # steps 4 to 20, the first three dropped: median of 104 … 120
    assert row.tokens_per_second == 112.0
    assert row.tokens_per_second_per_process == 28.0
    assert row.mfu == pytest.approx(0.12)
    assert row.memory == 10**9 + 20
    assert row.loss == pytest.approx((8.1 + 8.0) / 2)  # a tenth of 20 lines
    assert (row.held_out_loss, row.best_held_out_loss) == (8.6, 8.5)
    assert row.model == "16 wide, 2 layers, 2 heads"
    dead = summarize(runs / "a", runs)
    assert (dead.state, dead.step, dead.damaged_lines) == ("fail", 3, 1)
    assert (dead.progress, replace(dead, saved_step=5).progress) == ("3/20", "5/20")  # stopped between two lines
    assert dead.tokens_per_second == 5.0  # nothing but warm-up is better than nothing
    assert dead.mfu == pytest.approx(0.02)
    assert dead.held_out_loss is None


def test_warm_up_is_dropped_and_absent_figures_are_none() -> None:
    records = [{"step": float(step), "x": value} for step, value in enumerate((9.0, 9.0, 9.0, 1.0, 2.0), 1)]
    assert steady(records, "x") == 1.5
    assert steady(records[:2], "x") == 9.0
    assert steady(records, "y") is None
    assert steady([], "x") is None


def test_the_command_shows_and_writes(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect", str(runs)]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].split() == [
        "run",
        "state",
        "model",
        "layout",
        "step",
        "tok/s",
        "each",
        "MFU",
        "memory",
        "loss",
        "held",
        "out",
    ]
    assert "b/whole  finished" in lines[2]
    assert "20/20" in lines[2]
    assert "12.0%" in lines[2]
    assert "a: ended without a word" in out
    assert "a: 1 lines of metrics.jsonl cannot be read" in out
    with (runs / "runs.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["name"], row["state"], row["step"], row["mfu"]) for row in rows] == [
        ("a", "fail", "3", "0.02"),
        ("b/whole", "finished", "20", "0.12"),
    ]
    whole = list(csv.DictReader(io.StringIO((runs / "b" / "whole" / "metrics.csv").read_text(encoding="utf-8"))))
    assert [row["step"] for row in whole] == [str(step) for step in range(1, 21)]
    assert [row["held_out_loss"] for row in whole if row["held_out_loss"]] == ["8.5", "8.6"]
    assert whole[3]["tokens"] == "256"
    assert float(whole[-1]["seconds"]) == pytest.approx(read_history(runs / "b" / "whole" / METRICS).seconds[-1])


def test_other_places_other_choices(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    output = tmp_path / "tables"
    assert main(["collect", str(runs), "--output", str(output), "--sort", "loss"]) == 0
    assert sorted(path.name for path in output.iterdir()) == ["a.csv", "b-whole.csv", "runs.csv"]
    assert capsys.readouterr().out.index("9.7000") > 0
    assert main(["collect", str(runs), "--no-csv", "--only", "fail"]) == 0
    out = capsys.readouterr().out
    assert "a    fail" in out
    assert "whole" not in out
    assert {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "broken"], "--only is 'broken'; it must be one of new, running"),
        (["--sort", "speed"], "--sort is 'speed'; it must be one of name, state"),
    ],
)
def test_mistakes(runs: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect", str(runs), *flags]) == 2
    assert message in capsys.readouterr().err


def test_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect", str(tmp_path)]) == 2
    assert "there is no run in" in capsys.readouterr().err
    assert main(["collect", str(tmp_path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err


def test_settings_of_another_version_are_no_obstacle(runs: Path) -> None:
    with (runs / "a" / "config.toml").open("a", encoding="utf-8") as file:
        file.write("\n[tomorrow]\nkey = 1\n")
    row = summarize(runs / "a", runs)
    assert (row.model, row.steps, row.step) == ("?", None, 3)
    assert row.progress == "3/?"


def test_a_table_and_curves_need_no_torch(runs: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from llama_train.cli import main\n"
        f"assert main(['collect', {str(runs)!r}, '--no-csv']) == 0\n"
        f"assert main(['plot', {str(runs)!r}, '--format', 'html', '--output', {str(tmp_path / 'curves')!r}]) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
