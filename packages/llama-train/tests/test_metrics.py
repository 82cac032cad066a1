from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from llama_train.metrics import MetricsFile, StepMetrics, format_line, human, peak_memory


def _metrics(step: int, **changes: float) -> StepMetrics:
    values = {
        "tokens": step * 2048,
        "loss": 1.5,
        "grad_norm": 0.25,
        "learning_rate": 1e-3,
        "tokens_per_second": 12345.0,
        "mfu": None,
        "memory": 10**9,
    }
    return StepMetrics(step=step, **{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00K"),
        (1234, "1.23K"),
        (999_990, "999.99K"),
        (999_999, "1.00M"),
        (2.5e12, "2.50T"),
    ],
)
def test_human(number: float, text: str) -> None:
    assert human(number) == text


def test_lines_of_a_run_are_aligned() -> None:
    lines = [
        format_line(_metrics(1, loss=11.0, grad_norm=123.456), 1000),
        format_line(_metrics(10, mfu=0.5), 1000),
        format_line(_metrics(999, tokens_per_second=1.0, memory=80e9, learning_rate=3e-10), 1000),
    ]
    assert len({len(line) for line in lines}) == 1
    assert len({line.index("tok/s") for line in lines}) == 1
    assert "MFU  50.0%" in lines[1]
    assert "80.00 GB" in lines[2]


def test_file_drops_what_a_resumed_run_writes_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step in (1, 2, 3):
        file.write(_metrics(step))
    file.write_evaluation(3, 2.0, 10)
    with path.open("a") as raw:
        raw.write('{"step": 4, "lo')  # killed in the middle
    MetricsFile(path, 2).write(_metrics(3, loss=9.0))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert records[2]["loss"] == 9.0
    assert records[0]["kind"] == "train"


def test_peak_memory_of_this_process_is_plausible() -> None:
    assert 50e6 < peak_memory(torch.device("cpu")) < 1e12
