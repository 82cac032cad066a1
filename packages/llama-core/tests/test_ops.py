"""The plain operations against their formulas, in float64 and at the edges of half precision."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llama_core import Ops
from llama_core.ops import add_rms_norm, linear_cross_entropy, rms_norm, rope, swiglu


def exact_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def test_b39_float16_300_does_not_overflow() -> None:
    out = rms_norm(torch.full((2, 64), 300.0, dtype=torch.float16), torch.ones(64, dtype=torch.float16), 1e-5)
    assert out.dtype == torch.float16
    assert torch.equal(out, torch.ones_like(out))


def test_b39_float16_60000_does_not_overflow() -> None:
    out = rms_norm(torch.full((2, 64), 60000.0, dtype=torch.float16), torch.ones(64, dtype=torch.float16), 1e-5)
    assert torch.equal(out, torch.ones_like(out))


def test_b39_float16_small_values_do_not_vanish() -> None:
    out = rms_norm(torch.full((2, 64), 1e-3, dtype=torch.float16), torch.ones(64, dtype=torch.float16), 1e-12)
    torch.testing.assert_close(out.float(), torch.ones(2, 64), rtol=0, atol=2e-3)


def test_b39_bfloat16_one_large_entry() -> None:
    x = torch.ones(64, dtype=torch.bfloat16)
    x[5] = 256
    out = rms_norm(x, torch.ones(64, dtype=torch.bfloat16), 1e-5)
    assert out.dtype == torch.bfloat16
    assert out[5].item() == pytest.approx(7.9964, rel=2**-8)
    assert out[0].item() == pytest.approx(0.03124, rel=2**-8)
    root_mean_square = ((63 + 65536) / 64) ** 0.5
    assert 256 / root_mean_square == pytest.approx(7.9964, abs=5e-4)


@pytest.mark.parametrize("kind", ["every second column", "expanded"])
def test_b39_strided_incoming_gradient(kind: str) -> None:
    strided = torch.randn(4, 128)[:, ::2] if kind == "every second column" else torch.randn(4, 1).expand(4, 64)
    grads = []
    for upstream in (strided, strided.contiguous()):
        torch.manual_seed(1)
        x, weight = torch.randn(4, 64, requires_grad=True), torch.randn(64, requires_grad=True)
        grads.append(torch.autograd.grad(rms_norm(x, weight, 1e-5), (x, weight), upstream))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])


@pytest.mark.parametrize("width", [1, 63, 64, 4097])
def test_b39_odd_widths_values_and_gradients(width: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 2, width, requires_grad=True), torch.randn(width, requires_grad=True)
    upstream = torch.randn(3, 2, width)
    out = rms_norm(x, weight, 1e-5)
    expected = exact_rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(out, expected.float(), rtol=0, atol=1e-5)
    got = torch.autograd.grad(out, (x, weight), upstream)
    want = torch.autograd.grad(expected, (x, weight), upstream.double())
    for a, b in zip(got, want, strict=True):
        # for width 1 the gradient is a difference of nearly equal numbers of order 1, hence absolute
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rms_norm_keeps_the_dtype_of_x(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = (3 * torch.randn(5, 64)).to(dtype), torch.randn(64).to(weight_dtype)
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    # one rounding of the result in dtype; float32 adds its own few
    torch.testing.assert_close(out, exact_rms_norm(x, weight, 1e-5).to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_add_rms_norm() -> None:
    x, residual, weight = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(8)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight, 1e-5))


def test_rope_is_a_complex_rotation() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 5, 4, 8, dtype=torch.float64), torch.randn(2, 5, 2, 8, dtype=torch.float64)
    angles = torch.randn(2, 5, 4, dtype=torch.float64)
    turned = rope(q, k, angles.cos(), angles.sin())
    for x, out in zip((q, k), turned, strict=True):
        expected = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)[:, :, None]
        torch.testing.assert_close(out, torch.cat((expected.real, expected.imag), -1), rtol=0, atol=1e-14)
        torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rope_in_half_precision_rounds_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, angles = torch.randn(1, 6, 3, 8).to(dtype), torch.randn(1, 6, 4)
    out, _ = rope(q, q, angles.cos(), angles.sin())
    exact, _ = rope(q.float(), q.float(), angles.cos(), angles.sin())
    assert out.dtype == dtype
    assert torch.equal(out, exact.to(dtype))


def test_rope_depends_on_the_distance_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)
    frequencies = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)

    def score(i: int, j: int) -> Tensor:
        a, b = i * frequencies[None, None], j * frequencies[None, None]
        return (rope(q, q, a.cos(), a.sin())[0] * rope(k, k, b.cos(), b.sin())[0]).sum()

    torch.testing.assert_close(score(7, 3), score(104, 100), rtol=1e-12, atol=1e-12)
    assert (score(7, 3) - score(7, 4)).abs() > 1e-3


def test_swiglu() -> None:
    gate, up = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(swiglu(gate, up), gate / (1 + (-gate).exp()) * up)


def exact_losses(hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, z_loss: float) -> Tensor:
    """Row by row, as the formula says it."""
    losses = []
    for h, t in zip(hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1).tolist(), strict=True):
        z = (weight @ h).exp().sum()
        losses.append(0 * z if t == ignore else -((weight[t] @ h).exp() / z).log() + z_loss * z.log() ** 2)
    return torch.stack(losses).view(targets.shape)


def loss_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(0, 11, (2, 5))
    targets[0, 1] = targets[1, 4] = -100
    return torch.randn(2, 5, 6, dtype=dtype), torch.randn(11, 6, dtype=dtype), targets


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear_cross_entropy(reduction: str, z_loss: float) -> None:
    hidden, weight, targets = loss_inputs()
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    losses = exact_losses(hidden, weight, targets, -100, z_loss)
    expected = {"mean": losses.sum() / 8, "sum": losses.sum(), "none": losses}[reduction]
    got = linear_cross_entropy(hidden, weight, targets, reduction=reduction, z_loss=z_loss)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    upstream = torch.randn_like(got)
    gradients = torch.autograd.grad(got, (hidden, weight), upstream)
    for a, b in zip(gradients, torch.autograd.grad(expected, (hidden, weight), upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_linear_cross_entropy_gradient_by_finite_differences() -> None:
    hidden, weight, targets = loss_inputs()
    targets[1] = 3

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, targets, z_loss=0.1)

    assert torch.autograd.gradcheck(loss, (hidden.requires_grad_(), weight.requires_grad_()))


def test_linear_cross_entropy_ignore_index() -> None:
    hidden, weight, targets = loss_inputs()
    zeros = linear_cross_entropy(hidden, weight, targets, reduction="none", z_loss=0.2) == 0
    assert torch.equal(zeros, targets == -100)
    other = torch.where(targets == -100, 7, targets.clamp(max=6))
    as_seven = linear_cross_entropy(hidden, weight, other, ignore_index=7)
    assert as_seven == linear_cross_entropy(hidden, weight, torch.where(other == 7, -100, other))
    same = linear_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten())
    assert same == linear_cross_entropy(hidden, weight, targets)
    one = linear_cross_entropy(hidden[0, 0], weight, targets[0, 0])  # no batch at all
    assert one == linear_cross_entropy(hidden[:1, :1], weight, targets[:1, :1])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", [0, 4])
def test_everything_ignored_is_zero_with_zero_gradients(reduction: str, rows: int) -> None:
    hidden, weight = torch.randn(rows, 6, requires_grad=True), torch.randn(11, 6, requires_grad=True)
    targets = torch.full((rows,), -100)
    loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction, z_loss=0.1).sum()
    assert loss.item() == 0
    loss.backward()
    for x in (hidden, weight):
        assert x.grad is not None
        assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_linear_cross_entropy_is_float32(dtype: torch.dtype) -> None:
    hidden, weight, targets = loss_inputs(dtype)
    loss = linear_cross_entropy(hidden, weight, targets)
    assert loss.dtype == torch.float32
    exact = exact_losses(hidden.double(), weight.double(), targets, -100, 0.0).sum() / 8
    # logits of size up to 8 rounded to dtype; the mean of 8 such errors stays below one of them
    assert (loss - exact).abs() < 8 * torch.finfo(dtype).eps


def test_linear_cross_entropy_of_huge_logits() -> None:
    hidden, weight = torch.tensor([[1e4, 0.0]]), torch.eye(2)
    assert linear_cross_entropy(hidden, weight, torch.tensor([1])) == 1e4
    assert linear_cross_entropy(hidden, weight, torch.tensor([0])) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reduction": "average"}, "reduction is 'average'; it must be 'mean', 'sum' or 'none'"),
        ({"targets": torch.zeros(2, 4, dtype=torch.int64)}, r"targets \(2, 4\) do not fit"),
        ({"weight": torch.randn(11, 5)}, r"weight \(11, 5\) .* do not fit"),
        ({"targets": torch.zeros(2, 5)}, r"targets are torch.float32; torch.int64"),
        ({"targets": torch.full((2, 5), 11)}, r"outside \[0, 11\): .* largest 11"),
        ({"targets": torch.full((2, 5), -1)}, r"outside \[0, 11\): smallest -1"),
    ],
)
def test_linear_cross_entropy_errors(changes: dict[str, Any], message: str) -> None:
    hidden, weight, targets = loss_inputs(torch.float32)
    arguments = {"hidden": hidden, "weight": weight, "targets": targets, **changes}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**arguments)


def test_linear_cross_entropy_equals_torchs() -> None:
    hidden, weight, targets = loss_inputs(torch.float32)
    expected = F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets), expected, rtol=0, atol=1e-6)


def test_ops_is_a_value() -> None:
    ops = Ops()
    assert ops == Ops()
    assert Ops(swiglu=torch.mul) != ops
    with pytest.raises(AttributeError):
        ops.rope = rope  # type: ignore[misc]
    assert [*inspect.signature(Ops).parameters] == [
        "rms_norm",
        "add_rms_norm",
        "rope",
        "swiglu",
        "linear_cross_entropy",
        "swiglu_linear",
    ]
