"""The report is one well-formed page with nothing from elsewhere, whatever the prompt holds."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

from llama_core import Llama, LlamaConfig, Tokenizer, preset
from llama_infer.inspection import Look, Recorder, look, report
from llama_infer.inspection.report import amount, duration
from llama_infer.inspection.splits import splits
from llama_infer.inspection.stored import Stored
from llama_infer.inspection.summary import print_summary
from llama_infer.inspection.svg import heat_map, polar, shown

HOSTILE = '<script>alert("x")</script> & [bold]'
VOID = {"meta", "br"}


@pytest.fixture(scope="module")
def seen(model: Llama, tokenizer: Tokenizer) -> Look:
    recorder = Recorder(keep=0)
    watched = Llama(model.config, recorder.ops).eval().requires_grad_(False)
    watched.load_state_dict(model.state_dict())
    stored = [Stored("model.embed_tokens.weight", (272, 32), "Q8_0", 9248)]
    return look(watched, recorder, tokenizer, HOSTILE, name="<tiny>", stored=stored, heads=(0, 3))


class Page(HTMLParser):
    """Checks that every element is closed; collects what refers to other files."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.refers: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.refers += [value or "" for name, value in attributes if name in ("src", "href")]

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_by_itself(seen: Look) -> None:
    text = report(seen)
    page = Page()
    page.feed(text)
    assert page.open == []
    assert "script" not in page.names
    assert page.refers
    assert all(target.startswith("#") for target in page.refers)
    assert set(re.findall(r'id="(\w+)"', text)) >= {target[1:] for target in page.refers}
    assert "url(" not in text
    assert "<h1>&lt;tiny&gt; at work</h1>" in text
    for word in ("q_proj", "swiglu", "num_key_value_heads", "Q8_0", "Head 3, which reads key/value head 1"):
        assert word in text
    assert text.count("<svg") == 2 * 3 + 1


def test_figures_of_a_long_prompt_say_what_they_leave_out(model: Llama, tokenizer: Tokenizer, seen: Look) -> None:
    recorder = Recorder()
    watched = Llama(model.config, recorder.ops).eval().requires_grad_(False)
    long = look(watched, recorder, tokenizer, "x" * 50)
    # This model has more rows than its tokenizer has tokens, and fresh weights like those as well as others.
    assert any(guess.token.startswith("(row ") for guesses in long.lens for guess in guesses)
    text = report(long)
    assert "The first 11 tokens are left out" in re.sub(r"\s+", " ", text)
    assert text.count("<rect") == 3 * 40 * 40
    assert "are left out" not in re.sub(r"\s+", " ", report(seen))


def test_the_summary_takes_no_markup_from_the_prompt(seen: Look) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    print_summary(seen, console)
    text = console.export_text()
    assert re.search(r" \[\(\d+\) b\(\d+\) o\(\d+\) l\(\d+\) d\(\d+\) \]\(\d+\)\n", text)
    for word in ("272", "Q8_0", "down_proj", "intermediate_size", "attention of layer 0, head 0"):
        assert word in text


def test_heat_maps_are_xml_with_a_cell_for_each_pair() -> None:
    values = torch.tensor([[1.0, -2.0], [float("-inf"), 0.0]]).tolist()
    root = ElementTree.fromstring(heat_map(values, ["<a>", " b"], "t", signed=True))
    cells = root.findall("rect")
    assert [cell.get("fill") for cell in cells] == ["#d48891", "#2166ac", None, "#f7f7f7"]
    assert [cell.findtext("title") for cell in cells] == [
        "<a> → <a>: 1",
        "<a> → ·b: -2",
        "·b → <a>: masked",
        "·b → ·b: 0",
    ]


def test_angles_of_the_polar_plot() -> None:
    root = ElementTree.fromstring(polar([1.5707963267948966, 0.0], [0, 1, 2], ["a", "b", "c"]))
    lines = [line.get("points") for line in root.iter("polyline")]
    # middle 200, radius 24 of the fast pair and 180 of the slow one; y grows downwards
    assert lines == ["224.0,200.0 380.0,200.0", "200.0,176.0 380.0,200.0", "176.0,200.0 380.0,200.0"]


def test_numbers_for_people() -> None:
    assert [amount(x).strip() for x in (0, 999, 1234567, 2e9)] == ["0", "999", "1.23 M", "2 G"]
    assert [duration(x) for x in (2.5, 0.00123, 4.5e-5)] == ["2.5 s", "1.23 ms", "45 µs"]
    assert shown(" a\n\x1b", 9) == "·a⏎�"
    assert shown("abcdef", 4) == "abc…"


@pytest.mark.parametrize(
    ("config", "ways"),
    [
        (preset("smollm2-135m"), "1, 3"),
        (preset("llama-3-8b"), "1, 2, 4, 8, 16, 32"),
        (preset("llama-2-7b"), "1, 2, 4, 8, 16, 32"),
    ],
)
def test_tensor_parallel_ways_are_those_that_layouts_accept(config: LlamaConfig, ways: str) -> None:
    from llama_parallel import ParallelConfig, check_layout

    lines = {split.parameter: split for split in splits(config)}
    assert lines["heads and channels together"].ways == ways
    for tp in range(1, 65):
        layout, allowed = ParallelConfig(tp=tp), str(tp) in ways.split(", ")
        try:
            check_layout(layout, config, sequence_length=64 * 63, global_batch=1, sequence_parallel=False)
        except ValueError:
            assert not allowed, tp
        else:
            assert allowed, tp
