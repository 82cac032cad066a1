"""Runs on a GPU: the fast operations train as the plain ones do, and a run resumes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_train import TrainConfig, train

pytestmark = pytest.mark.gpu


@pytest.fixture
def on_gpu(tiny: TrainConfig, change: Callable[..., TrainConfig]) -> TrainConfig:
    """The tiny run with a head width that kernels have, on the GPU in float32."""
    shape = {"model.hidden_size": 64, "model.intermediate_size": 128}
    return change(tiny, device="cuda", dtype="float32", **shape)


def _losses(config: TrainConfig) -> list[float]:
    lines = (Path(str(config.folder)) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["loss"] for record in map(json.loads, lines) if record["kind"] == "train"]


@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_losses_are_those_of_the_cpu(
    on_gpu: TrainConfig, kernels: Any, tmp_path: Path, recorder: Callable[[], Any]
) -> None:
    gpu = replace(on_gpu, kernels=kernels)
    cpu = replace(on_gpu, device="cpu", folder=str(tmp_path / "cpu"))
    train(gpu, recorder())
    train(cpu, recorder())
    # 20 steps amplify float32 differences of about 1e-6 a step; a wrong formula is off by more than 1e-2 at once.
    assert _losses(gpu) == pytest.approx(_losses(cpu), abs=2e-3)


def test_bfloat16_learns_as_float32_does(on_gpu: TrainConfig, tmp_path: Path, recorder: Callable[[], Any]) -> None:
    half = replace(on_gpu, dtype="auto", folder=str(tmp_path / "half"))
    train(half, recorder())
    train(on_gpu, recorder())
    assert 'dtype = "bfloat16"' in (tmp_path / "half" / "config.toml").read_text(encoding="utf-8")
    # bfloat16 keeps 8 bits; a mean of many token losses is good to about 1e-2.
    assert _losses(half) == pytest.approx(_losses(on_gpu), abs=3e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_goes_on_where_it_was(
    on_gpu: TrainConfig,
    dtype: Any,
    tmp_path: Path,
    stop_after: Callable[[int, pytest.MonkeyPatch], None],
    recorder: Callable[[], Any],
) -> None:
    whole = replace(on_gpu, dtype=dtype, folder=str(tmp_path / "whole"))
    parts = replace(whole, folder=str(tmp_path / "parts"))
    train(whole, recorder())
    with pytest.MonkeyPatch.context() as patch:
        stop_after(10, patch)
        assert train(parts, recorder()).step == 10
    assert train(parts, recorder()).finished
    # A GPU may add in another order the second time; forgotten moments would show at once in the second digit.
    assert _losses(parts) == pytest.approx(_losses(whole), abs=2e-3)
