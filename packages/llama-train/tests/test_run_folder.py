from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llama_train import TrainConfig, load_config
from llama_train.checkpoint import save_checkpoint
from llama_train.run_folder import RunFolder, open_run_folder

Change = Callable[..., TrainConfig]


def _open(config: TrainConfig) -> tuple[RunFolder, list[str]]:
    with open_run_folder(config) as opened:
        return opened


def _used(config: TrainConfig) -> Path:
    run, _ = _open(config)
    save_checkpoint(run.checkpoints, 1, {"a": torch.zeros(1)}, keep=1)
    return run.path


def test_settings_are_written_and_read_back(tiny: TrainConfig) -> None:
    run, changes = _open(tiny)
    assert changes == []
    assert load_config(run.config) == tiny


def test_default_is_runs_name(tiny: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, _ = _open(replace(tiny, folder=None))
    assert run.path == Path("runs/tiny")
    assert (tmp_path / "runs" / "tiny" / "config.toml").is_file()


def test_a_folder_of_something_else_is_left_alone(tiny: TrainConfig) -> None:
    folder = Path(tiny.folder or "")
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="is no run folder"):
        _open(tiny)
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]
    file = folder / "thesis.txt"
    with pytest.raises(ValueError, match="is a file"):
        _open(replace(tiny, folder=str(file)))
    assert file.read_text() == "years of work"


def test_never_resuming_says_what_to_do(tiny: TrainConfig) -> None:
    _used(tiny)
    with pytest.raises(ValueError, match=r"--resume auto.*--name"):
        _open(replace(tiny, resume="never"))
    _open(tiny)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 5),
        ("dtype", "float64"),
        ("model.hidden_size", 32),
        ("data.vocab_size", 290),
        ("data.sequence_length", 8),
        ("data.micro_batch_size", 8),
    ],
)
def test_another_run_is_not_continued(tiny: TrainConfig, change: Change, key: str, value: object) -> None:
    _used(tiny)
    with pytest.raises(ValueError, match="holds another run") as caught:
        _open(change(tiny, **{key: value}))
    assert key in str(caught.value)
    assert repr(value) in str(caught.value)
    assert load_config(Path(tiny.folder or "") / "config.toml") == tiny


def test_what_may_change_is_named(tiny: TrainConfig, change: Change) -> None:
    _used(tiny)
    changed = change(tiny, **{"schedule.steps": 40, "optimizer.learning_rate": 0.5, "logging.every": 3})
    _, changes = _open(changed)
    assert changes == ["optimizer.learning_rate was 0.001, is 0.5", "schedule.steps was 20, is 40"]
    # the same rows in other portions are the same step
    _open(change(changed, **{"data.micro_batch_size": 2, "data.gradient_accumulation_steps": 2}))


def test_without_a_checkpoint_anything_may_change(tiny: TrainConfig, change: Change) -> None:
    _open(tiny)
    run, changes = _open(change(tiny, seed=5))
    assert changes == []
    assert load_config(run.config).seed == 5


def test_two_processes_cannot_have_one_folder(tiny: TrainConfig) -> None:
    """A lock belongs to an open file, so a second opening stands for a second process."""
    with open_run_folder(tiny), pytest.raises(ValueError, match="in use by another process"):
        _open(tiny)
    _open(tiny)
