"""The examples of a checkout: the quickstart in four dimensions is the quickstart."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_parallel.testing import run_ranks
from llama_train import TrainConfig, load_config, train
from llama_train.config import ParallelSettings

EXAMPLES = Path(__file__).parents[3] / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="examples lie in a checkout only")


def test_quickstart_4d_is_the_quickstart_on_eight_processes(
    text_folder: Path, tmp_path: Path, change: Callable[..., TrainConfig], recorder: Callable[[], Any]
) -> None:
    one, many = (load_config(EXAMPLES / name) for name in ("quickstart.toml", "quickstart-4d.toml"))
    rows = replace(one.data, micro_batch_size=many.data.micro_batch_size, gradient_accumulation_steps=2)
    same = replace(many, name=one.name, device=one.device, data=one.data, parallel=ParallelSettings())
    assert (same, rows) == (one, many.data)
    assert many.rows_per_step == one.rows_per_step == 8
    short = {
        "schedule.warmup_steps": 2, "schedule.steps": 4, "data.source": str(text_folder), "data.vocab_size": 300,
        "data.sequence_length": 32, "evaluation.max_tokens": 300, "evaluation.sample_tokens": 4, "logging.every": 1,
    }  # fmt: skip
    one, many = (change(config, folder=str(tmp_path / config.name), device="cpu", **short) for config in (one, many))
    train(one, recorder())
    run_ranks(lambda rank: train(many, recorder()).step, 8, timeout=200)
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text("utf-8").splitlines()]
        for name in ("quickstart", "quickstart-4d")
    ]
    # float32, sums in another order: 1e-7 of the loss at first, and steps multiply what differs
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(losses[0]) == 5
