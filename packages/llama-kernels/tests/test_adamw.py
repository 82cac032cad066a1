"""AdamW's kernel against torch.optim.AdamW, norms and sums against float64."""

import pytest
import torch

from llama_kernels.adamw import adamw_, add_float32, norms

SETTINGS = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def run(shape, steps, device, rates=(1e-2, 3e-3, 1e-3)):
    """Weights after `steps` of torch's AdamW and of the kernel, in float32."""
    expected = torch.nn.Parameter(torch.randn(shape, device=device))
    oracle = torch.optim.AdamW([expected], **SETTINGS)
    weight, mean, square = (
        expected.detach().clone(),
        torch.zeros(shape, device=device),
        torch.zeros(shape, device=device),
    )
    for step in range(steps):
        grad, rate = torch.randn(shape, device=device) * 10.0 ** (step - 1), rates[step % 3]
        expected.grad = grad.clone()
        oracle.param_groups[0]["lr"] = rate
        oracle.step()
        adamw_(weight, grad, mean, square, corrections(step + 1, device), learning_rate=rate, **SETTINGS)
    return weight, expected.detach(), mean, square, oracle.state[expected]


def corrections(step, device):
    return tuple(torch.tensor(1 - beta**step, dtype=torch.float32, device=device) for beta in SETTINGS["betas"])


@pytest.mark.parametrize("shape", [(3,), (33, 65), (1024,), (2, 1025)])
def test_equals_torchs(shape, device):
    weight, expected, mean, square, state = run(shape, 3, device)
    torch.testing.assert_close(weight, expected, rtol=2e-6, atol=2e-7)
    torch.testing.assert_close(mean, state["exp_avg"], rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(square, state["exp_avg_sq"], rtol=2e-6, atol=1e-6)


def test_bfloat16_is_rounded_once(device):
    shape = (5, 300)
    tensors = [torch.randn(shape, device=device).bfloat16() for _ in range(3)]
    square = torch.rand(shape, device=device).bfloat16()
    exact = [x.float() for x in (*tensors, square)]
    adamw_(*tensors, square, corrections(2, device), learning_rate=1e-2, **SETTINGS)
    adamw_(*exact, corrections(2, device), learning_rate=1e-2, **SETTINGS)
    for actual, wide in zip((*tensors, square), exact, strict=True):
        # Rounding to nearest is half a unit, 2⁻⁹ of the value; the interpreter cuts off instead, a whole one.
        torch.testing.assert_close(actual.float(), wide, rtol=2**-7, atol=0)


def test_master_weights_scale_and_a_16_bit_gradient(device):
    shape = (7, 90)
    weight, mean, square = torch.randn(shape, device=device), *torch.zeros(2, *shape, device=device)
    grad = torch.randn(shape, device=device).bfloat16()
    other = [x.clone() for x in (weight, mean, square)]
    rounded = torch.full(shape, float("nan"), device=device).bfloat16()
    common = {"learning_rate": 1e-2, **SETTINGS}
    adamw_(weight, grad, mean, square, corrections(1, device), scale=torch.tensor(0.25, device=device), rounded=rounded,
           **common)  # fmt: skip
    adamw_(other[0], 0.25 * grad.float(), *other[1:], corrections(1, device), **common)
    for a, b in zip((weight, mean, square), other, strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(rounded.float(), weight, rtol=2**-7, atol=0)


def test_skipped_leaves_everything(device):
    tensors = [torch.randn(9, 70, device=device).abs() for _ in range(4)]
    before = [x.clone() for x in tensors]
    rounded = torch.zeros(9, 70, device=device)
    tensors[1].fill_(float("nan"))
    adamw_(*tensors, corrections(1, device), learning_rate=1.0, skip=torch.ones((), device=device), rounded=rounded,
           **SETTINGS)  # fmt: skip
    for index in (0, 2, 3):
        assert torch.equal(tensors[index], before[index])
    assert rounded.abs().max() == 0
    adamw_(tensors[0], before[1], *tensors[2:], corrections(1, device), learning_rate=1.0,
           skip=torch.zeros((), device=device), **SETTINGS)  # fmt: skip
    assert not torch.equal(tensors[0], before[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(dtype, device):
    tensors = [torch.randn(n, device=device).mul(n).to(dtype) for n in (1, 0, 4096, 50_001)]
    found = norms(tensors)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), torch.stack([x.double().norm() for x in tensors]), rtol=1e-6, atol=0)
    assert norms([torch.tensor([1.0, float("nan")], device=device)]).isnan().all()


def test_sums_in_float32(device):
    a, b = (torch.full((2, 700), x, device=device).bfloat16() for x in (256.0, 1.0))
    total = add_float32(a, b)
    assert total.dtype == torch.float32
    assert add_float32(total, b) is total
    assert total.min() == total.max() == 258.0  # in bfloat16, 256 + 1 is 256


def test_errors(device):
    x = torch.zeros(4, 2, device=device)
    with pytest.raises(ValueError, match="must be alike"):
        adamw_(x, x[:2], x, x, corrections(1, device), learning_rate=1.0, **SETTINGS)
    with pytest.raises(ValueError, match="contiguous"):
        adamw_(x, x.mT.contiguous().mT, x, x, corrections(1, device), learning_rate=1.0, **SETTINGS)
    with pytest.raises(ValueError, match="float64"):
        adamw_(*[x.double()] * 4, corrections(1, device), learning_rate=1.0, **SETTINGS)
    with pytest.raises(ValueError, match="needs Triton"):
        norms([])
    with pytest.raises(ValueError, match="must be alike"):
        add_float32(x, x[:1])
