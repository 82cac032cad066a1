from __future__ import annotations

import pytest
import torch
from torch import nn

from llama_train.config import OptimizerConfig
from llama_train.optimizer import Optimizer

CONFIG = OptimizerConfig(learning_rate=0.1, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.5)


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(3, 4, generator=generator, dtype=torch.float64).to(dtype))
        self.norm = nn.Parameter(torch.ones(3, dtype=dtype))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.matrix @ x) * self.norm).square().sum()


def test_adamw_by_hand() -> None:
    """Two steps against the algorithm of the paper (Loshchilov & Hutter 2019, algorithm 2), in float64."""
    net = Net()
    optimizer = Optimizer(net.named_parameters(), CONFIG)
    x = torch.arange(4.0, dtype=torch.float64) / 4
    expected = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    mean = {name: torch.zeros_like(value) for name, value in expected.items()}
    square = {name: torch.zeros_like(value) for name, value in expected.items()}
    for step, rate in ((1, 0.1), (2, 0.05)):
        net.loss(x).backward()
        for name, parameter in net.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            mean[name] = 0.8 * mean[name] + 0.2 * gradient
            square[name] = 0.9 * square[name] + 0.1 * gradient**2
            decay = 0.5 if name == "matrix" else 0.0  # norms are not decayed
            update = (mean[name] / (1 - 0.8**step)) / ((square[name] / (1 - 0.9**step)).sqrt() + 1e-8)
            expected[name] = expected[name] * (1 - rate * decay) - rate * update
        optimizer.step(rate)
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(parameter.detach(), expected[name], rtol=0, atol=1e-12)
            assert parameter.grad is None


def test_clip_scales_the_joint_norm() -> None:
    net = Net()
    optimizer = Optimizer(net.named_parameters(), CONFIG)
    net.loss(torch.ones(4, dtype=torch.float64)).backward()
    before = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    norm = torch.cat([gradient.flatten() for gradient in before]).norm()
    assert float(optimizer.clip(0.0)) == pytest.approx(float(norm))  # 0 clips nothing
    for parameter, gradient in zip(net.parameters(), before, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)
    assert float(optimizer.clip(0.5)) == pytest.approx(float(norm))
    after = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    assert float(after.norm()) == pytest.approx(0.5, abs=1e-6)  # torch adds 1e-6 to the norm it divides by


def test_master_weights_keep_updates_that_bfloat16_would_round_away() -> None:
    def train(master: bool) -> Net:
        net = Net(torch.bfloat16)
        config = OptimizerConfig(weight_decay=0.0, master_weights=master)
        optimizer = Optimizer(net.named_parameters(), config)
        for _ in range(100):
            (net.norm.sum() * 1.0).backward()
            optimizer.collect()
            optimizer.step(1e-4)  # Adam moves each weight by the rate; half of bfloat16's spacing at 1 is 2e-3
        return net

    assert train(False).norm.tolist() == [1.0, 1.0, 1.0]
    torch.testing.assert_close(train(True).norm.float(), torch.full((3,), 0.99), rtol=0, atol=2**-9)


def test_collect_sums_in_float32() -> None:
    net = Net(torch.bfloat16)
    optimizer = Optimizer(net.named_parameters(), OptimizerConfig(weight_decay=0.0))
    for scale in (256.0, 1.0, 1.0):  # in bfloat16, 256 + 1 is 256
        (net.norm.sum() * scale).backward()
        optimizer.collect()
        assert net.norm.grad is None
    assert float(optimizer.clip(0.0)) == pytest.approx(258 * 3**0.5, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_round_trip_continues_bit_for_bit(dtype: torch.dtype) -> None:
    def steps(net: Net, optimizer: Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            net.loss(torch.full((4,), 0.1 * step, dtype=dtype)).backward()
            optimizer.collect()
            optimizer.clip(1.0)
            optimizer.step(0.01)

    net, other = Net(dtype), Net(dtype)
    optimizer, fresh = (Optimizer(model.named_parameters(), OptimizerConfig()) for model in (net, other))
    steps(net, optimizer, 0, 3)
    saved = {name: value.clone() for name, value in optimizer.state_dict().items()}
    assert float(saved["step.matrix"]) == 3
    assert ("master.matrix" in saved) == (dtype == torch.bfloat16)
    assert all(value.dtype == torch.float32 for value in saved.values())
    with torch.no_grad():
        for parameter, value in zip(other.parameters(), net.parameters(), strict=True):
            parameter.copy_(value)
    for name, value in fresh.state_dict().items():
        value.copy_(saved[name])
    steps(net, optimizer, 3, 6)
    steps(other, fresh, 3, 6)
    for left, right in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)


def test_nothing_to_train() -> None:
    with pytest.raises(ValueError, match="no parameter to train"):
        Optimizer([], CONFIG)
