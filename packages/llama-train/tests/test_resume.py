"""A run that begins with another run's checkpoint: optimizer, data and random generators go on, the schedule is new."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_train import TrainConfig, train
from llama_train.checkpoint import list_checkpoints
from llama_train.config_file import load_config
from llama_train.schedule import learning_rate

Change = Callable[..., TrainConfig]
Make = Callable[[], Any]
WSD = {"schedule.shape": "wsd", "schedule.cooldown_steps": 4, "schedule.warmup_steps": 2, "checkpoint.every": 4}
KEYS = ("step", "tokens", "loss", "grad_norm", "learning_rate")


def _figures(config: TrainConfig) -> list[tuple[Any, ...]]:
    lines = (Path(str(config.folder)) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [tuple(r[key] for key in KEYS) for r in map(json.loads, lines) if r["kind"] == "train"]


@pytest.fixture
def trunk(tiny: TrainConfig, change: Change, tmp_path: Path, recorder: Make) -> TrainConfig:
    """A run of 20 steps whose cool-down begins after step 16, with all its checkpoints."""
    config = change(tiny, **{"schedule.steps": 20}, **WSD, **{"checkpoint.keep": 9}, folder=str(tmp_path / "trunk"))
    train(config, recorder())
    return config


def test_a_cool_down_branches_off_from_any_checkpoint(
    trunk: TrainConfig, change: Change, tmp_path: Path, recorder: Make, stop_after: Any
) -> None:
    """After step 8 of 20 a cool-down to step 12 alone: as a run of 12 steps would have been, bit for bit. Nothing but
    the schedule, the folder and where to begin is changed."""
    short = change(trunk, **{"schedule.steps": 12}, folder=str(tmp_path / "short"))
    train(short, recorder())
    origin = tmp_path / "trunk" / "checkpoints" / "step-00000008"
    branch = change(short, folder=str(tmp_path / "branch"), resume_from=str(origin))
    reporter = recorder()
    with pytest.MonkeyPatch.context() as patch:
        stop_after(2, patch)
        assert train(branch, reporter).step == 10
    assert f"resumed    step 8, from {origin}" in reporter.text
    assert "changed    schedule.steps was 20, is 12" in reporter.text
    reporter = recorder()
    assert train(branch, reporter).step == 12  # the branch's own checkpoint comes before the one it began with
    assert "resumed    step 10" in reporter.text
    assert _figures(branch) == _figures(short)[8:]
    rates = [learning_rate(step, 1e-3, branch.schedule) for step in range(9, 13)]
    assert [figures[4] for figures in _figures(branch)] == rates
    assert rates[-1] == pytest.approx(1e-4)
    assert _figures(trunk)[11][4] == 1e-3  # the trunk was at its highest rate there, and is left alone
    assert [c.step for c in list_checkpoints(tmp_path / "trunk" / "checkpoints")] == [4, 8, 12, 16, 20]
    # config.toml of the branch repeats it
    assert load_config(tmp_path / "branch" / "config.toml").resume_from == str(origin)


def test_the_newest_checkpoint_of_a_run_by_its_folder(
    trunk: TrainConfig, change: Change, tmp_path: Path, recorder: Make
) -> None:
    longer = change(trunk, **{"schedule.steps": 22}, folder=str(tmp_path / "longer"), resume_from=str(trunk.folder))
    assert train(longer, recorder()).step == 22
    assert [figures[0] for figures in _figures(longer)] == [21, 22]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"resume_from": "TMP/nowhere"}, r"nowhere is no checkpoint \(such as RUN/checkpoints/step-00000500\)"),
        ({"resume_from": "TMP/trunk/checkpoints/step-00000005"}, "step-00000005 is no whole checkpoint: manifest.json"),
        ({"seed": 1}, "a checkpoint of another run: seed was 0, is 1"),
        ({"model.hidden_size": 32}, "model.hidden_size was 16, is 32"),
        ({"data.sequence_length": 8}, "data.sequence_length was 16, is 8"),
        ({"schedule.steps": 7}, "schedule.steps is 7; .* is already past that"),
    ],
)
def test_what_cannot_be_gone_on_from(
    keys: dict[str, Any], message: str, trunk: TrainConfig, change: Change, tmp_path: Path, recorder: Make
) -> None:
    keys = {
        key: value.replace("TMP", str(tmp_path)) if isinstance(value, str) else value for key, value in keys.items()
    }
    origin = {"resume_from": str(tmp_path / "trunk" / "checkpoints" / "step-00000008")}
    config = change(trunk, **{**origin, **keys}, folder=str(tmp_path / "branch"))
    with pytest.raises(ValueError, match=message):
        train(config, recorder())


def test_another_text_under_the_same_path(
    trunk: TrainConfig, tmp_path: Path, recorder: Make, text_folder: Path
) -> None:
    """The place in the data would mean other rows."""
    changed = text_folder / "file0.py"
    before = changed.read_text(encoding="utf-8")
    try:
        changed.write_text("zebra = 'quagga'\n" * 200, encoding="utf-8")
        config = replace(trunk, folder=str(tmp_path / "branch"), resume_from=str(trunk.folder))
        with pytest.raises(ValueError, match="its text or tokenizer was another"):
            train(config, recorder())
    finally:
        changed.write_text(before, encoding="utf-8")
