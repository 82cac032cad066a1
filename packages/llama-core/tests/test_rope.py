"""Rotary frequencies against tables computed elsewhere, and angles that no cast of the model can spoil."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_core import Llama, LlamaConfig, Ops, RopeConfig, preset
from llama_core.ops import rope
from llama_core.rope import RotaryEmbedding, attention_factor, inverse_frequencies

# 500000 ** (-i / 64), i = 0 … 63, from 60-digit decimal arithmetic
LLAMA_3_8B = """
    1.00000000000e+00 8.14617233857e-01 6.63601237696e-01 5.40581004636e-01
    4.40366602672e-01 3.58730223751e-01 2.92227822573e-01 2.38053820480e-01
    1.93922744749e-01 1.57972809909e-01 1.28687373433e-01 1.04830952178e-01
    8.53971002858e-02 6.95659496142e-02 5.66696214453e-02 4.61640502655e-02
    3.76060309309e-02 3.06345208932e-02 2.49554086706e-02 2.03291059810e-02
    1.65604400810e-02 1.34904198902e-02 1.09895285345e-02 8.95225933619e-03
    7.29266473722e-03 5.94073037567e-03 4.83942134572e-03 3.94227603012e-03
    3.21144599475e-03 2.61609925293e-03 2.13111953691e-03 1.73604670218e-03
    1.41421356237e-03 1.15204274026e-03 9.38473870357e-04 7.64496988317e-04
    6.22772421915e-04 5.07321147662e-04 4.13272549986e-04 3.36658941498e-04
    2.74248175676e-04 2.23407290260e-04 1.81991428815e-04 1.48253354327e-04
    1.20769737411e-04 9.83811094237e-05 8.01429472225e-05 6.52858259795e-05
    5.31829589694e-05 4.33237549240e-05 3.52922773965e-05 2.87496973892e-05
    2.34199989614e-05 1.90783347709e-05 1.55415402976e-05 1.26604065671e-05
    1.03133853772e-05 8.40146146768e-06 6.84397530115e-06 5.57522022841e-06
    4.54167048061e-06 3.69972304400e-06 3.01385815214e-06 2.45514079113e-06
