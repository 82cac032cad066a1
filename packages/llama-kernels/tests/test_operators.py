"""Operators that eager code calls without the dispatcher."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from llama_kernels.operators import operator


@operator("llama_kernels_test::doubled")
def doubled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return factor * x


@doubled.register_fake
def _(x, factor):
    return torch.empty_like(x)


doubled.register_autograd(
    lambda ctx, grad: (doubled(grad, ctx.factor), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


@operator("llama_kernels_test::without_gradient")
def without_gradient(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_every_way_says_the_same_without_the_dispatcher(mode):
    with mode(), Seen() as seen:
        assert torch.equal(doubled(torch.arange(3.0), 2.0), torch.tensor([0.0, 2.0, 4.0]))
    assert "aten::mul.Tensor" in seen.names
    assert not any("doubled" in name for name in seen.names)


def test_gradients_are_those_of_the_operator():
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    weight = torch.nn.Parameter(x.detach().clone())
    for call in (doubled, torch.ops.llama_kernels_test.doubled.default):
        for leaf in (x, weight):
            leaf.grad = None
            call(leaf, 2.0).square().sum().backward()
            torch.testing.assert_close(leaf.grad, 8 * leaf.detach())
    assert torch.autograd.gradcheck(lambda y: doubled(y, 3.0), (x,))


def test_tracing_sees_the_operator():
    compiled = torch.compile(lambda x: doubled(x, 2.0) + 1, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, requires_grad=True)
    compiled(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    with torch.inference_mode():
        assert torch.equal(compiled(x), 2 * x + 1)
    plain = x.detach()
    with FakeTensorMode() as mode, Seen() as seen, torch.no_grad():
        assert doubled(mode.from_tensor(plain), 2.0).shape == (3,)
    assert seen.names == ["llama_kernels_test::doubled"]


def test_where_there_is_no_gradient_the_operator_says_so():
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="autograd"):
        without_gradient(x).sum().backward()
