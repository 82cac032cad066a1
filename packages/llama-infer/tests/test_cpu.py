"""The CPU's fast operations against the plain ones."""

import pytest
import torch
import torch.nn.functional as F

from llama_core import Llama, ops, pack_projections, preset
from llama_core.linear import LinearProduct
from llama_infer import cpu
from llama_infer.cpu import cpu_ops, has_onednn, onednn_linear, onednn_linear_by_layout, rope, swiglu, use_onednn

GENERATOR = torch.Generator().manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


@pytest.mark.skipif(not has_onednn(), reason="oneDNN is used on x86 only")
@pytest.mark.parametrize("product", [onednn_linear, onednn_linear_by_layout])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 7)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_onednn_linear(product: LinearProduct, shape: tuple[int, int], with_bias: bool) -> None:
    x, weight, bias = randn(*shape, 33), randn(65, 33), randn(65) if with_bias else None
    strided = randn(*shape, 66)[..., ::2]
    joined = randn(130, 33)[65:]  # as the parts of a packed projection lie in memory
    with torch.inference_mode():
        for a, b in ((x, weight), (strided, weight), (x, joined)):
            # sums of 33 products of size 1: rounding of a few 1e-6 in either order
            torch.testing.assert_close(product(a, b, bias), F.linear(a, b, bias), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not has_onednn(), reason="oneDNN is used on x86 only")
def test_a_torch_without_the_operator_takes_the_public_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_operator", lambda: None)
    model = Llama(preset("tiny"))
    use_onednn(model)
    assert model.lm_head is not None
    assert model.lm_head.product is onednn_linear_by_layout


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 8), (9, 3, 64), (1, 1, 2)])
@pytest.mark.parametrize("rows", [1, 3])
def test_rope(heads: int, kv_heads: int, width: int, rows: int) -> None:
    q, k, angles = randn(3, 5, heads, width), randn(3, 5, kv_heads, width), randn(rows, 5, width // 2) * 10
    before = q.clone(), k.clone()
    for ours, plain in zip(rope(q, k, angles.cos(), angles.sin()), ops.rope(q, k, angles.cos(), angles.sin())):
        torch.testing.assert_close(ours, plain, atol=1e-6, rtol=0)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


def test_rope_in_half_precision_rounds_once() -> None:
    q, k, angles = randn(1, 3, 4, 8).bfloat16(), randn(1, 3, 2, 8).bfloat16(), randn(1, 3, 4)
    for ours, plain in zip(rope(q, k, angles.cos(), angles.sin()), ops.rope(q, k, angles.cos(), angles.sin())):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, plain)


def test_swiglu() -> None:
    gate, up = randn(3, 5, 14).chunk(2, dim=-1)
    before = gate.clone(), up.clone()
    torch.testing.assert_close(swiglu(gate, up), ops.swiglu(gate, up))
    assert torch.equal(gate, before[0])
    assert torch.equal(up, before[1])


def test_a_whole_model() -> None:
    plain, fast = Llama(preset("tiny")), Llama(preset("tiny"), cpu_ops())
    pack_projections(fast)
    use_onednn(fast)
    if has_onednn():
        assert fast.lm_head is not None
        assert fast.lm_head.product is onednn_linear
    tokens = torch.arange(12).view(2, 6)
    with torch.inference_mode():
        torch.testing.assert_close(fast.logits(fast(tokens)), plain.logits(plain(tokens)), atol=1e-5, rtol=1e-5)


def test_other_dtypes_keep_torchs_product() -> None:
    model = Llama(preset("tiny")).bfloat16()
    use_onednn(model)
    assert model.lm_head is not None
    assert model.lm_head.product is F.linear
