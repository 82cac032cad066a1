"""The model as a module: names, counts, biases (B06), ties, meta construction, seams."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from llama_core import Llama, LlamaConfig, Ops, causal_attend, init_weights, plain_attend, preset
from llama_core.ops import add_rms_norm, rms_norm, rope, swiglu

Make = Callable[..., Llama]


def biases(model: Llama) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if name.endswith("bias")}


def test_b06_bias_counts(make_t0: Make) -> None:
    plain, full, attention = make_t0(), make_t0(attention_bias=True, mlp_bias=True), make_t0(attention_bias=True)
    per_layer = {
        name.removeprefix("model.layers.0."): p.numel()
        for name, p in biases(full).items()
        if name.startswith("model.layers.0.")
    }
    assert per_layer == {
        "self_attn.q_proj.bias": 32,
        "self_attn.k_proj.bias": 16,
        "self_attn.v_proj.bias": 16,
        "self_attn.o_proj.bias": 32,
        "mlp.gate_proj.bias": 64,
        "mlp.up_proj.bias": 64,
        "mlp.down_proj.bias": 32,
    }
    assert sum(per_layer.values()) == 256
    assert len(biases(full)) == 14
    assert full.num_parameters() - plain.num_parameters() == 512
    assert attention.num_parameters() - plain.num_parameters() == 192
    assert len(biases(attention)) == 8
    written = LlamaConfig.from_hf(full.config.to_hf())
    assert (written.attention_bias, written.mlp_bias) == (True, True)


def test_b06_the_bias_has_its_effect(make_t0: Make) -> None:
    model = make_t0(attention_bias=True, mlp_bias=True)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        for bias in biases(model).values():
            bias.normal_(0.0, 1.0)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(attention, name).weight.zero_()
    x = torch.randn(2, 5, 32)
    cos, sin = model.model.rotary_emb(torch.arange(5)[None])
    out = attention(x, cos, sin, causal_attend, 0)
    assert torch.equal(out, attention.o_proj.bias.expand(2, 5, 32))


def test_b06_every_bias_is_used(make_t0: Make) -> None:
    model = make_t0(attention_bias=True, mlp_bias=True)
    tokens = torch.randint(0, 128, (2, 5))
    before = model(tokens)
    for name, bias in biases(model).items():
        with torch.no_grad():
            kept = bias.clone()
            bias.add_(torch.randn_like(bias))
            assert (model(tokens) - before).abs().max() > 1e-3, name
            bias.copy_(kept)


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"mlp_bias": True}], ids=str)
def test_b06_strict_loading_names_missing_and_unexpected_biases(make_t0: Make, changes: dict[str, bool]) -> None:
    full, part = make_t0(attention_bias=True, mlp_bias=True), make_t0(**changes)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        part.load_state_dict(full.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        full.load_state_dict(part.state_dict())


def test_shapes_and_logits(make_t0: Make) -> None:
    model = make_t0()
    hidden = model(torch.randint(0, 128, (3, 7)))
    assert hidden.shape == (3, 7, 32)
    assert model.logits(hidden).shape == (3, 7, 128)
    torch.testing.assert_close(model.logits(hidden[:, -1]), model.logits(hidden)[:, -1], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "positions", "message"),
    [
        (torch.zeros(5, dtype=torch.int64), None, r"tokens have shape \(5,\); \(batch, sequence\)"),
        (torch.zeros(2, 5, 1, dtype=torch.int64), None, r"tokens have shape \(2, 5, 1\)"),
        (torch.zeros(2, 5, dtype=torch.int64), torch.arange(5), r"positions have shape \(5,\); \(2, 5\) or \(1, 5\)"),
        (torch.zeros(2, 5, dtype=torch.int64), torch.zeros(3, 5), r"positions have shape \(3, 5\)"),
        (torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 4), r"positions have shape \(2, 4\)"),
    ],
)
def test_other_shapes_are_errors(make_t0: Make, tokens: Tensor, positions: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_t0()(tokens, positions)


def test_ops_and_attend_are_values(make_t0: Make) -> None:
    calls: list[str] = []

    def counted(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            calls.append(name)
            return function(*args)

        return call

    ops = Ops(
        rms_norm=counted("rms_norm", rms_norm),  # type: ignore[arg-type]
        add_rms_norm=counted("add_rms_norm", add_rms_norm),  # type: ignore[arg-type]
        rope=counted("rope", rope),  # type: ignore[arg-type]
        swiglu=counted("swiglu", swiglu),  # type: ignore[arg-type]
    )
    layers: list[int] = []

    class Recording:
        def __len__(self) -> int:  # like an empty cache: false as a condition
            return 0

        def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            assert q.shape == (2, 5, 4, 8)
            assert k.shape == v.shape == (2, 5, 2, 8)
            layers.append(layer)
            return plain_attend(layer, q, k, v)

    reference = make_t0()
    model = Llama(reference.config, ops)
    model.load_state_dict(reference.state_dict())
    tokens = torch.randint(0, 128, (2, 5))
    torch.testing.assert_close(model(tokens, attend=Recording()), reference(tokens), rtol=0, atol=1e-6)
    assert layers == [0, 1]
    assert {name: calls.count(name) for name in set(calls)} == {
        "rms_norm": 3,
        "add_rms_norm": 2,
        "rope": 2,
        "swiglu": 2,
    }
    other = Llama(reference.config, attend=Recording())
    other(tokens)
    assert layers == [0, 1, 0, 1]


def test_a_pipeline_stage_skips_what_it_lacks(make_t0: Make) -> None:
    whole, first, last = make_t0(), make_t0(), make_t0()
    first.model.layers[1], first.model.norm, first.lm_head = None, None, None  # type: ignore[assignment]
    last.model.embed_tokens, last.model.layers[0] = None, None  # type: ignore[assignment]
    tokens = torch.randint(0, 128, (2, 5))
    assert torch.equal(last.logits(last(first(tokens))), whole.logits(whole(tokens)))
    assert {*first.state_dict()} | {*last.state_dict()} == {*whole.state_dict()}
    with pytest.raises(ValueError, match="no output head"):
        first.logits(first(tokens))


def test_tied_weights_are_one_parameter(make_t0: Make) -> None:
    tied, untied = make_t0(tie_word_embeddings=True), make_t0()
    assert untied.num_parameters() - tied.num_parameters() == 128 * 32

    def assert_tied(model: Llama) -> None:
        assert model.lm_head is not None
        assert model.model.embed_tokens is not None
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.num_parameters() == tied.num_parameters()

    assert_tied(tied)
    assert_tied(tied.to(torch.bfloat16))
    assert_tied(nn.Sequential(make_t0(tie_word_embeddings=True)).double()[0])  # type: ignore[arg-type]
    with torch.device("meta"):
        meta = Llama(tied.config)
    assert_tied(meta)
    assert_tied(meta.to_empty(device="cpu"))
    assert_tied(nn.Sequential(Llama(tied.config).to("meta")).to_empty(device="cpu")[0])  # type: ignore[arg-type]


def test_meta_construction_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.device("meta"):
        model = Llama(preset("llama-3.1-405b"))
    assert model.num_parameters() == 405_853_388_800
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB
    hidden = model(torch.zeros(1, 8, dtype=torch.int64, device="meta"))
    assert hidden.shape == (1, 8, 16384)  # shapes flow through


def test_meta_then_filled_equals_built(make_t0: Make) -> None:
    config = make_t0().config
    with torch.device("meta"):
        model = Llama(config)
    model = model.to_empty(device="cpu")
    init_weights(model, seed=0)
    built = Llama(config)
    tokens = torch.randint(0, 128, (2, 9))
    assert torch.equal(model(tokens), built(tokens))


def test_construction_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    Llama(preset("tiny"))
    assert torch.equal(torch.rand(4), expected)
