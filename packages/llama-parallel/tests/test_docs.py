"""docs/parallelism: bytes are the planner's, names exist, figures are what their script draws."""

from __future__ import annotations

import importlib.util
import json
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llama_core import LlamaConfig, preset
from llama_parallel import ParallelConfig, bubble
from llama_parallel.planner import Work, volumes

TESTS = Path(__file__).parent
FOLDER = TESTS.parents[2] / "docs" / "parallelism"
DIMENSIONS = ("context", "data", "pipeline", "tensor")
PAGES = {name: (FOLDER / f"{name}.md").read_text(encoding="utf-8") for name in ("index", *DIMENSIONS)}
LLAMA, LENGTH = preset("llama-3-8b"), 8192

NAME = re.compile(r"`([a-z]\w*(?:\.\w+)+)`")
TABLE = re.compile(r"<!-- volumes: (\{.*\}) -->\n\n\| what \|.*\n\|[-|]+\|\n((?:\|.*\n)+)")
ARITHMETIC = re.compile(r"`([\d,·/()+ ]+) = ([\d,]+)`")
TRACED = re.compile(r"(?m)^sent +(\w+) +all +(\d+) +([\d.]+)$")

Row = tuple[str, str, int, int]


def number(text: str) -> int:
    return int(text.replace(",", ""))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(page: str) -> list[tuple[dict[str, Any], list[Row]]]:
    """What the page's marked tables are about, and their rows: what, operation, calls, bytes."""
    found = []
    for about, body in TABLE.findall(page):
        rows = [cells(line) for line in body.splitlines()]
        table = [(what, operation, number(calls), number(sent)) for what, operation, calls, sent in rows]
        found.append((json.loads(about), table))
    return found


def bytes_by_kind(work: Work, rank: int = 0) -> dict[str, float]:
    sums: dict[str, float] = {}
    for volume in volumes(work, rank):
        sums[volume.kind] = sums.get(volume.kind, 0.0) + volume.sent
    return sums


@pytest.mark.parametrize("name", DIMENSIONS)
def test_tables_are_the_planners_rows(name: str) -> None:
    found = tables(PAGES[name])
    assert len(found) == PAGES[name].count("<!-- volumes") > 0
    for about, rows in found:
        kind, rank = about.pop("kind"), about.pop("rank", 0)
        work = Work(LLAMA, ParallelConfig(**about.pop("layout")), LENGTH, **about)
        wanted = [volume for volume in volumes(work, rank) if volume.kind == kind]
        assert rows == [(volume.what, volume.operation, volume.calls, volume.sent) for volume in wanted]


@pytest.mark.parametrize("name", DIMENSIONS)
def test_worked_examples_are_right_and_stand_in_a_table(name: str) -> None:
    in_tables = {row[3] for _, rows in tables(PAGES[name]) for row in rows}
    examples = ARITHMETIC.findall(PAGES[name])
    assert examples
    for expression, result in examples:
        python = expression.replace(",", "").replace("·", "*")  # digits and + * / ( ) only, by the pattern
        assert eval(python) == number(result), expression
        assert number(result) in in_tables, expression


