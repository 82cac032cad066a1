"""examples/from_scratch.py computes what `Llama` computes; on the embedded model it checks so itself, in the docs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from llama_core import Llama, RopeConfig

EXAMPLE = Path(__file__).parents[3] / "examples" / "from_scratch.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("from_scratch", EXAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
        {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 6, "num_hidden_layers": 3},
        {"rope": RopeConfig(rope_theta=17.0)},
    ],
    ids=["grouped", "one-kv-head-tied", "full", "other-theta"],
)
def test_logits_equal_the_models(
    example: ModuleType, make_model: Callable[..., Llama], changes: dict[str, object]
) -> None:
    model = make_model(**changes).double()
    ids = [256, 7, 99, 7, 0, 31, 200]
    shown: dict[str, tuple[int, ...]] = {}
    logits = example.forward(
        model.state_dict(), model.config, ids, lambda name, value, meaning: shown.setdefault(name, tuple(value.shape))
    )
    # Frequencies are rounded to float32 in both; the rest is float64.
    torch.testing.assert_close(logits, model.logits(model(torch.tensor([ids])))[0], rtol=1e-9, atol=1e-9)
    config = model.config
    assert shown["q"] == shown["taken"] == (7, config.head_width)
    assert shown["scores"] == shown["shares"] == (7, 7)
    assert shown["w_k"] == (config.head_width, config.hidden_size)
    assert shown["inner"] == (7, config.intermediate_size)
    assert shown["logits"] == (7, config.vocab_size)


def test_half_precision_is_close(example: ModuleType, model: Llama) -> None:
    ids = [256, 7, 99, 7]
    weights = {name: value.bfloat16() for name, value in model.state_dict().items()}
    logits = example.forward(weights, model.config, ids, lambda *_: None)
    assert logits.dtype == torch.bfloat16
    expected = model.logits(model(torch.tensor([ids])))[0]
    # bfloat16 rounds at 2^-9; some twenty roundings follow each other, so a few percent of the norm.
    assert (logits.float() - expected).norm() < 0.05 * expected.norm()


def test_other_rotary_positions_are_refused(example: ModuleType, make_model: Callable[..., Llama]) -> None:
    model = make_model(rope=RopeConfig(rope_type="linear", factor=2.0))
    with pytest.raises(ValueError, match="rope_type is 'linear'"):
        example.forward(model.state_dict(), model.config, [1, 2], lambda *_: None)
