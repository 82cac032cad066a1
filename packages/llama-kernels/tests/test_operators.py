"""Operators that inference calls without the dispatcher."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from llama_kernels.operators import operator


@operator("llama_kernels_test::doubled")
def doubled(x: torch.Tensor) -> torch.Tensor:
    calls.append(torch.is_inference_mode_enabled())
    return 2 * x


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, grad: 2 * grad)
calls: list[bool] = []


def test_both_ways_say_the_same():
    x = torch.randn(3, requires_grad=True)
    doubled(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    with torch.inference_mode():
        assert torch.equal(doubled(x.detach()), 2 * x)
    assert calls[-1]


def test_tracing_sees_the_operator():
    compiled = torch.compile(lambda x: doubled(x) + 1, backend="aot_eager", fullgraph=True)
    x = torch.randn(3)
    with torch.inference_mode():
        assert torch.equal(compiled(x), 2 * x + 1)
        with FakeTensorMode() as mode:
            before = len(calls)
            assert doubled(mode.from_tensor(x)).shape == (3,)
            assert len(calls) == before  # a fake tensor goes to the fake function