"""
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_llama_3_8b() -> None:
    expected = [float(word) for word in LLAMA_3_8B.split()]
    assert inverse_frequencies(preset("llama-3-8b")) == pytest.approx(expected, rel=1e-11, abs=0)
    table = RotaryEmbedding(preset("llama-3-8b")).inv_freq
    assert table.dtype == torch.float32
    assert table.tolist() == pytest.approx(expected, rel=2**-24, abs=0)  # float32, rounded once


def b07_config(theta: float, original: int) -> LlamaConfig:
    block = {**LLAMA3, "original_max_position_embeddings": original}
    return LlamaConfig.from_hf({"head_dim": 16, "rope_theta": theta, "rope_scaling": block})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            b07_config(10000.0, 64),
            [1.0, 0.2443845994, 0.01304225604, 0.003952847075, 0.00125, 0.0003952847075, 0.000125, 3.952847075e-05],
        ),
        (
            b07_config(500000.0, 8192),
            [
                *(1.0, 0.1939227447, 0.03760603093, 0.007292664737),
                *(0.0005248461610, 3.428102196e-05, 6.647869871e-06, 1.289173172e-06),
            ],
        ),
    ],
    ids=["set 1", "set 2"],
)
def test_b07_llama3_bands(config: LlamaConfig, expected: list[float]) -> None:
    assert inverse_frequencies(config) == pytest.approx(expected, rel=1e-6, abs=0)
    assert RotaryEmbedding(config).inv_freq.tolist() == pytest.approx(expected, rel=1e-6, abs=0)


def test_b07_the_block_is_used(make_t0: Callable[..., Llama]) -> None:
    tokens = torch.randint(0, 128, (1, 128), generator=torch.Generator().manual_seed(0))
    block = {**LLAMA3, "original_max_position_embeddings": 64}
    scaled = make_t0(head_dim=16, max_position_embeddings=128, rope_scaling=block)
    plain = make_t0(head_dim=16, max_position_embeddings=128)
    difference = scaled.logits(scaled(tokens)) - plain.logits(plain(tokens))
    assert difference.abs().max() > 1e-3


B09 = [
    {"type": "linear", "factor": 8.0},
    {"rope_type": "linear", "factor": 8.0},
    {"type": "linear", "rope_type": "linear", "factor": 8.0},
]


@pytest.mark.parametrize("block", B09, ids=["type", "rope_type", "both"])
def test_b09_linear_scaling_in_every_spelling(make_t0: Callable[..., Llama], block: dict[str, Any]) -> None:
    scaled, plain = make_t0(rope_scaling=block), make_t0()
    tokens = torch.tensor([[3, 1, 4, 1]])
    got = scaled.logits(scaled(tokens, torch.tensor([[0, 8, 16, 24]])))
    expected = plain.logits(plain(tokens, torch.tensor([[0, 1, 2, 3]])))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    assert inverse_frequencies(scaled.config) == [f / 8 for f in inverse_frequencies(plain.config)]
    assert scaled.model.rotary_emb.inv_freq[0] == 0.125
    again = make_t0(**scaled.config.to_hf())
    assert torch.equal(again.model.rotary_emb.inv_freq, scaled.model.rotary_emb.inv_freq)


def test_linear_default_and_yarn_attention_factor() -> None:
    yarn = RopeConfig("yarn", factor=4.0)
    assert attention_factor(RopeConfig("linear", factor=4.0)) == 1.0
    assert attention_factor(yarn) == pytest.approx(0.1 * math.log(4) + 1)  # YaRN, section 3.4
    assert attention_factor(RopeConfig("yarn", factor=1.0)) == 1.0
    assert attention_factor(RopeConfig("yarn", factor=4.0, attention_factor=2.5)) == 2.5
    same = RopeConfig("yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.0)
    assert attention_factor(same) == 1.0
    cos, sin = RotaryEmbedding(LlamaConfig(rope=yarn))(torch.tensor([[0]]))
    assert cos.unique().item() == pytest.approx(attention_factor(yarn), rel=1e-6)
    assert not sin.any()


def reference_table(positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.double()[..., None] * torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
    return angles.cos(), angles.sin()


def b11_paths(make_t0: Callable[..., Llama]) -> dict[str, Callable[[], Llama]]:
    def on_meta(dtype: torch.dtype) -> Llama:
        with torch.device("meta"):
            empty = Llama(make_t0(max_position_embeddings=512).config).to(dtype)
        filled = empty.to_empty(device="cpu")
        filled.load_state_dict(make_t0(max_position_embeddings=512).to(dtype).state_dict())
        return filled

    def as_default_dtype() -> Llama:
        torch.set_default_dtype(torch.bfloat16)
        try:
            return make_t0(max_position_embeddings=512)
        finally:
            torch.set_default_dtype(torch.float32)

    return {
        "float32": lambda: make_t0(max_position_embeddings=512),
        "cast": lambda: make_t0(max_position_embeddings=512).to(torch.bfloat16),
        "cast by method": lambda: make_t0(max_position_embeddings=512).bfloat16(),
        "half": lambda: make_t0(max_position_embeddings=512).half(),
        "built as bfloat16": as_default_dtype,
        "meta, float32": lambda: on_meta(torch.float32),
        "meta, bfloat16": lambda: on_meta(torch.bfloat16),
        "deepcopy of a cast": lambda: copy.deepcopy(make_t0(max_position_embeddings=512).bfloat16()),
        "cast and back": lambda: make_t0(max_position_embeddings=512).bfloat16().float(),
    }


@pytest.mark.parametrize("path", b11_paths(lambda: None))  # type: ignore[arg-type, return-value]
def test_b11_no_cast_spoils_the_table(make_t0: Callable[..., Llama], path: str) -> None:
    model = b11_paths(make_t0)[path]()
    positions = torch.arange(512)[None]
    cos, sin = model.model.rotary_emb(positions)
    assert cos.dtype == sin.dtype == torch.float32
    for got, expected in zip((cos, sin), reference_table(positions), strict=True):
        assert (got - expected).abs().max() < 0.004  # the case's bound
        assert (got - expected).abs().max() < 511 * 2**-23  # what float32 angles give: one rounding of the angle
    assert cos[0, 256, 0].item() == pytest.approx(-0.0398, abs=5e-5)
    assert sin[0, 256, 0].item() == pytest.approx(-0.9992, abs=5e-5)
    assert cos[0, 257, 0].item() == pytest.approx(0.8193, abs=5e-5)
    assert sin[0, 257, 0].item() == pytest.approx(-0.5734, abs=5e-5)
    assert model.model.rotary_emb.inv_freq[0] == 1.0
    fresh = RotaryEmbedding(model.config)
    assert torch.equal(model.model.rotary_emb.inv_freq, fresh.inv_freq)  # the float32 table itself, to the bit


def test_b11_the_model_in_bfloat16_uses_float32_angles(make_t0: Callable[..., Llama]) -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def recording(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((cos, sin))
        return rope(q, k, cos, sin)

    model = Llama(make_t0().config, Ops(rope=recording)).bfloat16()
    model(torch.tensor([[1, 2]]), torch.tensor([[256, 257]]))
    assert len(seen) == 2  # one call per layer
    for cos, _ in seen:
        assert cos.dtype == torch.float32
        assert cos[0, :, 0].tolist() == pytest.approx([-0.0398, 0.8193], abs=5e-5)


def test_table_is_no_part_of_the_state_dict(make_t0: Callable[..., Llama]) -> None:
    assert not [name for name in make_t0().state_dict() if "inv_freq" in name]
