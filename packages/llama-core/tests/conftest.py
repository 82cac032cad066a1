"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llama_core import Llama, LlamaConfig

torch.set_num_threads(1)  # the matrices are tiny; on a busy machine threads would only wait for each other

T0 = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def make_t0() -> Callable[..., Llama]:
    """The shared tiny model: every parameter normal with std 0.2, so that errors show in the logits."""

    def make(std: float = 0.2, **changes: Any) -> Llama:
        model = Llama(LlamaConfig.from_hf({**T0, **changes}))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, std, generator=generator)
        return model.eval()

    return make
