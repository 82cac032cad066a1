"""fp8_matmul against float64 products of the rounded factors, and of the exact ones."""

import importlib

import pytest
import torch

from llama_kernels import fp8_matmul, fp8_matmuls, round_fp8


def rounded(x, dtype, largest):
    scale = x.detach().double().abs().max() / largest
    return (x.detach().float() / scale.float()).to(dtype).double() * scale


def relative(a, b):
    return float((a.detach().double() - b).norm() / b.norm())


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(5, 16, 32), (33, 48, 80), (16, 128, 64)])
def test_values_and_gradients(rows, outputs, inputs, device):
    x = torch.randn(rows, inputs, device=device).bfloat16().requires_grad_()
    weight = torch.randn(outputs, inputs, device=device).bfloat16().requires_grad_()
    dy = torch.randn(rows, outputs, device=device).bfloat16()
    y = fp8_matmul(x, weight)
    y.backward(dy)
    qx, qw = rounded(x, torch.float8_e4m3fn, 448), rounded(weight, torch.float8_e4m3fn, 448)
    qdy = rounded(dy, torch.float8_e5m2, 57344)
    # Against products of the same rounded factors: bfloat16 results, the short accumulator forward, and a few values
    # that fall on the other side of a rounding boundary because the scale was formed in float32.
    for actual, same, exact, bound in [
        (y, qx @ qw.T, x.detach().double() @ weight.detach().double().T, 2**-4),
        (x.grad, qdy @ qw, dy.double() @ weight.detach().double(), 2**-3),
        (weight.grad, qdy.T @ qx, dy.double().T @ x.detach().double(), 2**-3),
    ]:
        assert actual.dtype == torch.bfloat16
        assert relative(actual, same) < 1e-2
        assert relative(actual, exact) < bound


def test_scale_follows_the_tensor(device):
    # Magnitudes far outside e4m3's own range (2⁻⁹ … 448) are fine: only the spread within a tensor costs.
    x, weight = torch.randn(4, 32, device=device).bfloat16(), torch.randn(16, 32, device=device).bfloat16()
    base = fp8_matmul(x, weight)
    assert relative(fp8_matmul(x * 2**20, weight * 2**-30) * 2.0**10, base.double()) < 1e-2
    assert fp8_matmul(torch.zeros_like(x), weight).abs().max() == 0


def test_35_padded_tail_is_zero(device):
    # 35: rows are padded to 16 for the product over rows; what lies there must be zeros, not what memory held.
    cast = importlib.import_module("llama_kernels.fp8_matmul")._cast
    junk = torch.full((64, 64), 255, dtype=torch.uint8, device=device)  # 255 is NaN in e4m3
    del junk
    _, transposed, _ = cast([torch.randn(5, 32, device=device).bfloat16()], False, True, False)
    assert transposed.shape == (32, 16)
    assert transposed[:, 5:].float().abs().max() == 0
    assert transposed[:, :5].float().abs().min(1).values.isfinite().all()


def test_nan_is_not_hidden(device):
    x = torch.randn(4, 32, device=device).bfloat16()
    x[1, 3] = float("nan")
    y = fp8_matmul(x, torch.randn(16, 32, device=device).bfloat16())
    assert y[1].isnan().all()


def test_strided_expanded_and_empty(device):
    wide = torch.randn(2, 3, 64, device=device).bfloat16()
    weight = torch.randn(16, 32, device=device).bfloat16().requires_grad_()
    x = wide[..., ::2].clone().requires_grad_()
    assert torch.equal(fp8_matmul(wide[..., ::2], weight), fp8_matmul(x, weight))
    fp8_matmul(x, weight).sum().backward()  # 20: a stride-0 gradient
    first = weight.grad.clone()
    weight.grad = None
    fp8_matmul(x, weight).backward(torch.ones(2, 3, 16, device=device).bfloat16())
    assert torch.equal(first, weight.grad)
    weight.grad = None
    fp8_matmul(wide[:0, :, :32], weight).sum().backward()  # 27: zero rows
    assert weight.grad.abs().max() == 0


def test_several_weights_of_one_input(device):
    x = torch.randn(2, 9, 32, device=device).bfloat16().requires_grad_()
    weights = [(torch.randn(n, 32, device=device) * n).bfloat16().requires_grad_() for n in (16, 48, 32)]
    dys = [(torch.randn(2, 9, len(w), device=device) / len(w)).bfloat16() for w in weights]
    ys = fp8_matmuls(x, weights)
    assert [y.shape for y in ys] == [dy.shape for dy in dys]
    torch.autograd.backward(ys, dys)
    # One product of the joined matrices, rounded with one scale each: the definition of what is shared.
    joined, rows = torch.cat([w.detach() for w in weights]), torch.cat(dys, -1).flatten(0, 1)
    qx, qw = (rounded(t, torch.float8_e4m3fn, 448) for t in (x.detach().flatten(0, 1), joined))
    qdy = rounded(rows, torch.float8_e5m2, 57344)
    grads = torch.cat([w.grad for w in weights])
    for actual, same, exact, bound in [
        (torch.cat(ys, -1).flatten(0, 1), qx @ qw.T, x.detach().double().flatten(0, 1) @ joined.double().T, 2**-4),
        (x.grad.flatten(0, 1), qdy @ qw, rows.double() @ joined.double(), 2**-3),
        (grads, qdy.T @ qx, rows.double().T @ x.detach().double().flatten(0, 1), 2**-3),
    ]:
        assert relative(actual, same) < 1e-2
        assert relative(actual, exact) < bound


def test_rounded_beforehand_is_the_same(device):
    x = torch.randn(7, 32, device=device).bfloat16().requires_grad_()
    weights = [torch.randn(16, 32, device=device).bfloat16().requires_grad_() for _ in range(2)]
    results = []
    for beforehand in (None, round_fp8(weights)):
        ys = fp8_matmuls(x, weights, beforehand)
        results.append((*ys, *torch.autograd.grad([y.float().square().sum() for y in ys], [x, *weights])))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_frozen_weights_and_inputs(device):
    x = torch.randn(7, 32, device=device).bfloat16()
    weights = [torch.randn(16, 32, device=device).bfloat16().requires_grad_() for _ in range(2)]
    weights[0].requires_grad_(False)
    y, z = fp8_matmuls(x, weights)
    (y.float().sum() + z.float().sum()).backward()
    assert weights[0].grad is None
    assert weights[1].grad.shape == (16, 32)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(fp8_matmuls(x, weights), (y, z), strict=True))


def test_errors():
    with pytest.raises(ValueError, match="divisible by 16"):
        fp8_matmul(torch.randn(2, 24), torch.randn(16, 24))
    with pytest.raises(ValueError, match="must be"):
        fp8_matmul(torch.randn(2, 16), torch.randn(16, 32))
    with pytest.raises(ValueError, match="of one K"):
        fp8_matmuls(torch.randn(2, 16), [torch.randn(16, 16), torch.randn(16, 32)])


# Dynamo of torch 2.11 looks at .grad of tensors that are no leaves
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_25_compiles_whole(device):
    x = torch.randn(5, 32, device=device).bfloat16().requires_grad_()
    weight = torch.randn(16, 32, device=device).bfloat16().requires_grad_()
    compiled = torch.compile(fp8_matmul, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(f(x, weight).float().square().sum(), (x, weight)) for f in (fp8_matmul, compiled)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
