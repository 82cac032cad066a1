"""Runs on a GPU: the fast operations train as the plain ones do, and a run resumes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llama_parallel import Process
from llama_train import TrainConfig, train
from llama_train.batches import TrainingRows
from llama_train.build import model_config
from llama_train.prefetch import Prefetch
from llama_train.trainer import OneProcess
from llama_train.world import World

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


def test_prefetched_batches_are_those_of_the_cpu() -> None:
    """Through pinned memory and a stream of its own, while the GPU is busy with something else."""
    rows = TrainingRows(np.arange(100_000, dtype=np.uint16), 512, seed=0, bos_id=0)
    busy = torch.randn(2048, 2048, device="cuda")
    with Prefetch(lambda step: rows.micro_batches(step, 4, 2), 1, 30, "cuda") as data:
        for step in range(1, 31):
            for _ in range(5):
                busy = (busy @ busy).clamp(-1, 1)
            for batch, expected in zip(data.take(step), rows.micro_batches(step, 4, 2), strict=True):
                assert batch.tokens.is_cuda
                assert batch.count == expected.count
                found = (batch.tokens + 0, batch.targets + 0)  # on the current stream, before the memory is free again
                del batch
                assert torch.equal(found[0].cpu(), expected.tokens)
                assert torch.equal(found[1].cpu(), expected.targets)


# What torch says of the mode itself.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
def test_a_step_asks_the_gpu_for_nothing_and_skips_by_itself(
    on_gpu: TrainConfig, change: Callable[..., TrainConfig]
) -> None:
    """No number is read within a step, not even to find out that it must be skipped."""
    config = change(on_gpu, **{"optimizer.on_nonfinite": "skip"})
    shape = model_config(config.model, vocab_size=300, sequence_length=16, bos_id=None, eos_id=None)
    trainer = OneProcess(config, shape, World(Process(), torch.device("cuda")))
    rows = TrainingRows(np.arange(300, dtype=np.uint16), 16, seed=0, bos_id=None)
    with Prefetch(lambda step: rows.micro_batches(step, 4, 1), 1, 3, "cuda") as data:
        trainer.step(data.take(1), 1e-3, 1.0)  # compiles kernels, allocates
        torch.cuda.synchronize()
        before = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
        hook = trainer.model.model.norm.weight.register_hook(lambda gradient: gradient * float("nan"))
        batches = data.take(2)
        torch.cuda.set_sync_debug_mode("error")
        try:
            result = trainer.step(batches, 1e-3, 1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            hook.remove()
        assert not torch.isfinite(result.grad_norm)
        for name, tensor in trainer.tensors().items():
            assert torch.equal(tensor, before[name]), name
        trainer.step(data.take(3), 1e-3, 1.0)
        assert any(not torch.equal(tensor, before[name]) for name, tensor in trainer.tensors().items())
