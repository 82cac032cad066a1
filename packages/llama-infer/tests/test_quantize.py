"""Rounded weights: the same as multiplying by the rounded matrices, and near the model that was rounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import llama_kernels
from llama_core import Llama, generate_naive
from llama_infer import LLM, SamplingParams
from llama_infer.quantize import quantize_model
from llama_infer.rounding import QUANTIZATIONS, round_weight

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
ROUND_TRIP = {
    "int8": lambda w: (lambda q, s: q.float() * s.unsqueeze(1))(*llama_kernels.quantize_int8(w)),
    "fp8": lambda w: (lambda q, s: q.float() * s.unsqueeze(1))(*llama_kernels.quantize_fp8(w)),
    "int4": lambda w: _int4(w),
}
# The share of the logits' spread that rounding may cost: measured 0.008, 0.03 and 0.1 on this random model.
WORST = {"int8": 0.02, "fp8": 0.08, "int4": 0.25}


def _int4(weight: Tensor) -> Tensor:
    """By the formula: the nearest of sixteen values for each input, group by group."""
    rounded = round_weight(weight, "int4")
    assert rounded.zero is not None
    values = (torch.arange(16) - rounded.zero.unsqueeze(2)) * rounded.scale.unsqueeze(2)  # (N, groups, 16)
    grouped = weight.unflatten(1, (-1, 128))
    nearest = (grouped.unsqueeze(3) - values.unsqueeze(2)).abs().argmin(3)
    return values.gather(2, nearest).flatten(1)


@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_rounded_matrices_and_is_near_the_model(
    make_model: Callable[..., Llama], kind: str, bias: bool
) -> None:
    biases = {"attention_bias": bias, "mlp_bias": bias}
    exact, rounded, dense = (make_model(**SHAPE, **biases) for _ in range(3))
    quantize_model(rounded, kind)
    for name, parameter in dense.model.layers.named_parameters():
        if name.endswith("proj.weight"):
            parameter.copy_(ROUND_TRIP[kind](parameter))
    tokens = torch.arange(24).view(2, 12)
    logits = [model.logits(model(tokens)) for model in (exact, rounded, dense)]
    torch.testing.assert_close(logits[1], logits[2], atol=2e-4, rtol=2e-4)  # sums in another order
    error = (logits[1] - logits[0]).norm() / (logits[0] - logits[0].mean()).norm()
    assert 0 < error < WORST[kind]


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_generates_as_its_own_oracle(make_model: Callable[..., Llama], kind: str) -> None:
    model = make_model(**SHAPE)
    quantize_model(model, kind)
    output = LLM(model).generate([[1, 2, 3], [4]], SamplingParams(temperature=0.0, max_tokens=8))
    for prompt, each in zip([[1, 2, 3], [4]], output, strict=True):
        assert each.token_ids == generate_naive(lambda t: model.logits(model(t)), prompt, max_new_tokens=8)


def test_by_name_from_a_folder(save: Callable[..., Path], make_model: Callable[..., Llama]) -> None:
    folder = save(**SHAPE)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    expected = make_model(**SHAPE)
    quantize_model(expected, "int8")
    tokens = LLM(folder, device="cpu", quantization="int8").generate([[1, 2, 3]], params)[0].token_ids
    assert tokens == LLM(expected).generate([[1, 2, 3]], params)[0].token_ids


def test_refusals(make_model: Callable[..., Llama], save: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="int4 rounds 128 inputs together; q_proj has 32"):
        quantize_model(make_model(), "int4")
    with pytest.raises(ValueError, match="quantization must be one of int8, int4, fp8, got 'int3'"):
        LLM(save(), quantization="int3")
    with pytest.raises(ValueError, match="a Llama that you hold, round with quantize_model"):
        LLM(make_model(), quantization="int8")
