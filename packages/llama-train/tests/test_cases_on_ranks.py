"""Cases B25 and B30 on two data-parallel ranks: what one of them counts, all divide by."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llama_core import LlamaConfig
from llama_parallel import Process
from llama_parallel.testing import run_ranks
from llama_train import TrainConfig
from llama_train.batches import IGNORED, Batch
from llama_train.config import OptimizerConfig, ParallelSettings
from llama_train.trainer import OneProcess
from llama_train.world import World

CPU = torch.device("cpu")
T0 = LlamaConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.2,
)


def _row(unmasked: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, 128, (2, 1, 12), generator=generator)
    targets[:, unmasked:] = IGNORED
    return Batch(tokens, targets)


def _config(**parallel: int) -> TrainConfig:
    return TrainConfig(
        device="cpu",
        dtype="float64",
        optimizer=OptimizerConfig(weight_decay=0.0, max_grad_norm=0.0),
        parallel=ParallelSettings(**parallel),  # type: ignore[arg-type]
    )


def _whole(rows: list[Batch]) -> tuple[float, float, int, dict[str, torch.Tensor]]:
    trainer = OneProcess(_config(), T0, World(Process(), CPU))
    result = trainer.step(rows, 0.1, 0.0)
    return float(result.loss), float(result.grad_norm), result.targets, trainer.weights()


@pytest.mark.parametrize(
    "rows",
    [((2, 11), (5, 7)), ((2, 5), (11, 7)), ((4, 3), (0, 0)), ((0, 0), (0, 0))],
    ids=["B25 2/11 and 5/7", "B25 2/5 and 11/7", "B30 (4)", "B30 (2) on both"],
)
@pytest.mark.parametrize("kind", ["dp_shard", "dp_replicate"])
def test_cases_b25_and_b30_4_on_two_ranks(kind: str, rows: tuple[tuple[int, ...], ...]) -> None:
    """transformers#34191, torchtitan#2206, llama-cookbook#133 (4): loss, norm and weights after a step are those of one
    process with all four rows, whichever rank has the labels."""
    batches = [[_row(unmasked, seed) for seed, unmasked in enumerate(part, 10 * n)] for n, part in enumerate(rows)]
    loss, norm, targets, weights = _whole([batch for part in batches for batch in part])
    assert targets == sum(map(sum, rows))

    def work(rank: int) -> tuple[float, float, int, dict[str, torch.Tensor]]:
        import torch.distributed as dist

        from llama_train.on_ranks import OnRanks

        group: Any = dist.new_group(backend="gloo")
        config = _config(**{"dp_shard": 1, kind: 2})
        trainer = OnRanks(config, T0, World(Process(rank, 2), CPU, group))
        result = trainer.step([trainer.share(batch) for batch in batches[rank]], 0.1, 0.0)
        found = {n: w.full_tensor() if hasattr(w, "full_tensor") else w for n, w in trainer.weights().items()}
        return float(result.loss), float(result.grad_norm), result.targets, {n: w.detach() for n, w in found.items()}

    for found in run_ranks(work, 2, timeout=60):
        assert found[0] == pytest.approx(loss, abs=1e-10)
        assert found[1] == pytest.approx(norm, abs=1e-10)
        assert found[2] == targets
        for name, weight in weights.items():
            # the first step of AdamW divides a gradient by its own size: rounding of the tiniest is all that differs
            torch.testing.assert_close(found[3][name], weight.detach(), rtol=0, atol=1e-7)
            assert bool(found[3][name].isfinite().all())
    if not targets:
        fresh = OneProcess(_config(), T0, World(Process(), CPU)).weights()
        assert all(torch.equal(weights[name], weight) for name, weight in fresh.items())
        assert loss == 0.0
