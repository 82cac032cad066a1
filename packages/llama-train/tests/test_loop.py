"""Whole runs, seconds long. Case B27 is here; its table is in test_schedule."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_core import load_model, load_tokenizer
from llama_train import TrainConfig, TrainResult, train
from llama_train.checkpoint import SaveError, list_checkpoints, load_checkpoint
from llama_train.nonfinite import NonFiniteLoss

Change = Callable[..., TrainConfig]
Make = Callable[[], Any]
Stop = Callable[[int, pytest.MonkeyPatch], None]


def _records(result: TrainResult | TrainConfig, kind: str = "train") -> list[dict[str, Any]]:
    lines = (Path(str(result.folder)) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def _last_state(config: TrainConfig) -> dict[str, torch.Tensor]:
    """Everything in the newest checkpoint, read with torch's own reader."""
    from torch.distributed.checkpoint import FileSystemReader

    checkpoint = list_checkpoints(Path(str(config.folder)) / "checkpoints")[-1]
    metadata = FileSystemReader(checkpoint.path).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]
        for name, entry in metadata.items()
    }
    load_checkpoint(checkpoint, state)
    return state


def test_a_run_from_text_to_exported_model(tiny: TrainConfig, change: Change, recorder: Make) -> None:
    reporter = recorder()
    config = change(tiny, **{"optimizer.learning_rate": 1e-2, "schedule.steps": 60, "evaluation.sample_tokens": 8})
    result = train(config, reporter)
    assert (result.step, result.finished) == (60, True)
    records = _records(result)
    assert [record["step"] for record in records] == list(range(1, 61))
    # The first loss is that of an untrained model: ln(vocabulary), give or take what its small weights say.
    assert records[0]["loss"] == pytest.approx(math.log(300), abs=0.1)
    assert result.held_out is not None
    assert result.held_out.loss < 0.8 * records[0]["loss"]
    assert _records(result, "held_out")[-1]["loss"] == result.held_out.loss
    # What was exported is the model in memory: the held-out loss by other means.
    assert result.export is not None
    model, tokenizer = load_model(result.export), load_tokenizer(result.export)
    assert (model.config.bos_token_id, model.config.eos_token_id) == (298, 299)
    assert tokenizer.vocab_size == model.config.vocab_size == 300
    assert result.sample is not None
    assert result.sample.startswith("def ")
    for part in (
        "run ",
        "text ",
        "tokenizer  learning a vocabulary of ",
        "data ",
        "model ",
        "batch ",
        "step 60/60",
        "saved ",
        "held out ",
        f"hf --prompt 'def ' --temperature {tiny.evaluation.sample_temperature:g}",
    ):
        assert part in reporter.text


def test_case_b27_twenty_steps_equal_ten_and_ten_bit_for_bit(
    tiny: TrainConfig, tmp_path: Path, stop_after: Stop, recorder: Make
) -> None:
    """Case B27, nanotron#243, runs A, B and C: rates, losses, weights and moments of a resumed run."""
    whole = replace(tiny, folder=str(tmp_path / "whole"))
    train(whole, recorder())
    for stop in (10, 2):
        parts = replace(tiny, folder=str(tmp_path / f"stop{stop}"))
        with pytest.MonkeyPatch.context() as patch:
            stop_after(stop, patch)
            reporter = recorder()
            first = train(parts, reporter)
        assert (first.step, first.finished) == (stop, False)
        assert f"by SIGTERM after step {stop} of 20; saved" in reporter.text
        assert float(_last_state(parts)["optimizer.step.model.norm.weight"]) == stop
        reporter = recorder()
        assert train(parts, reporter).finished
        assert f"resumed    step {stop}" in reporter.text
        for key in ("step", "loss", "grad_norm", "learning_rate"):
            assert [r[key] for r in _records(parts)] == [r[key] for r in _records(whole)]
        expected, found = _last_state(whole), _last_state(parts)
        assert expected.keys() == found.keys()
        assert any("exp_avg_sq" in name for name in expected)
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
            assert not name.startswith("optimizer.") or tensor.dtype == torch.float32


def test_case_b27_a_changed_total_is_used_from_the_resumed_step_on(
    tiny: TrainConfig, change: Change, monkeypatch: pytest.MonkeyPatch, stop_after: Stop, recorder: Make
) -> None:
    """Case B27, run D."""
    with monkeypatch.context() as patch:
        stop_after(10, patch)
        train(tiny, recorder())
    reporter = recorder()
    train(change(tiny, **{"schedule.steps": 40}), reporter)
    assert "changed    schedule.steps was 20, is 40" in reporter.text
    rates = [record["learning_rate"] for record in _records(tiny)]
    assert len(rates) == 40
    assert rates[10] == pytest.approx(1e-4 + 0.5 * 9e-4 * (1 + math.cos(math.pi * 7 / 36)), rel=1e-12)
    assert rates[39] == pytest.approx(1e-4, rel=1e-12)
    with pytest.raises(ValueError, match=r"schedule.steps is 20; .* is already past that"):
        train(tiny, recorder())


def test_a_finished_run_is_not_trained_again(tiny: TrainConfig, recorder: Make) -> None:
    first = train(tiny, recorder())
    stamp = list_checkpoints(first.folder / "checkpoints")[-1].path.stat().st_mtime_ns
    (first.folder / "hf" / "model.safetensors").unlink()  # as if killed while exporting
    reporter = recorder()
    second = train(tiny, reporter)
    assert not any(line.startswith("step ") for line in reporter.lines)
    assert second.held_out == first.held_out
    assert list_checkpoints(first.folder / "checkpoints")[-1].path.stat().st_mtime_ns == stamp
    assert (first.folder / "hf" / "model.safetensors").is_file()


