"""The whole loop of llama-train over its bare step, with and without saving; and fp8's loss beside bfloat16's."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from train_works import free, wait

from llama_parallel import Process
from llama_train import TrainConfig, train
from llama_train.batches import Batch
from llama_train.build import model_config
from llama_train.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
)
from llama_train.console import Reporter
from llama_train.metrics import StepMetrics
from llama_train.trainer import OneProcess
from llama_train.world import World

Say = Callable[[str, object], None]
SHOWN = 10
"""Steps between lines. At each the loop waits for the GPU, so the time of a line is the time of its step."""


class Clock(Reporter):
    """When which step was shown."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True), progress=False)
        self.shown: dict[int, float] = {}
        self.notes: list[str] = []

    def line(self, metrics: StepMetrics) -> None:
        self.shown[metrics.step] = time.perf_counter()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def seconds(self, first: int, last: int) -> float:
        """Of a step, between two that were shown."""
        return (self.shown[last] - self.shown[first]) / (last - first)


def settings(device: torch.device, tiny: bool, folder: str, steps: int, every: int) -> TrainConfig:
    """A run of SmolLM-360M's shape in pure bfloat16, 8 × 2048 tokens: its step is short, so the loop weighs more."""
    return TrainConfig(
        folder=folder,
        device=device.type,
        dtype="bfloat16",
        model=ModelConfig(preset="tiny" if tiny else "smollm2-360m", max_position_embeddings=None if tiny else 2048),
        data=DataConfig(sequence_length=32 if tiny else 2048, micro_batch_size=8, vocab_size=512 if tiny else 8192),
        optimizer=OptimizerConfig(master_weights=False),
        schedule=ScheduleConfig(steps=steps, warmup_steps=0),
        checkpoint=CheckpointConfig(every=every, export=False),
        evaluation=EvaluationConfig(max_tokens=16384, sample_tokens=0),
        logging=LoggingConfig(every=SHOWN),
    )


def bare(config: TrainConfig, device: torch.device, steps: int) -> float:
    """Seconds of a step of the same model, without the loop around it."""
    data = config.data
    shape = model_config(
        config.model, vocab_size=data.vocab_size, sequence_length=data.sequence_length, bos_id=None, eos_id=None
    )
    trainer = OneProcess(config, shape, World(Process(), device))
    rows = torch.randint(shape.vocab_size, (data.micro_batch_size, data.sequence_length + 1))
    batch = Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    batch = batch.pinned() if device.type == "cuda" else batch
    for number in range(steps + SHOWN):
        if number == SHOWN:
            wait(device)
            started = time.perf_counter()
        trainer.step([batch], 3e-4, config.optimizer.max_grad_norm)
    wait(device)
    return (time.perf_counter() - started) / steps


def loop(device: torch.device, tiny: bool, say: Say) -> None:
    """Bare, loop, bare again, loop that saves every 50 steps."""
    steps, every = (40, 20) if tiny else (120, 50)
    times: dict[str, list[float]] = {"bare": [], "loop": [], "saving": []}
    saved: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        config = settings(device, tiny, f"{folder}/plain", steps, 0)
        times["bare"].append(bare(config, device, steps - SHOWN))
        free()
        clock = Clock()
        train(config, clock)
        free()
        times["loop"].append(clock.seconds(SHOWN, steps - SHOWN))
        times["bare"].append(bare(config, device, steps - SHOWN))
        free()
        print(f"bare {times['bare']}, loop {times['loop']}", flush=True)
        clock = Clock()
        train(settings(device, tiny, f"{folder}/saving", steps, every), clock)
        # From one save to just before the next, so that each save is counted with the steps it serves.
        times["saving"].append(clock.seconds(every - SHOWN, 2 * every - SHOWN))
        saved = [note for note in clock.notes if note.startswith("saved")]
    base, whole, saving = (statistics.median(times[name]) for name in ("bare", "loop", "saving"))
    say(
        "loop",
        {
            "bare step, ms": ", ".join(f"{1000 * x:.2f}" for x in times["bare"]),
            "loop, ms a step": ", ".join(f"{1000 * x:.2f}" for x in times["loop"]),
            "loop over bare": f"{whole / base - 1:+.2%}",
            f"saving every {every} steps, ms a step": f"{1000 * saving:.2f}, {len(saved)} saves",
            "saving over the loop": f"{saving / whole - 1:+.2%}",
        },
    )


def learn(device: torch.device, tiny: bool, say: Say) -> None:
    """1,000 steps of the quickstart's kind, in bfloat16 and in fp8: the losses at the end."""
    steps = 20 if tiny else 1000
    told: dict[str, object] = {}
    held_out: dict[str, float] = {}
    last: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("bfloat16", "fp8"):
            config = replace(
                settings(device, tiny, f"{folder}/{name}", steps, 0),
                fp8=name == "fp8",
                model=ModelConfig(
                    hidden_size=64 if tiny else 512,
                    intermediate_size=128 if tiny else 1408,
                    num_hidden_layers=2 if tiny else 8,
                    num_attention_heads=4 if tiny else 8,
                ),
                data=DataConfig(sequence_length=32 if tiny else 256, micro_batch_size=8 if tiny else 32),
                optimizer=OptimizerConfig(learning_rate=1e-3),
                schedule=ScheduleConfig(steps=steps, warmup_steps=steps // 20),
                evaluation=EvaluationConfig(sample_tokens=0, max_tokens=2048 if tiny else 500_000),
                logging=LoggingConfig(every=1),
            )
            started = time.perf_counter()
            result = train(config, Clock())
            assert result.held_out is not None
            lines = (Path(str(config.folder)) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            losses = [record["loss"] for record in map(json.loads, lines) if record["kind"] == "train"]
            held_out[name] = result.held_out.loss
            last[name] = statistics.mean(losses[-len(losses) // 10 :])
            told[f"{name}: held-out loss, mean loss of the last tenth"] = f"{held_out[name]:.4f}, {last[name]:.4f}"
            print(f"{name}: {time.perf_counter() - started:.1f} s, {losses[:: max(1, steps // 10)]}", flush=True)
    told["fp8 over bfloat16, held out"] = f"{held_out['fp8'] / held_out['bfloat16'] - 1:+.2%}"
    told["fp8 over bfloat16, last tenth"] = f"{last['fp8'] / last['bfloat16'] - 1:+.2%}"
    told["steps"] = steps
    say("learn", told)
