"""rms_norm and add_rms_norm against float64; numbers after # are rows of the project's table of known bugs."""

import pytest
import torch

from llama_kernels import add_rms_norm, reference, rms_norm

SHAPES = [(5, 123), (2, 3, 63), (3, 64), (2, 4097), (7, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def double(*tensors):
    return [t.detach().double().cpu().requires_grad_() for t in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_18_values_and_gradients(shape, dtype, device, near):
    # 18: the weight's gradient is there, not None.
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    weight = torch.randn(shape[-1], device=device).to(dtype).requires_grad_()
    grad = torch.randn(shape, device=device).to(dtype)
    y = rms_norm(x, weight, 1e-5)
    y.backward(grad)
    x64, weight64 = double(x, weight)
    y64 = reference.rms_norm(x64, weight64, 1e-5)
    y64.backward(grad.double().cpu())
    assert y.dtype == dtype
    near(y, y64)
    near(x.grad, x64.grad)
    near(weight.grad, weight64.grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_17_add_values_and_gradients(shape, dtype, device, near):
    # 17: the residual stream's gradient is added to the norm's, not multiplied through it.
    x, residual = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(2))
    weight = torch.randn(shape[-1], device=device).to(dtype).requires_grad_()
    dy, dtotal = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    y, total = add_rms_norm(x, residual, weight, 1e-5)
    torch.autograd.backward((y, total), (dy, dtotal))
    x64, residual64, weight64 = double(x, residual, weight)
    y64, total64 = reference.add_rms_norm(x64, residual64, weight64, 1e-5)
    torch.autograd.backward((y64, total64), (dy.double().cpu(), dtotal.double().cpu()))
    for actual, expected in [(y, y64), (total, total64), (x.grad, x64.grad), (residual.grad, residual64.grad)]:
        near(actual, expected)
    near(weight.grad, weight64.grad)


def test_either_output_alone_has_gradients(device, near):
    x, residual = (torch.randn(3, 64, device=device, requires_grad=True) for _ in range(2))
    weight = torch.randn(64, device=device, requires_grad=True)
    y, total = add_rms_norm(x, residual, weight, 1e-5)
    (dx,) = torch.autograd.grad(total.sum(), x, retain_graph=True)
    assert torch.equal(dx, torch.ones_like(x))
    (dx,) = torch.autograd.grad((y * y).sum(), x)
    total64 = double(total)[0]
    (reference.rms_norm(total64, weight.double().cpu(), 1e-5) ** 2).sum().backward()
    near(dx, total64.grad, slack=4)


@pytest.mark.parametrize(("value", "eps", "tolerance"), [(300.0, 1e-5, 0.0), (60000.0, 1e-5, 0.0), (1e-3, 1e-12, 2e-3)])
def test_b39_half_precision_statistics(value, eps, tolerance, device):
    # Case B39: 300² is beyond float16, (1e-3)² below its normal numbers.
    x = torch.full((2, 64), value, dtype=torch.float16, device=device)
    y = rms_norm(x, torch.ones(64, dtype=torch.float16, device=device), eps)
    assert y.dtype == torch.float16
    assert (y - 1).abs().max() <= max(tolerance, 2**-10)  # one unit in the last place


def test_b39_one_large_entry(device):
    x = torch.ones(1, 64, dtype=torch.bfloat16, device=device)
    x[0, 5] = 256
    y = rms_norm(x, torch.ones(64, dtype=torch.bfloat16, device=device), 1e-5).float()
    assert y[0, 5].item() == pytest.approx(7.9964, rel=2**-7)
    assert y[0, 0].item() == pytest.approx(0.03124, rel=2**-7)


@pytest.mark.parametrize("kind", ["every second column", "stride 0", "transposed", "expanded rows"])
def test_20_gradient_strides(kind, device):
    # B39 (5) and 20: a gradient that is no dense tensor gives exactly what its dense copy gives.
    x, weight = torch.randn(4, 64, device=device), torch.randn(64, device=device)
    grad = {
        "every second column": torch.randn(4, 128, device=device)[:, ::2],
        "stride 0": torch.randn((), device=device).expand(4, 64),
        "transposed": torch.randn(64, 4, device=device).T,
        "expanded rows": torch.randn(64, device=device).expand(4, 64),
    }[kind]
    results = []
    for g in (grad, grad.clone(memory_format=torch.contiguous_format)):
        xr, wr = x.clone().requires_grad_(), weight.clone().requires_grad_()
        rms_norm(xr, wr, 1e-5).backward(g)
        results.append((xr.grad, wr.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_strided_inputs(device):
    wide = torch.randn(4, 3, 128, device=device)
    weight = torch.randn(64, device=device)
    for x in (wide[..., :64], wide[..., ::2], wide.transpose(0, 1)[..., 64:], wide[:1, :, :64].expand(4, -1, -1)):
        assert torch.equal(rms_norm(x, weight, 1e-5), rms_norm(x.contiguous(), weight, 1e-5))
        y, total = add_rms_norm(x, x, weight, 1e-5)
        assert torch.equal(total, 2 * x)
        assert torch.equal(y, rms_norm(2 * x, weight, 1e-5))


def test_15_backward_leaves_the_gradient_and_saved_tensors_alone(device):
    x = torch.randn(4, 64, device=device, requires_grad=True)
    weight = torch.randn(64, device=device, requires_grad=True)
    grad = torch.randn(4, 64, device=device)
    before = grad.clone()
    y = rms_norm(x, weight, 1e-5)
    first = torch.autograd.grad(y, (x, weight), grad, retain_graph=True)
    second = torch.autograd.grad(y, (x, weight), grad)
    assert torch.equal(grad, before)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_19_weight_gradient_is_summed_in_float32(device, near):
    # 2000 equal rows: a bfloat16 sum of 1.0s stops growing at 256.
    x = torch.ones(2000, 4, dtype=torch.bfloat16, device=device)
    weight = torch.ones(4, dtype=torch.bfloat16, device=device, requires_grad=True)
    rms_norm(x, weight, 0.0).backward(torch.ones_like(x))
    near(weight.grad, torch.full((4,), 2000.0))


def test_27_zero_rows(device):
    x = torch.randn(0, 3, 64, device=device, requires_grad=True)
    weight = torch.randn(64, device=device, requires_grad=True)
    y, total = add_rms_norm(x, x, weight, 1e-5)
    (rms_norm(x, weight, 1e-5) + y + total).sum().backward()
    assert x.grad.shape == x.shape
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_wider_weight(device, near):
    # Master weights may be float32 under bfloat16 activations: y keeps x's dtype, dw the weight's.
    x = torch.randn(3, 64, device=device).bfloat16()
    weight = torch.randn(64, device=device, requires_grad=True)
    y = rms_norm(x, weight, 1e-5)
    y.sum().backward()
    assert (y.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
    near(y, reference.rms_norm(x.double(), weight.double(), 1e-5))


def test_float64_takes_the_plain_path(device, near):
    x, weight = torch.randn(3, 64, device=device).double(), torch.randn(64, device=device).double()
    near(rms_norm(x, weight, 1e-5), x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight)


def test_errors():
    with pytest.raises(ValueError, match=r"x \(2, 3\) and weight \(4,\)"):
        rms_norm(torch.randn(2, 3), torch.randn(4), 1e-5)
    with pytest.raises(ValueError, match="must be alike"):
        add_rms_norm(torch.randn(2, 3), torch.randn(3), torch.randn(3), 1e-5)


# torch itself reads .grad of a non-leaf there
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_25_opcheck(device):
    x = torch.randn(3, 64, device=device, requires_grad=True)
    weight = torch.randn(64, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.llama_kernels.rms_norm.default, (x, weight, 1e-5))
    torch.library.opcheck(torch.ops.llama_kernels.add_rms_norm.default, (x, x.detach().clone(), weight, 1e-5))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [4096, 576, 8192, 16384])
def test_real_sizes(width, near):
    x, residual = (torch.randn(515, width, device="cuda").bfloat16().requires_grad_() for _ in range(2))
    weight = torch.randn(width, device="cuda").bfloat16().requires_grad_()
    dy, dtotal = torch.randn(2, 515, width, device="cuda").bfloat16()
    y, total = add_rms_norm(x, residual, weight, 1e-5)
    torch.autograd.backward((y, total), (dy, dtotal))
    x64, weight64 = double(total, weight)  # from the total as stored: its rounding is not under test here
    y64 = reference.rms_norm(x64, weight64, 1e-5)
    torch.autograd.backward((y64, x64), (dy.double().cpu(), dtotal.double().cpu()))
    near(y, y64, slack=0.5)
    near(x.grad, x64.grad, slack=0.5)
    near(weight.grad, weight64.grad, slack=0.5)


@pytest.mark.gpu
def test_12_13_beyond_2_to_31_elements():
    rows = 2**31 // 4096 + 5
    x = torch.ones(rows, 4096, dtype=torch.bfloat16, device="cuda")
    x[-3:] = torch.randn(3, 4096, device="cuda").bfloat16()
    weight = torch.randn(4096, device="cuda").bfloat16().requires_grad_()
    tail = x[-3:].clone().requires_grad_()
    x.requires_grad_()
    y = rms_norm(x, weight, 1e-5)
    y.backward(x.detach())
    expected = rms_norm(tail, weight, 1e-5)
    expected.backward(tail.detach())
    assert torch.equal(y[-3:], expected)
    assert torch.equal(x.grad[-3:], tail.grad)
