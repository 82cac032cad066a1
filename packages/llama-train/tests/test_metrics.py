from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from llama_train.metrics import EvaluationMetrics, MetricsFile, Sinks, StepMetrics, human, peak_memory


def _metrics(step: int, **changes: float) -> StepMetrics:
    values = {
        "tokens": step * 2048,
        "loss": 1.5,
        "grad_norm": 0.25,
        "learning_rate": 1e-3,
        "tokens_per_second": 12345.0,
        "tokens_per_second_per_device": 12345.0,
        "mfu": None,
        "mfu_torchtitan": None,
        "data_wait": 0.0,
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


def test_file_drops_what_a_resumed_run_writes_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step in (1, 2, 3):
        file.write(_metrics(step))
    file.write_evaluation(EvaluationMetrics(3, 2.0, 10, 7.4, 1.1))
    with path.open("a") as raw:
        raw.write('{"step": 4, "lo')  # killed in the middle
    MetricsFile(path, 2).write(_metrics(3, loss=9.0))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert records[2]["loss"] == 9.0
    assert records[0]["kind"] == "train"


def test_a_file_with_a_damaged_byte_opens_without_that_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"kind": "train", "step": 1}\n{"kind": "tr\xceain", "step": \xce}\n{"kind": "train", "step": 3}\n'
    )
    MetricsFile(path, 3)
    assert [json.loads(line)["step"] for line in path.read_text(encoding="utf-8").splitlines()] == [1, 3]


def test_a_measurement_is_kept_once_and_every_line_is_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):  # a finished run that is started again
        file = MetricsFile(path, 3)
        for _ in range(2):
            file.write_evaluation(EvaluationMetrics(3, 800.0, 10, float("inf"), None))
            file.write_sample(3, "def f\n")
    records = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert records == [
        {"kind": "held_out", "step": 3, "loss": 800.0, "tokens": 10, "perplexity": None, "bits_per_byte": None},
        {"kind": "sample", "step": 3, "text": "def f\n"},
    ]


def test_several_sinks_get_everything(tmp_path: Path) -> None:
    closed: list[str] = []

    class Sink(MetricsFile):
        def close(self) -> None:
            closed.append(self._path.name)

    sinks = Sinks([Sink(tmp_path / name, 0) for name in ("a.jsonl", "b.jsonl")])
    sinks.write(_metrics(1))
    sinks.write_evaluation(EvaluationMetrics(1, 2.0, 10, 7.4, 1.1))
    sinks.write_sample(1, "x")
    sinks.close()
    texts = [(tmp_path / name).read_text() for name in ("a.jsonl", "b.jsonl")]
    assert texts[0] == texts[1]
    assert [json.loads(line)["kind"] for line in texts[0].splitlines()] == ["train", "held_out", "sample"]
    assert closed == ["a.jsonl", "b.jsonl"]


def test_peak_memory_of_this_process_is_plausible() -> None:
    assert 50e6 < peak_memory(torch.device("cpu")) < 1e12
