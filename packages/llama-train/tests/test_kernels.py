"""The seam between packages that do not import each other: llama_kernels' operations fit where llama_core's stand."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
import torch

import llama_core
import llama_kernels
from llama_train.build import choose_ops

NAMES = [field.name for field in fields(llama_core.Ops)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_same_fields_and_parameters(device: str) -> None:
    plain, fast = llama_core.Ops(), llama_kernels.ops(torch.device(device))
    assert [field.name for field in fields(fast)] == NAMES
    assert plain.swiglu_linear is None  # the default is two operations
    assert (fast.swiglu_linear is None) == (device == "cpu")
    for name in NAMES:
        if getattr(plain, name) is None:
            continue
        wanted = inspect.signature(getattr(plain, name)).parameters
        given = inspect.signature(getattr(fast, name)).parameters
        assert list(given)[: len(wanted)] == list(wanted), name
        for key, parameter in wanted.items():
            assert (given[key].kind, given[key].default) == (parameter.kind, parameter.default), (name, key)
        assert all(parameter.default is not parameter.empty for parameter in list(given.values())[len(wanted) :])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
def test_the_loss_as_training_calls_it(device: str, reduction: str, z_loss: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 7, 64, generator=generator)
    weight = torch.randn(300, 64, generator=generator) * 0.1
    targets = torch.randint(0, 300, (2, 7), generator=generator)
    targets[:, ::3] = -100
    results = []
    for ops in (llama_core.Ops(), llama_kernels.ops(torch.device(device))):
        h, w = (x.to(device).requires_grad_() for x in (hidden, weight))
        loss = ops.linear_cross_entropy(h, w, targets.to(device), reduction=reduction, z_loss=z_loss)
        results.append((loss.detach(), *torch.autograd.grad(loss, (h, w))))
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-4)  # sums of 8 rows of about 6 in float32


@pytest.mark.gpu
def test_a_gpu_gets_the_fast_operations() -> None:
    assert type(choose_ops("auto", torch.device("cuda"))) is llama_kernels.Ops
