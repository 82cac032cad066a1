"""Runs on forked ranks equal a run of one process, and go on from each other's checkpoints."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_core import load_model
from llama_parallel.testing import RankError, run_ranks
from llama_train import TrainConfig, TrainResult, train
from llama_train.checkpoint import SaveError, list_checkpoints
from llama_train.config import ParallelSettings

Change = Callable[..., TrainConfig]
Make = Callable[[], Any]

# Sums over ranks come in another order; what float64 loses there, twenty steps of AdamW amplify a little.
TOLERANCE = 1e-10


@pytest.fixture
def wide(tiny: TrainConfig, change: Change) -> TrainConfig:
    """The tiny run in float64, with heads and layers to share, and rows for four data-parallel ranks."""
    return change(
        tiny,
        **{
            "dtype": "float64",
            "model.num_attention_heads": 4,
            "model.num_key_value_heads": 2,
            "model.tie_word_embeddings": True,
            "data.gradient_accumulation_steps": 2,
            "schedule.steps": 6,
            "evaluation.every": 4,
            "evaluation.max_tokens": 300,
        },
    )


def _on(layout: dict[str, Any], config: TrainConfig, folder: Path) -> TrainConfig:
    """The same rows of a step on a layout: what dp takes, a rank's micro-batch loses."""
    parallel = replace(ParallelSettings(dp_shard=1), **layout)
    dp = parallel.dp_replicate * parallel.dp_shard
    data = replace(config.data, micro_batch_size=config.data.micro_batch_size // dp)
    return replace(config, parallel=parallel, data=data, folder=str(folder))


def _count(config: TrainConfig) -> int:
    settings = config.parallel
    return settings.dp_replicate * settings.dp_shard * settings.cp * settings.tp * settings.pp


def _train(config: TrainConfig, recorder: Make) -> tuple[list[TrainResult], str]:
    """On as many forked ranks as the layout has; what each returned, and what rank 0 printed."""

    def work(rank: int) -> tuple[TrainResult, str]:
        reporter = recorder()
        return train(config, reporter), reporter.text

    results = run_ranks(work, _count(config), timeout=120)
    return [result for result, _ in results], results[0][1]


def _records(folder: str | Path | None, kind: str = "train") -> list[dict[str, Any]]:
    lines = (Path(str(folder)) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.mark.parametrize(
    "layout",
    [
        {"dp_shard": 2},
        {"dp_replicate": 2},
        {"tp": 2},
        {"pp": 2},
        {"cp": 2},
        {"dp_shard": 2, "tp": 2},
        {"dp_replicate": 2, "pp": 2, "schedule": "gpipe"},
        {"cp": 2, "context": "ulysses", "tp": 2},
    ],
    ids=lambda layout: " ".join(f"{name}-{value}" for name, value in layout.items()),
)
def test_a_layout_trains_as_one_process(
    layout: dict[str, Any], wide: TrainConfig, tmp_path: Path, recorder: Make
) -> None:
    evaluation = replace(wide.evaluation, sample_tokens=6, sample_every=3)
    optimizer = replace(wide.optimizer, z_loss=1e-2)
    alone = replace(wide, folder=str(tmp_path / "alone"), evaluation=evaluation, optimizer=optimizer)
    expected = train(alone, recorder())
    config = _on(layout, alone, tmp_path / "ranks")
    results, text = _train(config, recorder)
    for key in ("loss", "grad_norm", "learning_rate", "tokens"):
        wanted = [record[key] for record in _records(alone.folder)]
        assert [record[key] for record in _records(config.folder)] == pytest.approx(wanted, rel=TOLERANCE)
    assert [record["step"] for record in _records(config.folder, "held_out")] == [4, 6]
    bits = [[record["bits_per_byte"] for record in _records(c.folder, "held_out")] for c in (config, alone)]
    assert bits[0] == pytest.approx(bits[1], rel=TOLERANCE)
    samples = [[(r["step"], r["text"]) for r in _records(c.folder, "sample")] for c in (config, alone)]
    assert [step for step, _ in samples[0]] == [3, 6]
    assert samples[0] == samples[1]
    for result in results:
        assert expected.held_out is not None
        assert result.held_out is not None
        assert result.held_out.loss == pytest.approx(expected.held_out.loss, rel=TOLERANCE)
        assert result.held_out.tokens == expected.held_out.tokens
        assert result.sample == expected.sample
    assert results[0].export is not None
    assert all(result.export is None for result in results[1:])
    one, many = (dict(load_model(folder).named_parameters()) for folder in (str(expected.export), results[0].export))
    assert one.keys() == many.keys()
    for name, weight in one.items():
        torch.testing.assert_close(many[name], weight, rtol=0, atol=1e-9)
    assert f"{_count(config)} processes" in text
    assert text.count("\nstep ") == 6  # one rank prints


def test_any_layout_goes_on_from_any_others_checkpoint(wide: TrainConfig, tmp_path: Path, recorder: Make) -> None:
    """Weights, moments, step counts and the data's place, over four layouts in turn, one process among them."""
    steps = replace(
        wide, schedule=replace(wide.schedule, steps=8), optimizer=replace(wide.optimizer, learning_rate=1e-2)
    )
    alone = replace(steps, folder=str(tmp_path / "alone"))
    train(alone, recorder())
    layouts: list[dict[str, Any]] = [{"dp_shard": 2, "tp": 2}, {"pp": 2}, {}, {"dp_replicate": 2, "cp": 2}]
    for number, layout in enumerate(layouts, start=1):
        config = _on(layout, steps, tmp_path / "moving")
        # the schedule is that of the whole run: it is stopped, not shortened
        if number < len(layouts):
            _stopped_after(2 * number, config, recorder)
        else:
            _, text = _train(config, recorder)
            assert "resumed    step 6" in text
    for key in ("loss", "grad_norm", "learning_rate"):
        wanted = [record[key] for record in _records(alone.folder)]
        assert [record[key] for record in _records(tmp_path / "moving")] == pytest.approx(wanted, rel=TOLERANCE)


def _stopped_after(step: int, config: TrainConfig, recorder: Make, rank: int = -1) -> list[TrainResult]:
    """Train until the last rank gets SIGTERM, so that all stop after `step`."""
    count = _count(config)

    def work(me: int) -> TrainResult:
        from llama_train import loop

        original = loop.learning_rate

        def rate(number: int, *rest: Any) -> float:
            # the signal of a step is told with the next, and is in time for the same one where a process is alone
            if me == rank % count and number == step - (count > 1):
                os.kill(os.getpid(), signal.SIGTERM)
            return original(number, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "learning_rate", rate)
            return train(config, recorder())

    return run_ranks(work, count, timeout=120) if count > 1 else [work(0)]


def test_a_signal_to_one_rank_stops_all_at_the_same_step(wide: TrainConfig, tmp_path: Path, recorder: Make) -> None:
    config = _on({"dp_shard": 2}, wide, tmp_path / "run")
    results = _stopped_after(3, config, recorder, rank=1)
    assert [(result.step, result.finished) for result in results] == [(3, False)] * 2
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "run" / "checkpoints")] == [3]


