"""The optimizer's passes with llama_kernels against torch's: on a GPU, and on a CPU in Triton's interpreter, which is
chosen before Triton is imported, so in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
from torch import nn

from llama_train.config import OptimizerConfig
from llama_train.optimizer import Optimizer


# The matrix is summed by itself, then the rest.
@mock.patch("llama_train.kernel_update._AT_ONCE", 100)
def compare(device: str, dtype: torch.dtype, master: bool) -> None:
    """Three steps of one and of three micro-batches, one of them clipped and one skipped, with kernels and without."""
    config = OptimizerConfig(learning_rate=0.1, betas=(0.8, 0.95), weight_decay=0.5, master_weights=master)
    nets: list[nn.ParameterDict] = []
    optimizers: list[Optimizer] = []
    for kernels in (True, False):
        torch.manual_seed(0)
        net = nn.ParameterDict({"matrix": torch.randn(6, 40), "norm": torch.ones(40), "unused": torch.ones(3)})
        net = net.to(device, dtype)
        nets.append(net)
        optimizers.append(Optimizer(net.named_parameters(), config, kernels))
        assert (optimizers[-1]._kernels is not None) == kernels
    for step, (batches, max_norm, skip) in enumerate([(1, 0.0, 0.0), (3, 0.5, 0.0), (2, 0.0, 1.0), (2, 1e9, 0.0)]):
        found = []
        for net, optimizer in zip(nets, optimizers, strict=True):
            versions = {name: p._version for name, p in net.items()}
            for batch in range(batches):
                x = torch.randn(40, generator=torch.Generator().manual_seed(9 * step + batch)).to(device, dtype)
                ((net["matrix"] * net["norm"]) @ x).square().sum().backward()
                optimizer.collect()
            norm = optimizer.clip(max_norm)
            assert set(optimizer.norms) == {"matrix", "norm"}
            optimizer.step(0.1 / (step + 1), torch.tensor(skip, device=device))
            assert net["matrix"]._version > versions["matrix"]
            assert all(p.grad is None for p in net.values())
            norms = {f"norm of {name}": value for name, value in {"all": norm, **optimizer.norms}.items()}
            found.append({**norms, **dict(net.items()), **optimizer.state_dict()})
        assert float(found[0]["step.matrix"]) == step + (step < 2)
        for name, value in found[1].items():
            # The interpreter cuts 16 bits off where torch rounds: gradients, moments and weights, 2⁻⁸ each.
            loose = {"rtol": 4e-2, "atol": 4e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
            mine = found[0][name].to(value.dtype)  # torch has norms in the gradients' dtype
            torch.testing.assert_close(mine, value, **loose, msg=lambda text, name=name: f"{name}: {text}")
            with torch.no_grad():
                found[0][name].copy_(value)  # the next step begins alike


CASES = [(torch.float32, True), (torch.bfloat16, False), (torch.bfloat16, True)]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "master"), CASES)
def test_on_a_gpu(dtype: torch.dtype, master: bool) -> None:
    compare("cuda", dtype, master)


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_what_no_kernel_serves_is_torchs() -> None:
    parameters = [("a", nn.Parameter(torch.ones(3, dtype=torch.float64)))]
    assert Optimizer(parameters, OptimizerConfig(), kernels=True)._kernels is None


if __name__ == "__main__":
    for case in CASES:
        compare("cpu", *case)
