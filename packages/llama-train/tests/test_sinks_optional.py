"""TensorBoard and W&B by option: what arrives there, after a resume too; what is told without them; no key is kept."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_train.config import TrainConfig
from llama_train.config_file import dump_config
from llama_train.loop import train
from llama_train.metrics import EvaluationMetrics, StepMetrics
from llama_train.tolerant_sink import TolerantSink

TENSORBOARD = importlib.util.find_spec("tensorboard") is not None
WANDB = importlib.util.find_spec("wandb") is not None


def _step(step: int, loss: float = 1.0) -> StepMetrics:
    return StepMetrics(step, 10 * step, loss, 0.5, 1e-3, 100.0, 50.0, None, None, 7, 0.0)


@pytest.mark.skipif(not TENSORBOARD, reason="the extra `tensorboard`")
def test_tensorboard_gets_the_figures_of_a_resumed_run(
    tiny: TrainConfig, change: Callable[..., TrainConfig], recorder: Any
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    short = change(tiny, **{"logging.tensorboard": True, "schedule.steps": 6, "evaluation.sample_tokens": 4})
    result = train(short, recorder())
    train(change(short, **{"schedule.steps": 9}), recorder())
    events = EventAccumulator(str(result.folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 10))
    assert events.Scalars("held_out/loss")[-1].step == 9
    tags = events.Tags()
    assert {"train/grad_norm", "train/learning_rate", "train/tokens_per_second", "train/memory"} <= set(tags["scalars"])
    assert "train/mfu" not in tags["scalars"]  # not known on a CPU
    assert tags["tensors"] == ["sample/text_summary"]


@pytest.mark.skipif(not TENSORBOARD, reason="the extra `tensorboard`")
def test_tensorboard_hides_steps_that_are_made_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from llama_train.tensorboard_sink import TensorBoardSink

    first = TensorBoardSink(tmp_path, 0)
    for step in (1, 2, 3, 4):
        first.write(_step(step, 1.0))
    first.close()
    second = TensorBoardSink(tmp_path, 2)
    second.write(_step(3, 2.0))
    second.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 1.0), (3, 2.0)]


class _Wandb(types.ModuleType):
    """Stands in for the package: remembers what it is told."""

    class Error(Exception):
        pass

    def __init__(self, refuses: str = "") -> None:
        super().__init__("wandb")
        self.calls: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.finished = 0
        self.refuses = refuses

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def Html(self, text: str) -> str:
        return text

    def init(self, **keys: Any) -> _Wandb:
        if self.refuses:
            raise self.Error(self.refuses)
        self.calls.append(keys)
        return self

    def define_metric(self, *names: str, **keys: str) -> None:
        pass

    def log(self, record: dict[str, Any]) -> None:
        self.logged.append(record)

    def finish(self) -> None:
        self.finished += 1


def test_wandb_gets_one_run_however_often_it_is_resumed(
    tiny: TrainConfig, change: Callable[..., TrainConfig], recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = _Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "t" * 34)
    config = change(
        tiny,
        **{"logging.wandb": "llamas", "schedule.warmup_steps": 0, "schedule.steps": 3, "evaluation.sample_tokens": 4},
    )
    result = train(config, recorder())
    train(change(config, **{"schedule.steps": 5}), recorder())
    assert [call["project"] for call in wandb.calls] == ["llamas", "llamas"]
    assert wandb.calls[0]["id"] == wandb.calls[1]["id"]
    assert wandb.calls[0]["config"]["model"]["hidden_size"] == 16
    assert wandb.finished == 2
    assert [record["step"] for record in wandb.logged if "train/loss" in record] == [1, 2, 3, 4, 5]
    assert [record["step"] for record in wandb.logged if "held_out/loss" in record] == [3, 5]
    assert any("<pre>" in record.get("sample", "") for record in wandb.logged)
    for path in result.folder.rglob("*"):
        if path.is_file():
            assert b"kkkkkkkk" not in path.read_bytes()
            assert b"hf_tttt" not in path.read_bytes()


@pytest.mark.skipif(not WANDB, reason="the extra `wandb`")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # wandb's own
def test_the_real_wandb_works_offline(tiny: TrainConfig, tmp_path: Path, change: Callable[..., TrainConfig]) -> None:
    """In a process of its own: wandb starts a service, and leaves threads."""
    import subprocess

    config = change(tiny, **{"logging.wandb": "llamas", "schedule.warmup_steps": 0, "schedule.steps": 3})
    path = tmp_path / "c.toml"
    path.write_text(dump_config(config), encoding="utf-8")
    environment = {**os.environ, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "llama_train", "run", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "no more figures" not in done.stderr
    (offline,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert next(offline.glob("*.wandb")).stat().st_size > 0


@pytest.mark.parametrize(
    ("key", "value", "module", "message"),
    [
        ("logging.tensorboard", True, "torch.utils.tensorboard.writer", r"pip install 'llama-train\[tensorboard\]'"),
        ("logging.wandb", "llamas", "wandb", r"pip install 'llama-train\[wandb\]'"),
    ],
)
def test_a_missing_package_is_told_before_training(
    key: str,
    value: object,
    module: str,
    message: str,
    tiny: TrainConfig,
    change: Callable[..., TrainConfig],
    recorder: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=message):
        train(change(tiny, **{key: value}), recorder())


def test_what_wandb_refuses_is_told(
    tiny: TrainConfig, change: Callable[..., TrainConfig], recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", _Wandb("No API key configured.\nmore"))
    with pytest.raises(ValueError, match=r"W&B says: No API key configured. \(`wandb login` stores your key"):
        train(change(tiny, **{"logging.wandb": "llamas"}), recorder())
    with pytest.raises(ValueError, match=r"logging.wandb is ''; it must be the name of a project"):
        change(tiny, **{"logging.wandb": ""})


def test_a_tracker_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        calls = 0

        def write(self, metrics: StepMetrics) -> None:
            self.calls += 1
            raise OSError("no space left")

        def write_evaluation(self, metrics: EvaluationMetrics) -> None: ...

        def write_sample(self, step: int, text: str) -> None: ...

        def close(self) -> None: ...

    broken = Broken()
    sink = TolerantSink(broken, "TensorBoard")
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            sink.write(_step(step))
        sink.close()
    assert broken.calls == 1
    assert [record.getMessage() for record in caplog.records] == [
        "TensorBoard gets no more figures: OSError: no space left"
    ]
