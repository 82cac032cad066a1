"""Logits, losses and gradients of tiny random models against transformers, in float32.

Tolerance 1e-5, the project's own for float32: weights of order 0.2 give logits of order 1, and a sum of some hundred
products of that size is rounded by about 1e-6 in each of the two orders of summation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llama_core import Llama, LlamaConfig, PaddedAttend, plain_attend, positions_from_mask
from llama_core.ops import linear_cross_entropy
from llama_core.rope import inverse_frequencies

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5
BASE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def theta(value: float, **block: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": value, **block}}


# name → (changes of BASE, shape of the batch)
CASES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "plain": ({}, (2, 16)),
    "heads 4/4": ({"num_key_value_heads": 4}, (2, 16)),
    "heads 4/1": ({"num_key_value_heads": 1}, (2, 16)),
    "heads 6/2, head_dim 6": ({"num_attention_heads": 6, "hidden_size": 36, "head_dim": 6}, (2, 9)),
    "heads 9/3": ({"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36}, (1, 17)),
    "head_dim 16 > hidden / heads": ({"head_dim": 16}, (2, 8)),
    "head_dim 2": ({"head_dim": 2}, (2, 8)),
    "one head": ({"num_attention_heads": 1, "num_key_value_heads": 1}, (2, 8)),
    "attention_bias": ({"attention_bias": True}, (2, 16)),
    "mlp_bias": ({"mlp_bias": True}, (2, 16)),
    "both biases, tied": ({"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, (2, 16)),
    "tied": ({"tie_word_embeddings": True}, (2, 16)),
    "vocab 1": ({"vocab_size": 1}, (2, 5)),
    "vocab 127": ({"vocab_size": 127}, (3, 7)),
    "ffn 7": ({"intermediate_size": 7}, (2, 16)),
    "one layer": ({"num_hidden_layers": 1}, (2, 16)),
    "five layers": ({"num_hidden_layers": 5, "hidden_size": 16}, (1, 8)),
    "one token": ({}, (1, 1)),
    "one token, batch 5": ({"num_key_value_heads": 1}, (5, 1)),
    "eps 1e-2": ({"rms_norm_eps": 1e-2}, (2, 16)),
    "theta 100": (theta(100.0), (2, 16)),
    "theta 500000": (theta(500000.0), (2, 64)),
    "linear": (theta(10000.0, rope_type="linear", factor=4.0), (2, 64)),
    "llama3": (theta(500000.0, **LLAMA3), (2, 48)),
    "llama3, past the original context": (theta(10000.0, **LLAMA3), (1, 160)),
    "yarn": (theta(10000.0, **YARN), (2, 48)),
    "yarn, head_dim 16": ({"head_dim": 16, **theta(10000.0, **YARN)}, (2, 48)),
    "yarn, not truncated": ({"head_dim": 16, **theta(10000.0, **YARN, truncate=False)}, (2, 48)),
    "yarn, mscale": (theta(10000.0, **YARN, mscale=0.7, mscale_all_dim=1.3), (2, 24)),
    "yarn, mscale alone": (theta(10000.0, **YARN, mscale=0.7), (2, 24)),
    "yarn, attention_factor": (theta(10000.0, **YARN, attention_factor=1.3), (2, 24)),
    "yarn, betas": ({"head_dim": 16, **theta(1000.0, **YARN, beta_fast=4.0, beta_slow=0.5)}, (2, 24)),
    "yarn, no ramp": (theta(10000.0, **YARN, beta_fast=0.001, beta_slow=0.001), (2, 24)),
}


def both(changes: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> tuple[Llama, Any]:
    """Our model and transformers', with the same random weights."""
    torch.manual_seed(0)
    config = LlamaConfig.from_hf({**BASE, **changes})
    ours = Llama(config)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    theirs_config = transformers.LlamaConfig(**{**BASE, **changes}, attn_implementation="eager")
    theirs = transformers.LlamaForCausalLM(theirs_config)
    theirs.load_state_dict(ours.state_dict(), strict=True)  # strict and without a key map: the names are equal
    same_frequencies(ours, theirs)
    return ours.to(dtype).eval(), theirs.to(dtype).eval()