def test_mixed_precision_learns_and_resumes(wide: TrainConfig, change: Change, tmp_path: Path, recorder: Make) -> None:
    """Weights rest in float32 and are sent as bfloat16; one process with master weights reads the checkpoint."""
    base = change(wide, **{"dtype": "bfloat16", "schedule.steps": 20, "optimizer.learning_rate": 1e-2})
    _stopped_after(10, _on({"dp_shard": 2}, base, tmp_path / "run"), recorder)
    reporter = recorder()
    train(replace(base, folder=str(tmp_path / "run")), reporter)
    assert "resumed    step 10" in reporter.text
    losses = [record["loss"] for record in _records(tmp_path / "run")]
    assert losses[-1] < losses[0] - 0.5
    # the first loss after the change of layout belongs to the curve: moments and weights were taken along
    assert abs(losses[10] - losses[9]) < 0.5


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_gradient_that_is_not_finite_is_named_with_its_rank(
    culprit: int, wide: TrainConfig, tmp_path: Path, recorder: Make
) -> None:
    config = _on({"pp": 2}, wide, tmp_path / "run")
    name = f"model.layers.{culprit}.mlp.up_proj.weight"

    def work(rank: int) -> None:
        from llama_train import on_ranks

        original = on_ranks.accumulate_gradients

        def poisoned(parallel: Any, batches: Any, **keys: Any) -> Any:
            result = original(parallel, batches, **keys)
            for found, parameter in parallel.model.named_parameters():
                if found == name:
                    parameter.grad.view(-1)[3] = float("nan")
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(on_ranks, "accumulate_gradients", poisoned)
            train(config, recorder())

    with pytest.raises(
        RankError, match=rf"the gradient norm of step 1 is nan \(not finite: the gradient of {name} on rank {culprit}\)"
    ):
        run_ranks(work, 2)
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == []


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(
    wide: TrainConfig, change: Change, tmp_path: Path, recorder: Make
) -> None:
    config = _on({"dp_shard": 2}, change(wide, **{"checkpoint.every": 2}), tmp_path / "run")

    def work(rank: int) -> str:
        from llama_train import checkpoint

        original = checkpoint._fingerprint

        def full(path: Path) -> Any:
            if rank == 1 and "step-00000004" in str(path):
                raise OSError(28, "No space left on device")
            return original(path)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "_fingerprint", full)
            with pytest.raises((SaveError, RuntimeError)) as caught:
                train(config, recorder())
        return str(caught.value)

    messages = run_ranks(work, 2)
    assert any("step 4 could not be saved" in message and "No space left" in message for message in messages)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_layout_that_cannot_work_is_told_before_anything_is_started(
    tiny: TrainConfig, change: Change, recorder: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"tp 4 cannot run this model: 2 attention heads do not divide over tp 4"):
        train(change(tiny, **{"parallel.tp": 4}), recorder())
    with pytest.raises(ValueError, match=r"parallel.dp_shard 3 = 3 processes, but 4 were started"):
        train(change(tiny, **{"parallel.dp_shard": 3}), recorder())
    assert not torch.distributed.is_initialized()
    assert not Path(str(tiny.folder)).exists()


