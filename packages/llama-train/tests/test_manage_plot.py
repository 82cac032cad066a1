"""`llama-train plot`: the page holds the curves and nothing from outside, the picture is one, odd runs are drawn."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from llama_train.cli import main
from llama_train.config import TrainConfig
from llama_train.config_file import dump_config
from llama_train.manage.charts import CHARTS, drawn_charts, open_runs
from llama_train.manage.page import MOST_POINTS, page_of


def _line(step: int, loss: float, **more: object) -> dict[str, object]:
    figures = {
        "tokens": 100 * step,
        "grad_norm": 2.0,
        "learning_rate": 1e-3,
        "tokens_per_second": 50.0,
        "memory": 2 * 10**9,
    }
    return {"kind": "train", "step": step, "loss": loss, **figures, **more}


def _run(folder: Path, config: TrainConfig, *records: dict[str, object], end: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(dump_config(config), encoding="utf-8")
    text = "".join(json.dumps(record) + "\n" for record in records) + end
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def runs(tmp_path: Path, tiny: TrainConfig) -> Path:
    """Whole with evaluations; resumed and cut; one line; nothing yet."""
    root = tmp_path / "runs"
    held = {"kind": "held_out", "step": 20, "loss": 3.5, "tokens": 7}
    _run(root / "whole", tiny, *[_line(step, 5 - 0.1 * step, mfu=0.4) for step in range(1, 21)], held)
    _run(root / "resumed", tiny, _line(1, 9.0), _line(5, 8.0), _line(9, 7.0), _line(6, 7.5), end='{"kind": "tr')
    _run(root / "one", tiny, _line(1, 6.0))
    _run(root / "none", tiny)
    return root


def _data(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def _curves(page: str) -> dict[str, Any]:
    return {run["name"]: run["curves"] for run in _data(page)["runs"]}


def test_the_page_holds_the_curves(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "pictures" / "all.v1"
    assert main(["plot", str(runs), "--x", "tokens", "--output", str(output)]) == 0
    assert "resumed: 1 lines of metrics.jsonl cannot be read" in capsys.readouterr().out
    page = (tmp_path / "pictures" / "all.v1.html").read_text(encoding="utf-8")
    curves = _curves(page)
    assert sorted(curves) == ["none", "one", "resumed", "whole"]
    assert curves["resumed"]["loss"] == {
        "steps": [1, 5, 6],
        "tokens": [100, 500, 600],
        "time": [2, 10, 12],
        "y": [9, 8, 7.5],
    }
    assert curves["whole"]["held_out"] == {"steps": [20], "tokens": [2000], "time": [40], "y": [3.5]}
    assert curves["whole"]["memory"]["y"] == [2.0] * 20  # GB
    assert curves["whole"]["mfu"]["y"] == [40.0] * 20  # %
    assert curves["one"]["loss"]["y"] == [6.0]
    assert curves["none"]["loss"]["y"] == []
    assert _data(page)["axis"] == "tokens"
    assert [chart["key"] for chart in _data(page)["charts"]] == [
        chart.key for chart in CHARTS if chart.key != "data_wait"
    ]


def test_the_page_needs_nothing_else(runs: Path) -> None:
    drawn = open_runs([str(runs)])
    page = page_of(drawn, drawn_charts(drawn), "steps")
    outside = page.replace("http://www.w3.org/2000/svg", "")  # a name, which is not fetched
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)|<link|<img|\bsrc=|\bfetch\b|XMLHttp", outside)


def test_a_name_cannot_become_markup(tmp_path: Path, tiny: TrainConfig) -> None:
    name = '</script><b title="%%DATA%%">&amp;'.replace("/", "∕")
    _run(tmp_path / name, tiny, _line(1, 2.0))
    drawn = open_runs([str(tmp_path / name)])
    page = page_of(drawn, drawn_charts(drawn), "steps")
    assert _data(page)["runs"][0]["name"] == name
    assert name not in page
    assert page.count("%%DATA%%") == page.count("%%DATA%%&quot;&gt;&amp;amp;") + 1  # as text, and in the JSON
    assert page.count('id="data"') == 1


def test_long_runs_make_no_huge_page(tmp_path: Path, tiny: TrainConfig) -> None:
    _run(tmp_path / "long", tiny, *[_line(step, 9.0 if step == 777 else 1.0) for step in range(1, 5001)])
    drawn = open_runs([str(tmp_path / "long")])
    curve = _curves(page_of(drawn, drawn_charts(drawn, ["loss"]), "steps"))["long"]["loss"]
    assert len(curve["y"]) == len(curve["time"]) <= MOST_POINTS + 1
    assert max(curve["y"]) == 9.0
    assert curve["steps"][-1] == 5000


def test_labels_tell_runs_of_one_name_apart(tmp_path: Path, tiny: TrainConfig) -> None:
    a, b = (_run(tmp_path / name / "run", tiny, _line(1, 1.0)) for name in "ab")
    assert [run.name for run in open_runs([str(a), str(b), str(a)])] == ["a/run", "b/run"]


def test_the_picture(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot`")
    _run(runs / "_$x^{", load(runs), _line(2, 0.5))
    output = tmp_path / "p"
    for flags in ([], ["--log", "--x", "time"], ["--charts", "held_out"]):
        assert main(["plot", str(runs), "--output", str(output), "--format", "png", *flags]) == 0
        picture = (tmp_path / "p.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 10_000
    assert not (tmp_path / "p.html").exists()


def load(runs: Path) -> TrainConfig:
    from llama_train import load_config

    return load_config(runs / "one" / "config.toml")


def test_without_matplotlib(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert main(["plot", str(runs), "--output", str(tmp_path / "p")]) == 0
    assert "no PNG     a PNG needs matplotlib: pip install 'llama-train[plot]'" in capsys.readouterr().out
    assert (tmp_path / "p.html").is_file()
    assert main(["plot", str(runs), "--output", str(tmp_path / "p"), "--format", "png"]) == 2
    assert "needs matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which runs?"),
        (["{runs}/nowhere"], "is no folder"),
        (["{runs}/none"], "there is no figure to draw yet"),
        (["{runs}/whole", "--charts", "speed"], "--charts is 'speed'; it must be one of loss"),
        (["{runs}/.."], None),
    ],
)
def test_mistakes(
    runs: Path,
    arguments: list[str],
    message: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(runs)
    status = main(["plot", *(word.format(runs=runs) for word in arguments)])
    assert status == (0 if message is None else 2)
    assert message is None or message in capsys.readouterr().err


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="needs a Chromium")
def test_a_browser_draws_it(runs: Path, tmp_path: Path) -> None:
    """The page as a browser leaves it: a path for each curve of each chart, ticks, keys, no error."""
    drawn = open_runs([str(runs)])
    page = page_of(drawn, drawn_charts(drawn), "steps")
    trap = "<script>window.onerror = text => document.documentElement.setAttribute('data-error', text)</script>"
    (tmp_path / "page.html").write_text(page.replace("<head>", "<head>" + trap), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    done = subprocess.run(
        [str(BROWSER), *flags, (tmp_path / "page.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert 'data-error="' not in done.stdout
    assert done.stdout.count('data-run="whole"') == 7
    assert done.stdout.count('data-run="resumed"') == 5  # no evaluation, no MFU
    assert done.stdout.count('data-run="one"') == 5
    assert 'data-run="none"' not in done.stdout
    assert ">20</text>" in done.stdout