def same_frequencies(ours: Llama, theirs: Any) -> None:
    """Check the rotary frequencies, then let transformers use ours.

    Its own come from float32 powers and are off by up to some 1e-7 of their value; times a position of 160 that is
    an angle error of 3e-5, which says nothing about the model.
    """
    rotary = theirs.model.rotary_emb
    torch.testing.assert_close(rotary.inv_freq, ours.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    rotary.inv_freq.copy_(ours.model.rotary_emb.inv_freq)


def assert_same_gradients(ours: Llama, theirs: Any) -> None:
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    got = {name: p.grad for name, p in ours.named_parameters()}
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        assert gradient is not None
        assert gradient.abs().max() > 0 or expected[name].abs().max() < TOLERANCE, name  # not vacuous
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients(case: str) -> None:
    changes, shape = CASES[case]
    ours, theirs = both(changes)
    tokens = torch.randint(0, ours.config.vocab_size, shape)
    logits, expected = ours.logits(ours(tokens)), theirs(tokens).logits
    assert ours.config.vocab_size == 1 or expected.std() > 0.5  # not flat
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
    upstream = torch.randn_like(logits) / logits.numel() ** 0.5
    logits.backward(upstream)
    expected.backward(upstream)
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("case", [case for case, (_, shape) in CASES.items() if shape[1] > 1])
def test_loss_and_its_gradients(case: str) -> None:
    changes, shape = CASES[case]
    ours, theirs = both(changes)
    tokens = torch.randint(0, ours.config.vocab_size, shape)
    labels = tokens.clone()
    labels[0, : shape[1] // 2] = -100
    assert ours.lm_head is not None
    loss = linear_cross_entropy(ours(tokens)[:, :-1], ours.lm_head.weight, labels[:, 1:])
    expected = theirs(tokens, labels=labels).loss
    torch.testing.assert_close(loss, expected, rtol=0, atol=TOLERANCE)
    loss.backward()
    expected.backward()
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("case", ["plain", "linear", "llama3", "yarn"])
def test_explicit_positions(case: str) -> None:
    ours, theirs = both(CASES[case][0])
    tokens = torch.randint(0, 61, (3, 10))
    positions = torch.stack([torch.arange(10), torch.arange(10) * 7, torch.arange(10) + 50])
    got, expected = ours.logits(ours(tokens, positions)), theirs(tokens, position_ids=positions).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)
    shared = positions[1:2]
    torch.testing.assert_close(
        ours(tokens, shared), ours(tokens, shared.expand(3, -1)), rtol=0, atol=0, msg="one row of positions for all"
    )
    assert (got - ours.logits(ours(tokens))).abs().max() > 1e-3  # the positions matter


def test_left_padded_batch() -> None:
    ours, theirs = both({})
    tokens = torch.randint(0, 61, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    positions = positions_from_mask(mask)
    got = ours.logits(ours(tokens, positions, PaddedAttend(mask)))
    expected = theirs(tokens, attention_mask=mask, position_ids=positions).logits
    real = mask.bool()
    torch.testing.assert_close(got[real], expected[real], rtol=0, atol=TOLERANCE)


def test_float64_against_the_formulas() -> None:
    """The same model written out once more, with plain attention and complex rotations, in float64."""
    model, _ = both({"attention_bias": True, "num_hidden_layers": 1}, torch.float64)
    tokens = torch.randint(0, 61, (2, 12))
    p = dict(model.named_parameters())

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * p[name]

    def heads(x: Tensor, name: str) -> Tensor:
        prefix = f"model.layers.0.self_attn.{name}"
        return F.linear(x, p[f"{prefix}.weight"], p[f"{prefix}.bias"]).unflatten(-1, (-1, 8))

    # float32 frequencies and angles, as the model has them, so that only the arithmetic is compared
    angles = torch.arange(12, dtype=torch.float32)[:, None] * torch.tensor(inverse_frequencies(model.config))[None]
    turn = torch.complex(angles.cos().double(), angles.sin().double())[None, :, None]

    def rotate(x: Tensor) -> Tensor:
        turned = torch.complex(x[..., :4], x[..., 4:]) * turn
        return torch.cat((turned.real, turned.imag), -1)

    x = p["model.embed_tokens.weight"][tokens]
    y = norm(x, "model.layers.0.input_layernorm.weight")
    q, k, v = rotate(heads(y, "q_proj")), rotate(heads(y, "k_proj")), heads(y, "v_proj")
    attended = plain_attend(0, q, k, v).flatten(-2)
    o = "model.layers.0.self_attn.o_proj"
    x = x + F.linear(attended, p[f"{o}.weight"], p[f"{o}.bias"])
    y = norm(x, "model.layers.0.post_attention_layernorm.weight")
    gate, up, down = (p[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    x = x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
    expected = norm(x, "model.norm.weight")
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-12)


def test_bfloat16_close_to_transformers() -> None:
    ours, theirs = both({}, torch.bfloat16)
    exact, _ = both({})
    tokens = torch.randint(0, 61, (2, 16))
    reference = exact.logits(exact(tokens))
    error = (ours.logits(ours(tokens)).float() - reference).norm() / reference.norm()
    their_error = (theirs(tokens).logits.float() - reference).norm() / reference.norm()
    assert error < 2 * their_error  # as good as theirs up to chance; both are rounding of 2**-9 per operation


@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_our_config(case: str) -> None:
    config = LlamaConfig.from_hf({**BASE, **CASES[case][0]})
    theirs = transformers.LlamaConfig(**config.to_hf())
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    expected = torch.tensor(inverse_frequencies(config))
    torch.testing.assert_close(rotary.inv_freq, expected, rtol=1e-6, atol=0)
    for key in (*BASE, "head_dim", "rms_norm_eps", "tie_word_embeddings", "attention_bias", "mlp_bias"):
        assert getattr(theirs, key) == getattr(config, key), key


@pytest.mark.parametrize("case", CASES)
def test_we_read_transformers_config(case: str) -> None:
    changes = CASES[case][0]
    written = transformers.LlamaConfig(**{**BASE, **changes}).to_dict()  # v5 spelling
    config = LlamaConfig.from_hf(written)
    direct = LlamaConfig.from_hf({**BASE, **changes})
    assert config.replace(extra={}) == direct
    for key, value in config.extra.items():
        assert written[key] == value
