"""The examples of a checkout: the quickstart in four dimensions is the quickstart; the large ones fit their GPUs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_core import preset
from llama_parallel.planner import predict_memory
from llama_parallel.testing import run_ranks
from llama_train import TrainConfig, load_config, train
from llama_train.config import ParallelSettings
from llama_train.layout_choice import check_parallel, fill_in
from llama_train.out_of_memory import work_of

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
    losses = []
    for name in ("quickstart", "quickstart-4d"):
        lines = (tmp_path / name / "metrics.jsonl").read_text("utf-8").splitlines()
        losses.append([record["loss"] for record in map(json.loads, lines) if "loss" in record])  # a sample has none
    # float32, sums in another order: 1e-7 of the loss at first, and steps multiply what differs
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(losses[0]) == 5


README = (EXAMPLES / "README.md").read_text(encoding="utf-8") if EXAMPLES.is_dir() else ""
ROWS = re.findall(r"^\| \[([\w.-]+\.toml)\].*\| (\d+) GPUs? of (\d+) GB \| (\d+) GB", README, re.MULTILINE)


def test_the_readme_lists_every_example() -> None:
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".toml", ".py", ".jsonl")}
    assert names == set(re.findall(r"\]\(([\w.-]+)\)", README))
    assert len(ROWS) == 4


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.toml")) if EXAMPLES.is_dir() else [])
def test_an_example_says_how_to_start_it(name: str) -> None:
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    assert re.search(rf"^#.* run examples/{re.escape(name)}$", text, re.MULTILINE)
    assert load_config(EXAMPLES / name).name == name.removesuffix(".toml")


@pytest.mark.parametrize(("name", "gpus", "size", "predicted"), ROWS)
def test_a_large_example_fits(name: str, gpus: str, size: str, predicted: str) -> None:
    """The layout is one that can train the model, and needs what the README and the file say: less than there is."""
    config = load_config(EXAMPLES / name)
    config = replace(config, parallel=fill_in(config.parallel, int(gpus)))
    assert (config.device, config.dtype) == ("cuda", "bfloat16")
    assert config.model.preset is not None
    shape = preset(config.model.preset)
    assert config.data.sequence_length <= shape.max_position_embeddings
    check_parallel(config, shape)
    memory = predict_memory(replace(work_of(config), model=shape)).total / 1e9
    assert memory == pytest.approx(float(predicted), abs=0.5)
    assert memory < 0.95 * float(size)  # the driver's context and the communication library want some
    assert f"{predicted} GB" in (EXAMPLES / name).read_text(encoding="utf-8")
    config.schedule.resolved(config.rows_per_step * config.data.sequence_length)