def test_accumulation_is_the_same_run(tiny: TrainConfig, change: Change, tmp_path: Path, recorder: Make) -> None:
    base = change(tiny, **{"schedule.steps": 5, "dtype": "float64"})
    losses = []
    for index, (size, count) in enumerate(((4, 1), (2, 2), (1, 4))):
        keys = {"folder": str(tmp_path / str(index)), "data.micro_batch_size": size}
        config = change(base, **keys, **{"data.gradient_accumulation_steps": count})
        train(config, recorder())
        losses.append([record["loss"] for record in _records(config)])
    assert losses[1] == pytest.approx(losses[0], abs=1e-10)
    assert losses[2] == pytest.approx(losses[0], abs=1e-10)


def test_checkpoints_and_evaluations_on_the_way(tiny: TrainConfig, change: Change, recorder: Make) -> None:
    config = change(tiny, **{"checkpoint.every": 6, "evaluation.every": 8, "logging.every": 7, "schedule.steps": 18})
    result = train(config, recorder())
    assert [checkpoint.step for checkpoint in list_checkpoints(result.folder / "checkpoints")] == [12, 18]
    assert [record["step"] for record in _records(result)] == [1, 7, 14, 18]
    held_out = _records(result, "held_out")
    assert [record["step"] for record in held_out] == [8, 16, 18]
    assert held_out[0]["loss"] > held_out[-1]["loss"]


def test_a_loss_that_is_not_finite_stops_the_run_unsaved(tiny: TrainConfig, change: Change, recorder: Make) -> None:
    config = change(tiny, **{"optimizer.learning_rate": 1e30, "checkpoint.every": 1, "optimizer.max_grad_norm": 0.0})
    with pytest.raises(NonFiniteLoss, match=r"of step \d+ is (nan|inf).*Lower optimizer.learning_rate") as caught:
        train(config, recorder())
    step = int(str(caught.value).partition("of step ")[2].split()[0])
    checkpoints = list_checkpoints(Path(str(config.folder)) / "checkpoints")
    assert all(checkpoint.step < step for checkpoint in checkpoints)
    assert all(bool(tensor.isfinite().all()) for name, tensor in _last_state(config).items() if "generator" not in name)


def test_a_failed_save_ends_the_run_with_the_earlier_checkpoint(
    tiny: TrainConfig, change: Change, monkeypatch: pytest.MonkeyPatch, recorder: Make
) -> None:
    from llama_train import checkpoint

    original = checkpoint.save

    def full(tensors: Any, **keys: Any) -> Any:
        if "step-00000008" in str(keys["checkpoint_id"]):
            raise OSError(28, "No space left on device")
        return original(tensors, **keys)

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(SaveError, match=r"step 8 could not be saved.*No space left on device"):
        train(change(tiny, **{"checkpoint.every": 4}), recorder())
    assert [c.step for c in list_checkpoints(Path(str(tiny.folder)) / "checkpoints")] == [4]


def test_bfloat16_with_master_weights_learns_and_resumes(
    tiny: TrainConfig, change: Change, tmp_path: Path, stop_after: Stop, recorder: Make
) -> None:
    base = change(tiny, **{"dtype": "bfloat16", "optimizer.learning_rate": 1e-2})
    whole, parts = (replace(base, folder=str(tmp_path / name)) for name in ("whole", "parts"))
    train(whole, recorder())
    with pytest.MonkeyPatch.context() as patch:
        stop_after(7, patch)
        train(parts, recorder())
    train(parts, recorder())
    losses = [record["loss"] for record in _records(whole)]
    assert losses == [record["loss"] for record in _records(parts)]
    assert losses[-1] < losses[0] - 0.5
    state = _last_state(whole)
    assert state["model.model.norm.weight"].dtype == torch.float32  # the master weights: the others follow from them


def test_more_processes_than_the_layout_has(tiny: TrainConfig, change: Change, recorder: Make) -> None:
    with pytest.raises(ValueError, match=r"parallel.tp 2 = 2 processes do not divide the 1 that were started"):
        train(change(tiny, **{"parallel.tp": 2}), recorder())
    assert not Path(str(tiny.folder)).exists()


def test_a_warning_names_a_step_without_targets(tiny: TrainConfig, recorder: Make, tmp_path: Path) -> None:
    """A tokenizer that is all begin tokens: every target is the start of a document."""
    import numpy as np

    from llama_train.tokens import read_tokens, write_tokens

    config = replace(tiny, folder=str(tmp_path / "blank"), schedule=replace(tiny.schedule, steps=2, warmup_steps=0))
    train(replace(config, folder=str(tmp_path / "other")), recorder())
    (tmp_path / "blank").mkdir()
    (tmp_path / "other" / "data").rename(tmp_path / "blank" / "data")
    (tmp_path / "other" / "config.toml").rename(tmp_path / "blank" / "config.toml")
    path = tmp_path / "blank" / "data" / "train.npy"
    write_tokens(path, [np.full(len(read_tokens(path)), 298)], 300)  # type: ignore[list-item]
    reporter = recorder()
    train(config, reporter)
    assert "step 1 has no token to predict" in reporter.text
    assert [record["loss"] for record in _records(config)] == [0.0, 0.0]
