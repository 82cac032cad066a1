"""Steps that are not finite: the run stops, skips them or goes back, on all ranks alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_core import Llama
from llama_parallel.testing import run_ranks
from llama_train import TrainConfig, TrainResult, train
from llama_train.batches import TrainingRows
from llama_train.checkpoint import list_checkpoints, load_checkpoint
from llama_train.config import OptimizerConfig, ParallelSettings
from llama_train.nonfinite import NonFiniteLoss
from llama_train.optimizer import Optimizer
from llama_train.step import StepResult, not_finite
from llama_train.trainer import OneProcess

Change = Callable[..., TrainConfig]
Make = Callable[[], Any]
NAME = "model.layers.1.mlp.up_proj.weight"


@contextmanager
def poisoned(calls: Collection[int], rank: int | None = None) -> Iterator[None]:
    """NaN in one element of one gradient, in the calls of those numbers; on several processes that of one rank."""
    from llama_train import on_ranks, step

    module: Any = step if rank is None else on_ranks
    original, made = module.accumulate_gradients, []

    def accumulate(*arguments: Any, **keys: Any) -> Any:
        result = original(*arguments, **keys)
        made.append(None)
        if len(made) in calls and (rank is None or torch.distributed.get_rank() == rank):
            model = arguments[0] if rank is None else arguments[0].model
            gradient = dict(model.named_parameters())[NAME].grad
            (gradient.to_local() if hasattr(gradient, "to_local") else gradient).view(-1)[3] = float("nan")
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "accumulate_gradients", accumulate)
        yield


def _state(folder: str | Path | None) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import FileSystemReader

    checkpoint = list_checkpoints(Path(str(folder)) / "checkpoints")[-1]
    metadata = FileSystemReader(checkpoint.path).read_metadata().state_dict_metadata
    state = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in metadata.items()}  # type: ignore[union-attr]
    load_checkpoint(checkpoint, state)
    return state


def _records(folder: str | Path | None) -> list[dict[str, Any]]:
    lines = (Path(str(folder)) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "train"]


def _equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], but: Collection[str] = ()) -> None:
    assert found.keys() == expected.keys()
    for name in expected.keys() - set(but):
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_skipped_update_changes_nothing_at_all(t0: Callable[..., Llama], bad: float) -> None:
    """Weights, moments and step counts, bit for bit; with skip at 0 the step is the ordinary one."""
    models = [t0() for _ in range(2)]
    optimizers = [Optimizer(model.named_parameters(), OptimizerConfig()) for model in models]

    def step(number: int, seed: int, skip: torch.Tensor | None) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in models[number].parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            if skip is not None and skip:
                parameter.grad.view(-1)[0] = bad
        optimizers[number].step(1e-2, skip)

    for seed in range(3):
        step(0, seed, None)
        step(1, seed, torch.tensor(0.0))
        step(1, 9, torch.tensor(1.0))
    for name, parameter in models[0].named_parameters():
        assert torch.equal(dict(models[1].named_parameters())[name], parameter)
    _equal(optimizers[1].state_dict(), optimizers[0].state_dict())


def test_what_is_not_finite() -> None:
    fine, nan, infinite = torch.tensor(1.0), torch.tensor(float("nan")), torch.tensor(float("inf"))
    assert [float(not_finite(*pair)) for pair in ((fine, fine), (nan, fine), (fine, infinite))] == [0.0, 1.0, 1.0]


def test_skip_is_a_run_without_that_update(tiny: TrainConfig, change: Change, tmp_path: Path, recorder: Make) -> None:
    config = change(tiny, **{"optimizer.on_nonfinite": "skip"})
    reporter = recorder()
    with poisoned({5, 6}):
        result = train(config, reporter)
    assert (result.finished, result.nonfinite) == (True, (5, 6))
    assert f"skipped    the gradient norm of step 5 is nan (not finite: the gradient of {NAME})" in reporter.text
    assert "nonfinite  2 steps were not finite and were skipped: 5, 6" in reporter.text
    records = _records(config.folder)
    assert [record["skipped"] for record in records] == [0] * 4 + [1] + [2] * 15
    assert records[4]["grad_norm"] is None  # JSON has no NaN
    assert [line.rpartition("  ")[2] for line in reporter.lines if line.startswith("step  7/")] == ["skipped 2"]

    # The oracle does not even compute those steps.
    whole = replace(config, folder=str(tmp_path / "oracle"))
    original, made = OneProcess.step, []

    def step(*arguments: Any) -> StepResult:
        made.append(None)
        if len(made) in (5, 6):
            return StepResult(torch.tensor(1.0), torch.tensor(1.0), 1)
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OneProcess, "step", step)
        train(whole, recorder())
    _equal(_state(config.folder), _state(whole.folder))


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"dp_replicate": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_all_ranks_skip_what_one_cannot_use(
    layout: dict[str, int], tiny: TrainConfig, change: Change, tmp_path: Path, recorder: Make
) -> None:
    """The gradient is wrong on one rank alone; afterwards every weight is that of one process that skipped the step."""
    culprit = 0 if "dp_replicate" in layout else 1  # replicas hold one gradient alike, and rank 0 speaks for them
    base = {"dtype": "float64", "optimizer.on_nonfinite": "skip", "data.gradient_accumulation_steps": 2}
    config = change(tiny, **base, **{"schedule.steps": 5, "model.num_key_value_heads": 2})
    alone = replace(config, folder=str(tmp_path / "alone"))
    with poisoned({3}):
        train(alone, recorder())
    ranks = replace(config, folder=str(tmp_path / "ranks"), parallel=replace(ParallelSettings(dp_shard=1), **layout))
    if "pp" not in layout and "tp" not in layout:
        ranks = replace(ranks, data=replace(ranks.data, micro_batch_size=2))

    def work(rank: int) -> tuple[TrainResult, str]:
        reporter = recorder()
        with poisoned({3}, rank=culprit):
            return train(ranks, reporter), reporter.text

    results = run_ranks(work, 2, timeout=120)
    assert all(result.nonfinite == (3,) for result, _ in results)
    assert f"the gradient of {NAME} on rank {culprit})" in results[0][1]
    state, expected = _state(ranks.folder), _state(alone.folder)
    for name in expected:
        if "generator" not in name:
            torch.testing.assert_close(state[name], expected[name], rtol=0, atol=1e-10)


def test_too_many_in_a_row_end_the_run(tiny: TrainConfig, change: Change, tmp_path: Path, recorder: Make) -> None:
    config = change(tiny, **{"optimizer.on_nonfinite": "skip", "optimizer.max_nonfinite": 2, "checkpoint.every": 1})
    with poisoned({3, 4, 6, 7}):
        assert train(config, recorder()).finished
    config = replace(config, folder=str(tmp_path / "other"))
    with (
        poisoned({3, 4, 5}),
        pytest.raises(NonFiniteLoss, match=r"of step 5 is nan .* number 3 in a row, and optimizer.max_nonfinite is 2"),
    ):
        train(config, recorder())
    assert list_checkpoints(tmp_path / "other" / "checkpoints")[-1].step == 4  # good: it is that of step 2


def test_rollback_passes_over_the_rows_since_the_checkpoint(
    tiny: TrainConfig, change: Change, tmp_path: Path, recorder: Make, stop_after: Any
) -> None:
    config = change(tiny, **{"optimizer.on_nonfinite": "rollback", "checkpoint.every": 4})
    reporter = recorder()
    with poisoned({7}), pytest.MonkeyPatch.context() as patch:
        stop_after(15, patch)  # the 12th step of those that count
        first = train(config, reporter)
    assert (first.step, first.nonfinite) == (12, (7,))
    assert "rollback   to step 4; the rows of the steps up to 7 are passed over" in reporter.text
    assert "nonfinite  1 steps were not finite and were rolled back: 7" in reporter.text
    assert [record["step"] for record in _records(config.folder)] == list(range(1, 13))
    reporter = recorder()
    train(config, reporter)  # a new process, which learns from the checkpoint what was passed over
    assert "resumed    step 12" in reporter.text

    # The oracle has these rows from the beginning.
    original = TrainingRows.micro_batches

    def shifted(self: TrainingRows, step: int, *arguments: Any) -> Any:
        return original(self, step if step <= 4 else step + 3, *arguments)

    whole = replace(config, folder=str(tmp_path / "oracle"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRows, "micro_batches", shifted)
        train(whole, recorder())
    found = _state(config.folder)
    _equal(found, _state(whole.folder), but={"data.passed_over"})
    assert int(found["data.passed_over"]) == 3
    assert [record["loss"] for record in _records(config.folder)] == [r["loss"] for r in _records(whole.folder)]


def test_rollback_before_the_first_checkpoint_and_too_often(
    tiny: TrainConfig, change: Change, tmp_path: Path, recorder: Make
) -> None:
    config = change(tiny, **{"optimizer.on_nonfinite": "rollback", "optimizer.max_nonfinite": 1})
    reporter = recorder()
    with poisoned({2}):
        assert train(config, reporter).finished
    assert "rollback   to step 0; the rows of the steps up to 2 are passed over" in reporter.text
    again = replace(config, folder=str(tmp_path / "again"))
    # the second comes after a step that was made twice: that is no progress
    with poisoned({3, 5}), pytest.raises(NonFiniteLoss, match=r"of step 2 is nan .* number 2 in a row"):
        train(again, recorder())


def test_a_branch_has_something_to_go_back_to(
    tiny: TrainConfig, change: Change, tmp_path: Path, recorder: Make
) -> None:
    """Before its own first checkpoint, the one it began with: the other run's folder may be gone by then."""
    trunk = change(tiny, **{"schedule.steps": 5})
    train(trunk, recorder())
    keys = {"optimizer.on_nonfinite": "rollback", "schedule.steps": 8}
    branch = change(trunk, folder=str(tmp_path / "branch"), resume_from=str(trunk.folder), **keys)
    reporter = recorder()
    with poisoned({2}):
        result = train(branch, reporter)
    assert (result.step, result.nonfinite) == (8, (7,))
    assert "rollback   to step 5; the rows of the steps up to 7 are passed over" in reporter.text


def test_ranks_roll_back_together(tiny: TrainConfig, change: Change, recorder: Make) -> None:
    keys = {
        "optimizer.on_nonfinite": "rollback",
        "checkpoint.every": 2,
        "schedule.steps": 6,
        "data.micro_batch_size": 2,
    }
    config = change(tiny, **keys)

    def work(rank: int) -> tuple[int, tuple[int, ...]]:
        with poisoned({4}, rank=1):
            result = train(config, recorder())
        return result.step, result.nonfinite

    assert run_ranks(work, 2, timeout=120) == [(6, (4,))] * 2
    assert int(_state(config.folder)["data.passed_over"]) == 2
