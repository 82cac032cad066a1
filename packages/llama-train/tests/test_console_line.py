from __future__ import annotations

from llama_train.console_line import format_line
from llama_train.metrics import StepMetrics


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
        "memory": 10**9,
        "data_wait": 0.02,
    }
    return StepMetrics(step=step, **{**values, **changes})  # type: ignore[arg-type]


def test_lines_of_a_run_are_aligned() -> None:
    lines = [
        format_line(_metrics(1, loss=11.0, grad_norm=123.456), 1000),
        format_line(_metrics(10, data_wait=123.4), 1000),
        format_line(_metrics(999, tokens_per_second=1.0, tokens_per_second_per_device=1.0, memory=80e9), 1000),
    ]
    assert len({len(line) for line in lines}) == 1
    assert len({line.index("tok/s") for line in lines}) == 1
    assert all("MFU" not in line and "each" not in line for line in lines)
    assert "wait 123.4 ms" in lines[1]
    assert "80.00 GB" in lines[2]


def test_a_gpu_among_several_shows_its_part_and_both_utilisations() -> None:
    line = format_line(_metrics(10, tokens_per_second_per_device=6172.5, mfu=0.5, mfu_torchtitan=0.475), 1000)
    assert "12.35K tok/s    6.17K tok/s each  MFU 50.0% / 47.5%" in line
    assert format_line(_metrics(10, skipped=3), 1000).endswith("skipped 3")
