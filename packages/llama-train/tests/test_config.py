from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

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


def test_defaults_are_valid_and_frozen() -> None:
    config = TrainConfig()
    with pytest.raises(FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        (ModelConfig, "hidden_size", 0),
        (ModelConfig, "num_hidden_layers", 99_999_999_999),
        (ModelConfig, "rope_theta", -1.0),
        (ModelConfig, "rms_norm_eps", float("nan")),
        (DataConfig, "source", ""),
        (DataConfig, "suffixes", ("py",)),
        (DataConfig, "held_out_fraction", 1.0),
        (DataConfig, "vocab_size", 257),
        (DataConfig, "sequence_length", 1),
        (DataConfig, "micro_batch_size", 0),
        (DataConfig, "micro_batch_size", 2**70),
        (DataConfig, "gradient_accumulation_steps", 2**70),
        (OptimizerConfig, "learning_rate", 0.0),
        (OptimizerConfig, "learning_rate", float("inf")),
        (OptimizerConfig, "betas", (0.9, 1.0)),
        (OptimizerConfig, "weight_decay", -0.1),
        (ScheduleConfig, "steps", 0),
        (ScheduleConfig, "warmup_steps", 1001),
        (ScheduleConfig, "final_ratio", 1.5),
        (CheckpointConfig, "keep", 0),
        (EvaluationConfig, "max_tokens", 0),
        (LoggingConfig, "every", 0),
        (TrainConfig, "name", "a/b"),
        (TrainConfig, "name", ".."),
        (TrainConfig, "seed", -1),
        (TrainConfig, "threads", 0),
        (TrainConfig, "threads", 100_000),
    ],
)
def test_out_of_range_names_key_and_value(section: type, key: str, value: object) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        section(**{key: value})
    assert key in str(caught.value)
    assert repr(value) in str(caught.value)


def test_rows_per_step() -> None:
    assert DataConfig(micro_batch_size=3, gradient_accumulation_steps=4).rows_per_step == 12
