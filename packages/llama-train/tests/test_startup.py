"""What is told before a run begins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_parallel import Process
from llama_train import TrainConfig, train
from llama_train.startup import resolve_run

Change = Callable[..., TrainConfig]
Make = Callable[[], Any]


def test_everything_auto_is_resolved(tiny: TrainConfig, change: Change) -> None:
    config, device, attention = resolve_run(change(tiny, **{"parallel.tp": 2}), Process(3, 4, 3))
    assert (config.parallel.dp_shard, config.parallel.tp, config.rows_per_step) == (2, 2, 8)
    assert (device, config.dtype, attention) == (torch.device("cpu"), "float32", "sdpa")


def test_more_processes_than_gpus(tiny: TrainConfig, change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes were started on a host with 1 GPUs"):
        resolve_run(change(tiny, device="cuda", attention="plain"), Process(0, 2, 0))


def test_held_out_text_without_a_target_is_told_before_training(
    tiny: TrainConfig, change: Change, recorder: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llama_train import startup

    monkeypatch.setattr(startup, "measuring_batches", lambda *arguments, **keys: iter(()))
    reporter = recorder()
    with pytest.raises(ValueError, match="the held-out text has no token to predict"):
        train(tiny, reporter)
    assert "model " not in reporter.text


def test_threads_are_set(tiny: TrainConfig, change: Change, recorder: Make) -> None:
    before = torch.get_num_threads()
    try:
        train(change(tiny, **{"threads": 2, "schedule.warmup_steps": 1, "schedule.steps": 1}), recorder())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    with pytest.raises(ValueError, match="threads is 0; it must be 1 to 1024"):
        change(tiny, threads=0)


def test_a_finished_run_started_again_adds_nothing(tiny: TrainConfig, recorder: Make) -> None:
    first = train(tiny, recorder())
    metrics = first.folder / "metrics.jsonl"
    written = metrics.read_text(encoding="utf-8")
    again = train(tiny, recorder())
    assert metrics.read_text(encoding="utf-8") == written
    assert again.held_out == first.held_out
    assert [json.loads(line)["kind"] for line in written.splitlines()].count("held_out") == 1


def test_a_file_in_the_place_of_the_export_is_told_at_once(tiny: TrainConfig, change: Change, recorder: Make) -> None:
    train(change(tiny, **{"checkpoint.export": False}), recorder())
    (Path(str(tiny.folder)) / "hf").write_text("a note")
    reporter = recorder()
    with pytest.raises(ValueError, match=r"hf is a file, and the finished model is to be written there"):
        train(tiny, reporter)
    assert reporter.text == ""


def test_the_summary_says_what_will_be_done(tiny: TrainConfig, change: Change, recorder: Make) -> None:
    """Model, memory, batch arithmetic and schedule, worked out by hand for the tiny run."""
    keys = {"schedule.shape": "wsd", "schedule.cooldown_steps": 5, "data.gradient_accumulation_steps": 2}
    keys["optimizer.z_loss"] = 1e-4
    reporter = recorder()
    train(change(tiny, **keys), reporter)
    parameters = 2 * 300 * 16 + 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32 + 2 * 16) + 16
    found = {line.partition(" ")[0]: line for line in reporter.lines if not line.startswith("step")}
    assert found["model"] == f"model      {parameters / 1000:.2f}K parameters, float32 on cpu"
    assert found["batch"].startswith("batch      4 × 16 tokens × 2 = 128 a step; 20 steps = 2.56K tokens, ")
    expected = "schedule   4 steps of warm-up to 0.001, 11 at that, 5 of cool-down (1-sqrt) to 0.0001"
    assert found["schedule"] == expected
    assert found["loss"] == "loss       cross-entropy + 0.0001 log²Z; held out, cross-entropy alone"
    weights = f"{4 * parameters / 1e9:.3g}"
    optimizer = f"{8 * parameters / 1e9:.3g}"
    assert (
        f"GB predicted: weights {weights}, gradients {weights}, optimizer {optimizer}, activations" in found["memory"]
    )
