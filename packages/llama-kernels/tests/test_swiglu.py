"""swiglu against float64; numbers after # are rows of the project's table of known bugs."""

import importlib

import pytest
import torch

from llama_kernels import reference, swiglu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 123), (2, 3, 63), (4097,), (1, 1)])
def test_values_and_gradients(shape, dtype, device, near):
    gate, up = (torch.randn(shape, device=device).mul(3).to(dtype).requires_grad_() for _ in range(2))
    dy = torch.randn(shape, device=device).to(dtype)
    y = swiglu(gate, up)
    y.backward(dy)
    gate64, up64 = (t.detach().double().cpu().requires_grad_() for t in (gate, up))
    y64 = reference.swiglu(gate64, up64)
    y64.backward(dy.double().cpu())
    assert y.dtype == dtype
    for actual, expected in [(y, y64), (gate.grad, gate64.grad), (up.grad, up64.grad)]:
        near(actual, expected)


# exp(1e4) = inf on the way to sigmoid = 0 is meant; numpy, under the interpreter, warns of it
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_large_gates_are_finite(device):
    gate = torch.tensor([[-1e4, -200.0, 200.0, 1e4]], device=device, requires_grad=True)
    up = torch.ones_like(gate, requires_grad=True)
    y = swiglu(gate, up)
    y.sum().backward()
    assert y.tolist() == [[0.0, 0.0, 200.0, 1e4]]
    assert gate.grad.tolist() == [[0.0, 0.0, 1.0, 1.0]]


def test_slices_of_one_packed_projection(device):
    packed = torch.randn(3, 5, 126, device=device)
    gate, up = packed.chunk(2, dim=-1)
    assert torch.equal(swiglu(gate, up), swiglu(gate.contiguous(), up.contiguous()))
    assert torch.equal(swiglu(gate[..., ::3], up[..., ::3]), swiglu(gate, up)[..., ::3])


@pytest.mark.parametrize("kind", ["stride 0", "every second column", "expanded rows", "transposed"])
def test_20_gradient_strides(kind, device):
    gate, up = torch.randn(2, 4, 64, device=device)
    grad = {
        "stride 0": torch.randn((), device=device).expand(4, 64),
        "every second column": torch.randn(4, 128, device=device)[:, ::2],
        "expanded rows": torch.randn(64, device=device).expand(4, 64),
        "transposed": torch.randn(64, 4, device=device).T,
    }[kind]
    results = []
    for g in (grad, grad.clone(memory_format=torch.contiguous_format)):
        a, b = gate.clone().requires_grad_(), up.clone().requires_grad_()
        swiglu(a, b).backward(g)
        results.append((a.grad, b.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_16_saved_inputs_survive(device):
    gate, up = (torch.randn(4, 64, device=device, requires_grad=True) for _ in range(2))
    y = swiglu(gate, up)
    first = torch.autograd.grad(y.sum(), (gate, up), retain_graph=True)
    second = torch.autograd.grad(y.sum(), (gate, up))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_more_rows_than_a_grid_has(device, monkeypatch):
    # The grid's second dimension ends at 65,535: strided rows go in slabs. A small limit shows it in the interpreter.
    monkeypatch.setattr(importlib.import_module("llama_kernels.swiglu"), "MAX_ROWS", 3)
    gate, up = torch.randn(8, 32, device=device).chunk(2, dim=1)
    assert torch.equal(swiglu(gate, up), swiglu(gate.contiguous(), up.contiguous()))


def test_27_zero_rows(device):
    gate = torch.randn(0, 64, device=device, requires_grad=True)
    swiglu(gate, gate).sum().backward()
    assert gate.grad.shape == (0, 64)


def test_errors():
    with pytest.raises(ValueError, match="must be alike"):
        swiglu(torch.randn(2, 3), torch.randn(2, 4))


# torch itself reads .grad of a non-leaf there
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_25_opcheck(device):
    gate, up = (torch.randn(3, 64, device=device, requires_grad=True) for _ in range(2))
    torch.library.opcheck(torch.ops.llama_kernels.swiglu.default, (gate, up))


@pytest.mark.gpu
def test_11_beyond_2_to_31_elements():
    gate = torch.randn(2**31 // 8192 + 3, 8192, dtype=torch.bfloat16, device="cuda")
    y = swiglu(gate, gate)
    assert torch.equal(y[-2:], swiglu(gate[-2:].clone(), gate[-2:].clone()))
    strided = swiglu(gate[:, :4096], gate[:, 4096:])
    assert torch.equal(strided[-2:], swiglu(gate[-2:, :4096].clone(), gate[-2:, 4096:].clone()))
