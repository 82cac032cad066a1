"""No GPU here: the error and the state of a card are stand-ins, the prediction and the message are the real ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llama_train import TrainConfig, train
from llama_train.cli import main
from llama_train.config import DataConfig, ModelConfig, OptimizerConfig, ParallelSettings
from llama_train.config_file import dump_config
from llama_train.out_of_memory import Card, OutOfMemory, explain, memory_told, work_of
from llama_train.trainer import OneProcess
from llama_train.world import ALONE


class _NoOptimizer:
    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def gradients(self) -> list[torch.Tensor]:
        return []


Change = Callable[..., TrainConfig]
Make = Callable[[], Any]

ERROR = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of …"
# SmolLM-1.7B, 8 × 2048, float32 master weights: too much for 80 GB
LARGE = TrainConfig(
    device="cuda",
    dtype="bfloat16",
    model=ModelConfig(preset="smollm-1.7b"),
    data=DataConfig(vocab_size=49152, sequence_length=2048, micro_batch_size=8),
    optimizer=OptimizerConfig(),
    parallel=ParallelSettings(dp_shard=1),
)
CARD = Card(total=80_000_000_000, allocated=70_000_000_000, reserved=76_000_000_000, others=1_000_000_000)


def _numbers(message: str) -> dict[str, float]:
    """Predicted GB by part."""
    return {m[1]: float(m[2]) for m in re.finditer(r"^  (\w+) +([\d.]+) GB", message, re.MULTILINE)}


def test_the_message_says_what_filled_the_card_and_what_lowers_it() -> None:
    message = explain(LARGE, ERROR, None, CARD)
    lines = message.splitlines()
    assert lines[0] == "out of memory on cuda (asked for 2.00 GiB more)"
    assert lines[1] == "  of the card's 80 GB: 70 GB in tensors, 6 GB reserved but unused, 1 GB taken by others"
    parts = _numbers(message)
    # 1.71 billion parameters: 2 bytes each, and moments and master weights of 12
    assert parts["weights"] == pytest.approx(3.42, rel=0.02)
    assert parts["optimizer"] == pytest.approx(20.5, rel=0.02)
    assert sum(parts.values()) == pytest.approx(2 * parts["total"], rel=0.01)  # and the total itself
    settings = lines[lines.index("what lowers it, the cheapest first, with the prediction for all of it:") + 1 :]
    assert "environment: costs nothing, and gives back much of the 6 GB" in settings[0]
    assert [re.split("[.=]| = ", line.strip())[0] for line in settings[:-1]] == [
        "PYTORCH_ALLOC_CONF",
        "data",
        "activation_checkpointing",
        "activation_checkpointing",
        "parallel",
        "parallel",
        "parallel",
        "optimizer",
        "data",
    ]
    assert "data.micro_batch_size = 4, data.gradient_accumulation_steps = 2: " in settings[1]
    assert settings[-1] == "  a smaller model"


def test_what_is_promised_is_what_the_planner_says_of_those_settings(change: Change) -> None:
    """Each line's figure is the total of a message for the settings that the line names."""
    before = explain(LARGE, ERROR, None, CARD)
    for line, keys in {
        "data.micro_batch_size = 4, data.gradient": {"data.micro_batch_size": 4, "data.gradient_accumulation_steps": 2},
        'activation_checkpointing = "full"': {"activation_checkpointing": "full"},
        "optimizer.master_weights = false": {"optimizer.master_weights": False},
        "data.sequence_length = 1024": {"data.sequence_length": 1024},
        "parallel.tp = 2": {"parallel.tp": 2},
        "parallel.dp_shard = 2": {"parallel.dp_shard": 2, "data.micro_batch_size": 4},
    }.items():
        promised = re.search(rf"^  {re.escape(line)}[^:]*: ([\d.]+ GB)", before, re.MULTILINE)
        assert promised is not None, line
        after = explain(change(LARGE, **keys), ERROR, None, CARD)
        assert re.search(rf"^  total +{promised[1]}", after, re.MULTILINE), (line, promised[1], after)
        assert float(promised[1].split()[0]) < _numbers(before)["total"]