def test_the_comparison_of_layouts() -> None:
    (body,) = re.findall(r"\| layout \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGES["index"])
    rows = [cells(line) for line in body.splitlines()]
    assert len(rows) == 5
    for text, total, parameters in rows:
        layout, _, context = text.partition(", ")
        dimension, size = layout.split()
        config = ParallelConfig(**{dimension: int(size)})
        work = Work(LLAMA, config, LENGTH, global_batch=8, context=context.lower() or "ring")
        sums = max((bytes_by_kind(work, rank) for rank in range(config.pp)), key=lambda sums: sums.get("pp", 0))
        assert number(total) == sum(sent for kind, sent in sums.items() if kind != "sums"), text
        assert number(parameters) == sums.get("dp", 0), text


TRACES = {
    "context": Work(LLAMA, ParallelConfig(cp=2), 128, 8, 8, "float32"),
    "data": Work(LLAMA, ParallelConfig(dp_shard=2), 128, 16, 8, "float32"),
    "pipeline": Work(LLAMA, ParallelConfig(pp=2), 128, 8, 2, "float32"),
    "tensor": Work(LLAMA, ParallelConfig(tp=2), 128, 8, 8, "float32"),
}
"""The runs of the pages, but for their model."""


@pytest.mark.parametrize("name", DIMENSIONS)
def test_traces_are_those_of_the_quickstarts_model(name: str) -> None:
    """What the traced run printed; test_trace.py has the trace itself equal the planner."""
    shape = {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "tie_word_embeddings": "--model.tie-word-embeddings False" not in PAGES[name].partition("**See:**")[0],
    }
    about = TRACES[name]
    work = Work(LlamaConfig(**shape), about.layout, 128, about.global_batch, about.micro_batch, about.precision)
    sums, lines = bytes_by_kind(work), TRACED.findall(PAGES[name])
    assert {kind for kind, _, _ in lines} == set(sums) - {"sums"}
    for kind, calls, sent in lines:
        assert float(sent) == pytest.approx(sums[kind] / 1e6, abs=5e-4), kind
        if kind != "pp":  # its receives are calls as well
            assert int(calls) == sum(volume.calls for volume in volumes(work) if volume.kind == kind), kind


def test_idle_times() -> None:
    lines = re.findall(r"\| (\w+)[^|]* \| [^|]*\(p-1\)[^|]* \| (\d+)% \|", PAGES["pipeline"])
    assert [schedule for schedule, _ in lines] == ["gpipe", "interleaved_1f1b", "zero_bubble"]
    for schedule, idle in lines:
        virtual = 2 if schedule.startswith("interleaved") else 1
        assert f"{bubble(schedule, 4, 8, virtual=virtual):.0%}" == f"{idle}%"


@pytest.mark.parametrize("name", PAGES)
def test_names_exist(name: str) -> None:
    names = [name for name in NAME.findall(PAGES[name]) if not name.endswith((".md", ".py", ".svg", ".toml"))]
    assert names
    for dotted in names:
        module, _, function = dotted.partition(".")
        if module.startswith("test_"):
            source = (TESTS / f"{module}.py").read_text(encoding="utf-8")
            assert f"\ndef {function}(" in source, dotted
        else:
            pkgutil.resolve_name(f"llama_parallel.{dotted}")


def test_a_name_that_does_not_exist_is_seen() -> None:
    assert NAME.findall("`pipeline.Pipeline` and `planner.comm_volume.volumes`, `B·S/n`, `--flag 1.5`") == [
        "pipeline.Pipeline",
        "planner.comm_volume.volumes",
    ]
    with pytest.raises(AttributeError):
        pkgutil.resolve_name("llama_parallel.pipeline.Pipelines")


def test_every_page_shows_its_figure() -> None:
    for name in DIMENSIONS:
        assert re.findall(r"!\[[^\]]+\]\(([^)]+)\)", PAGES[name]) == [f"{name}.svg"]
    assert sorted(path.name for path in FOLDER.glob("*.svg")) == [f"{name}.svg" for name in DIMENSIONS]


def script() -> ModuleType:
    """The script that draws; needs matplotlib, which the session `docs` has."""
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("figures", FOLDER / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures_are_what_the_script_draws(tmp_path: Path) -> None:
    figures = script()
    import matplotlib

    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        figures.write(folder)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [f"{name}.svg" for name in DIMENSIONS]
    for name in DIMENSIONS:
        drawn, again, kept = (folder / f"{name}.svg" for folder in (tmp_path / "one", tmp_path / "two", FOLDER))
        assert drawn.read_bytes() == again.read_bytes()
        text = kept.read_text(encoding="utf-8")
        # another release may write another number of digits; what stands in the drawing stays
        assert texts(drawn.read_text(encoding="utf-8")) == texts(text)
        if f"Matplotlib v{matplotlib.__version__}," in text:
            assert drawn.read_bytes() == kept.read_bytes()


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize(("stages", "batches"), [(2, 4), (3, 6), (4, 8)])
def test_drawn_schedules_are_as_idle_as_the_formula_says(schedule: str, stages: int, batches: int) -> None:
    figures = script()
    rows = figures.timeline(schedule, stages, batches)
    assert figures.idle(rows) == pytest.approx(bubble(schedule, stages, batches))
    done = {
        (kind, batch, stage): start + length for stage, row in enumerate(rows) for start, length, kind, batch in row
    }
    assert len(done) == stages * batches * (3 if schedule == "zero_bubble" else 2)
    for stage, row in enumerate(rows):
        for start, _, kind, batch in row:
            before = {"F": ("F", batch, stage - 1), "B": ("B", batch, stage + 1), "W": ("B", batch, stage)}[kind]
            assert start >= done.get(before, 0), (stage, kind, batch)
            assert kind != "B" or start >= done["F", batch, stage]
        ends = [start + length for start, length, _, _ in row]
        assert all(start >= end for (start, *_), end in zip(row[1:], ends))  # one thing at a time
