"""AdamW's kernel against torch.optim.AdamW, norms and sums against float64."""

import pytest
import torch

from llama_kernels.adamw import adamw_
from llama_kernels.tensor_lists import norms, sum_float32, tabulate

SETTINGS = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


SHAPES = [(3,), (33, 65), (0,), (1024,), (2, 1025), (5000,)]
"""Less than a tile, tiles that end in the middle, none, a whole one, more than a program's stretch."""


def zeros(device):
    return [torch.zeros(shape, device=device) for shape in SHAPES]


def corrections(step, device, tensors=6):
    return tuple(torch.full((tensors,), 1 - beta**step, device=device) for beta in SETTINGS["betas"])


def test_equals_torchs(device):
    expected = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in SHAPES]
    oracle = torch.optim.AdamW(expected, **SETTINGS)
    weights, means, squares = [p.detach().clone() for p in expected], zeros(device), zeros(device)
    for step, rate in enumerate((1e-2, 3e-3, 1e-3)):
        grads = [torch.randn(shape, device=device) * 10.0 ** (step - 1) for shape in SHAPES]
        for parameter, grad in zip(expected, grads, strict=True):
            parameter.grad = grad.clone()
        oracle.param_groups[0]["lr"] = rate
        oracle.step()
        adamw_(weights, grads, means, squares, corrections(step + 1, device), learning_rate=rate, **SETTINGS)
    for i, parameter in enumerate(expected):
        torch.testing.assert_close(weights[i], parameter.detach(), rtol=2e-6, atol=2e-7)
        torch.testing.assert_close(means[i], oracle.state[parameter]["exp_avg"], rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(squares[i], oracle.state[parameter]["exp_avg_sq"], rtol=2e-6, atol=1e-6)


def test_bfloat16_is_rounded_once(device):
    tensors = [torch.randn(5, 300, device=device).bfloat16() for _ in range(3)]
    tensors.append(torch.rand(5, 300, device=device).bfloat16())
    exact = [x.float() for x in tensors]
    for group in (tensors, exact):
        adamw_(*([x] for x in group), corrections(2, device, 1), learning_rate=1e-2, **SETTINGS)
    for actual, wide in zip(tensors, exact, strict=True):
        # Rounding to nearest is half a unit, 2⁻⁹ of the value; the interpreter cuts off instead, a whole one.
        torch.testing.assert_close(actual.float(), wide, rtol=2**-7, atol=0)


def test_master_weights_scale_steps_and_a_16_bit_gradient(device):
    """Two tensors at different steps: each has its own corrections."""
    shapes = [(7, 90), (2000,)]
    c1, c2 = (torch.cat([a, b]) for a, b in zip(corrections(1, device, 1), corrections(5, device, 1), strict=True))
    weights, means = ([torch.randn(shape, device=device) for shape in shapes] for _ in range(2))
    squares = [torch.rand(shape, device=device) for shape in shapes]
    grads = [torch.randn(shape, device=device).bfloat16() for shape in shapes]
    rounded = [torch.full(shape, float("nan"), device=device).bfloat16() for shape in shapes]
    before = [[x.clone() for x in group] for group in (weights, means, squares)]
    adamw_(weights, grads, means, squares, (c1, c2), scale=torch.tensor(0.25, device=device), rounded=rounded,
           learning_rate=1e-2, **SETTINGS)  # fmt: skip
    for i in range(2):
        w, m, v = ([group[i]] for group in before)
        adamw_(w, [0.25 * grads[i].float()], m, v, (c1[i : i + 1], c2[i : i + 1]), learning_rate=1e-2, **SETTINGS)
        assert torch.equal(weights[i], w[0])
        assert torch.equal(means[i], m[0])
        assert torch.equal(squares[i], v[0])
        torch.testing.assert_close(rounded[i].float(), weights[i], rtol=2**-7, atol=0)


def test_skipped_leaves_everything(device):
    lists = [[torch.randn(shape, device=device).abs() for shape in SHAPES] for _ in range(4)]
    before = [[x.clone() for x in group] for group in lists]
    rounded = zeros(device)
    for grad in lists[1]:
        grad.fill_(float("nan"))
    common = {"learning_rate": 1.0, **SETTINGS}
    adamw_(*lists, corrections(1, device), skip=torch.ones((), device=device), rounded=rounded, **common)
    for index in (0, 2, 3):
        assert all(torch.equal(a, b) for a, b in zip(lists[index], before[index], strict=True))
    assert all(x.abs().sum() == 0 for x in rounded)
    adamw_(lists[0], before[1], *lists[2:], corrections(1, device), skip=torch.zeros((), device=device), **common)
    assert not any(torch.equal(a, b) for a, b in zip(lists[0], before[0], strict=True) if a.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(dtype, device):
    tensors = [torch.randn(n, device=device).mul(n).to(dtype) for n in (1, 0, 4096, 0, 50_001, 0)]
    found = norms(tensors)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), torch.stack([x.double().norm() for x in tensors]), rtol=1e-6, atol=0)
    bad = torch.tensor([1.0, float("nan")], device=device)
    assert norms([tensors[0].float(), bad]).isnan().tolist() == [False, True]
    assert norms([tensors[1]]).tolist() == [0.0]


def test_sums_in_float32(device):
    a, b = ([torch.full((n,), x, device=device).bfloat16() for n in (700, 9000, 0)] for x in (256.0, 1.0))
    total = sum_float32(a, b)
    again = sum_float32(total, b)
    for first, second in zip(total, again, strict=True):
        assert second is first
        assert first.dtype == torch.float32
        assert (first == 258.0).all()  # in bfloat16, 256 + 1 is 256


def test_errors(device):
    x = torch.zeros(4, 2, device=device)
    common = {"learning_rate": 1.0, **SETTINGS}
    with pytest.raises(ValueError, match="must be alike"):
        adamw_([x], [x[:2]], [x], [x], corrections(1, device, 1), **common)
    with pytest.raises(ValueError, match="must be alike"):
        norms([x, x.bfloat16()])
    with pytest.raises(ValueError, match="not contiguous"):
        norms([x.mT])
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        norms([x.view(-1)[1:]])
    with pytest.raises(ValueError, match="float64"):
        norms([x.double()])
    with pytest.raises(ValueError, match="moments are"):
        adamw_([x], [x], [x], [x.bfloat16()], corrections(1, device, 1), **common)
    with pytest.raises(ValueError, match="no tensors"):
        tabulate([[]], 1024)
