"""Small things that many tests need: a folder of text, and settings of a run that takes a second."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from llama_core import Llama, LlamaConfig, init_weights
from llama_train.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from llama_train.console import Reporter
from llama_train.trainer import OneProcess


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six files of some thousand characters in all, each different."""
    folder = tmp_path_factory.mktemp("text")
    for index in range(6):
        lines = [f"def f{index}_{n}(x):\n    return x * {n * n} + {index}  # the {n}th\n" for n in range(30)]
        (folder / f"file{index}.py").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def tiny(text_folder: Path, tmp_path: Path) -> TrainConfig:
    """A run of 20 steps over that folder; about a second."""
    return TrainConfig(
        name="tiny",
        folder=str(tmp_path / "run"),
        device="cpu",
        model=ModelConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        ),
        data=DataConfig(
            source=str(text_folder), suffixes=(".py",), held_out_fraction=0.2, vocab_size=300, sequence_length=16,
            micro_batch_size=4,
        ),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        schedule=ScheduleConfig(steps=20, warmup_steps=4),
        checkpoint=CheckpointConfig(every=0),
        evaluation=EvaluationConfig(sample_tokens=0),
        logging=LoggingConfig(every=1),
    )  # fmt: skip


@pytest.fixture
def change() -> Callable[..., TrainConfig]:
    """`change(config, **{"schedule.steps": 3})`: a copy with some dotted keys changed."""

    def changed(config: TrainConfig, **values: object) -> TrainConfig:
        for name, value in values.items():
            section, _, key = name.rpartition(".")
            if section:
                config = replace(config, **{section: replace(getattr(config, section), **{key: value})})
            else:
                config = replace(config, **{key: value})
        return config

    return changed


class Recorder(Reporter):
    """A reporter whose lines a test can read."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True), progress=False)
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@pytest.fixture
def recorder() -> type[Recorder]:
    """The class: one per run."""
    return Recorder


@pytest.fixture
def t0() -> Callable[..., Llama]:
    """`t0(seed)`: the cases' tiny model."""

    def make(seed: int = 0, **changes: object) -> Llama:
        shape = {
            "vocab_size": 128,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "initializer_range": 0.2,  # with small weights logits are almost flat and hide errors
        }
        model = Llama(LlamaConfig(**{**shape, **changes}))
        init_weights(model, seed)
        return model

    return make


@pytest.fixture
def stop_after() -> Callable[[int, pytest.MonkeyPatch], None]:
    """`stop_after(step, patch)`: this process gets SIGTERM during that step of the next run, as from a scheduler."""

    def stop(step: int, patch: pytest.MonkeyPatch) -> None:
        original = OneProcess.step
        calls = []

        def stepping(*arguments: Any) -> Any:
            calls.append(None)
            if len(calls) == step:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(*arguments)

        patch.setattr(OneProcess, "step", stepping)

    return stop


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded as their report; it comes from workers too."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, text in report.user_properties:
                if name == "kill report" and report.when == "call":
                    terminalreporter.section(f"kill report: {report.nodeid.rpartition('::')[2]}")
                    terminalreporter.write_line(str(text))
