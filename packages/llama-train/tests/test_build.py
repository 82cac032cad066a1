from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from llama_core import Ops, init_weights, plain_attend
from llama_train.build import build_model, choose_ops, model_config, resolve
from llama_train.config import ModelConfig, TrainConfig

TOKENS = {"vocab_size": 300, "sequence_length": 16, "bos_id": 298, "eos_id": 299}
EXPLICIT = ModelConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)


def test_explicit_shape() -> None:
    shape = model_config(EXPLICIT, **TOKENS)
    assert (shape.vocab_size, shape.hidden_size, shape.head_width, shape.kv_heads) == (300, 16, 8, 2)
    assert (shape.max_position_embeddings, shape.bos_token_id, shape.eos_token_id) == (16, 298, 299)


def test_preset_with_changes() -> None:
    shape = model_config(ModelConfig(preset="llama-3-8b", num_hidden_layers=2, rope_theta=1234.0), **TOKENS)
    assert (shape.num_hidden_layers, shape.hidden_size, shape.vocab_size) == (2, 4096, 300)
    assert (shape.rope.rope_theta, shape.max_position_embeddings) == (1234.0, 8192)


def test_faults() -> None:
    with pytest.raises(ValueError, match=r"set model.preset, or model.intermediate_size, model.num_hidden_layers"):
        model_config(ModelConfig(hidden_size=16, num_attention_heads=2), **TOKENS)
    with pytest.raises(ValueError, match="did you mean 'llama-3-8b'"):
        model_config(ModelConfig(preset="llama3-8b"), **TOKENS)
    with pytest.raises(ValueError, match="multiple of num_attention_heads"):
        model_config(
            ModelConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=3), **TOKENS
        )


def test_resolve_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = resolve(TrainConfig())
    assert (config.device, config.dtype) == ("cpu", "float32")
    with pytest.raises(ValueError, match="no GPU"):
        resolve(TrainConfig(device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve(TrainConfig()).device == "cuda"
    assert resolve(TrainConfig()).dtype == "bfloat16"
    assert resolve(TrainConfig(device="cpu")).device == "cpu"
    assert resolve(TrainConfig(dtype="float32")).dtype == "float32"


def test_a_cpu_gets_the_plain_operations() -> None:
    for kernels in ("auto", "plain"):
        assert choose_ops(kernels, torch.device("cpu")) == Ops()
    assert choose_ops("plain", torch.device("cuda")) == Ops()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_follow_from_the_seed(dtype: str, change: Callable[..., TrainConfig]) -> None:
    config = TrainConfig(dtype=dtype, device="cpu", seed=3)  # type: ignore[arg-type]
    shape = model_config(EXPLICIT, **TOKENS)
    model = build_model(shape, config, torch.device("cpu"))
    again = build_model(shape, config, torch.device("cpu"))
    other = build_model(shape, change(config, seed=4), torch.device("cpu"))
    assert next(model.parameters()).dtype == getattr(torch, dtype)
    state = dict(model.named_parameters())
    assert all(torch.equal(parameter, state[name]) for name, parameter in again.named_parameters())
    assert not torch.equal(other.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)
    init_weights(again, 3)
    assert all(torch.equal(parameter, state[name]) for name, parameter in again.named_parameters())
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]]))).all()  # rotary angles survived construction on meta


def test_settings_reach_the_model(change: Callable[..., TrainConfig]) -> None:
    config = TrainConfig(dtype="float32", device="cpu", attention="plain", activation_checkpointing="full")
    model = build_model(model_config(EXPLICIT, **TOKENS), config, torch.device("cpu"))
    assert model.attend is plain_attend
    assert model.model.layers[0].recompute is not None