def test_what_is_sent_is_told_by_kind(wide: TrainConfig, change: Change, tmp_path: Path, recorder: Make) -> None:
    """Every collective with the first step, sums with later ones; here of two kinds of parallelism."""
    short = change(wide, trace_comm=True, **{"schedule.warmup_steps": 1, "schedule.steps": 2})
    _, text = _train(_on({"dp_shard": 2, "tp": 2}, short, tmp_path / "run"), recorder)
    lines = [line.removeprefix("sent       ") for line in text.splitlines() if line.startswith("sent ")]
    assert lines[0].split() == ["kind", "group", "operation", "input", "dtype", "calls", "MB", "sent", "ms"]
    assert any(line.split()[:3] == ["dp", "dp_shard_cp", "reduce_scatter"] for line in lines)
    assert any(line.split()[:3] == ["tp", "tp", "all_gather"] for line in lines)
    later = [line for line in lines if "collectives" in line]
    assert [line.partition(":")[0] for line in later] == ["dp", "sums", "tp"]
    reporter = recorder()
    train(change(short, folder=str(tmp_path / "alone")), reporter)
    assert "sent       one process sends nothing" in reporter.text


def test_another_global_batch_is_another_run(wide: TrainConfig, tmp_path: Path, recorder: Make) -> None:
    _stopped_after(2, _on({"dp_shard": 2}, wide, tmp_path / "run"), recorder)
    with pytest.raises(ValueError, match="data-parallel processes was 8, is 4"):
        train(replace(wide, folder=str(tmp_path / "run"), data=replace(wide.data, micro_batch_size=2)), recorder())