def test_what_fits_is_said_where_the_prediction_does_not() -> None:
    small = replace(CARD, total=46_000_000_000, allocated=40_000_000_000, reserved=41_000_000_000)
    message = explain(LARGE, ERROR, None, small)
    assert "PYTORCH_ALLOC_CONF" not in message  # 1 GB unused is no matter
    fits = {line.strip().partition(":")[0]: ", which fits" in line for line in message.splitlines() if "GB" in line}
    assert fits['activation_checkpointing = "full"']
    assert not fits['activation_checkpointing = "selective"']
    assert ", which fits" not in explain(LARGE, ERROR, None, CARD)


def test_what_is_there_is_measured_beside_the_prediction(tiny: TrainConfig, change: Change) -> None:
    config = change(tiny, dtype="float32", **{"parallel.dp_shard": 1})
    shape = work_of(config).model
    trainer = OneProcess(config, shape, ALONE)
    count = trainer.model.num_parameters()
    trainer.model.lm_head.weight.grad = torch.zeros_like(trainer.model.lm_head.weight)
    told = explain(config, ERROR, trainer, Card(10**9, 10**8, 2 * 10**8, 0))
    rows = {line.split()[0]: line.split()[1:] for line in told.splitlines() if line.startswith("  ")}
    gigabytes = [float(rows["weights"][2]), float(rows["optimizer"][2]), float(rows["gradients"][2])]
    # fused AdamW keeps a step count of 4 bytes for each parameter
    steps = 4 * len(trainer.parameters)
    head = 4 * trainer.model.lm_head.weight.numel()
    assert [f"{1e9 * size:.3g}" for size in gigabytes] == [f"{n:.3g}" for n in (4 * count, 8 * count + steps, head)]
    assert rows["total"][2:] == ["0.1", "GB"]


def test_a_layout_gathers_bfloat16_and_adapters_have_no_moments(change: Change) -> None:
    ranks = change(LARGE, **{"parallel.dp_shard": 8, "data.micro_batch_size": 1})
    assert work_of(ranks).precision == "mixed"
    assert work_of(ranks).global_batch == 8
    assert work_of(change(LARGE, dtype="float32")).precision == "float32"
    assert work_of(change(LARGE, **{"optimizer.master_weights": False})).precision == "bfloat16"
    adapted = replace(LARGE, model=ModelConfig(start_from="somewhere"), lora=replace(LARGE.lora, rank=8))
    trainer = SimpleNamespace(shape=work_of(LARGE).model, parameters={}, optimizer=_NoOptimizer())
    parts = _numbers(explain(adapted, ERROR, trainer, None))  # type: ignore[arg-type]
    assert {"weights", "activations"} < parts.keys()
    assert (parts["gradients"], parts["optimizer"]) == (0, 0)


def test_a_model_beyond_memory_is_told(tiny: TrainConfig, change: Change, recorder: Make) -> None:
    """An address space cannot hold it, so nothing is touched."""
    huge = change(tiny, **{"model.hidden_size": 2**22, "model.intermediate_size": 2**22, "dtype": "float64"})
    with pytest.raises(OutOfMemory, match=r"out of memory on cpu \(asked for .*B more\)(.|\n)*a smaller model"):
        train(huge, recorder())


def test_other_errors_pass_through(tiny: TrainConfig) -> None:
    with pytest.raises(RuntimeError, match="another matter"), memory_told(tiny):
        raise RuntimeError("another matter")


def test_in_the_middle_of_a_run_it_is_a_clean_message_and_status_1(
    tiny: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = OneProcess.step

    def step(self: OneProcess, *arguments: Any) -> Any:
        result = original(self, *arguments)
        if float(self.optimizer.state_dict()["step.model.norm.weight"]) == 3:
            raise torch.OutOfMemoryError(ERROR)
        return result

    monkeypatch.setattr(OneProcess, "step", step)
    config = tmp_path / "tiny.toml"
    config.write_text(dump_config(tiny), encoding="utf-8")
    assert main(["run", str(config)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("llama-train: out of memory on cpu (asked for 2.00 GiB more)\n")
    assert "data.micro_batch_size = 2, data.gradient_accumulation_steps = 2: " in error
    assert "Traceback" not in error
