"""Column-parallel products against plain ones, and that communication hides behind arithmetic."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from llama_parallel import ParallelConfig, build_mesh
from llama_parallel.collectives import Axis
from llama_parallel.column_products import column_products
from llama_parallel.testing import run_ranks

SIZE = 2
SHORT = {
    "_c10d_functional::all_gather_into_tensor": "gather",
    "_c10d_functional::reduce_scatter_tensor": "scatter",
    "_c10d_functional::all_reduce": "reduce",
    "_c10d_functional::wait_tensor": "wait",
    "aten::mm": "product",
    "aten::addmm": "product",
}


class Order(TorchDispatchMode):
    """The communication and products that ran, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = SHORT.get(func.name().split(".")[0])
        if name is not None:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def example(biased: bool) -> tuple[Tensor, list[Tensor], list[Tensor | None], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, rows = draw(3, 4, 8), (6, 2, 2)
    return x, [draw(n, 8) for n in rows], [draw(n) if biased else None for n in rows], [draw(3, 4, n) for n in rows]


def stretch(x: Tensor, size: int, rank: int) -> Tensor:
    """A rank's part of all tokens of (B, S, …), laid end to end."""
    return x.flatten(0, 1).chunk(size)[rank].unflatten(0, (len(x), -1))


def on_rank(rank: int, biased: bool, shared: bool, early: bool) -> tuple[Any, ...]:
    x, weights, biases, grads = example(biased)
    axis = Axis.of(build_mesh(ParallelConfig(tp=SIZE)), "tp")
    x = (stretch(x, SIZE, rank) if shared else x).clone().requires_grad_()
    weights = [w.chunk(SIZE)[rank].clone().requires_grad_() for w in weights]
    biases = [None if b is None else b.chunk(SIZE)[rank].clone().requires_grad_() for b in biases]
    with Order() as forward:
        outs = column_products(x, weights, biases, axis, shared, early=early)
    with Order() as backward:
        torch.autograd.backward(outs, [g.chunk(SIZE, -1)[rank] for g in grads])
    of_biases = [None if b is None else b.grad for b in biases]
    return [o.detach() for o in outs], x.grad, [w.grad for w in weights], of_biases, forward.names, backward.names


@pytest.mark.parametrize(
    ("shared", "early"),
    [(True, False), (True, True), (False, False)],
    ids=["sequence shared", "own part first", "sequence whole"],
)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_equals_plain_products(biased: bool, shared: bool, early: bool) -> None:
    x, weights, biases, grads = example(biased)
    leaves = [x, *weights, *(b for b in biases if b is not None)]
    for leaf in leaves:
        leaf.requires_grad_()
    wanted = [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    torch.autograd.backward(wanted, grads)
    assert x.grad is not None
    results = run_ranks(on_rank, SIZE, biased, shared, early)
    for rank, (outs, of_x, of_weights, of_biases, forward, backward) in enumerate(results):
        for out, right in zip(outs, wanted, strict=True):
            torch.testing.assert_close(out, right.detach().chunk(SIZE, -1)[rank])
        torch.testing.assert_close(of_x, stretch(x.grad, SIZE, rank) if shared else x.grad)
        for found, leaf in zip([*of_weights, *of_biases], [*weights, *biases], strict=True):
            if leaf is not None:
                assert leaf.grad is not None
                torch.testing.assert_close(found, leaf.grad.chunk(SIZE)[rank])
        three = ["product"] * 3
        if shared:
            # one for all three; behind half of the products where own ones come first
            assert forward == (["gather", *three, "wait", *three] if early else ["gather", "wait", *three])
            # x comes while its gradient is computed, which leaves while the weights' are
            assert backward == ["gather", *three, "scatter", "wait", *three, "wait"]
        else:
            assert forward == three
            assert backward == [*three, "reduce", *three, "wait"]


def test_frozen_weights_cost_no_product() -> None:
    def work(rank: int) -> tuple[list[str], bool]:
        x, weights, biases, _ = example(False)
        axis = Axis.of(build_mesh(ParallelConfig(tp=SIZE)), "tp")
        x = stretch(x, SIZE, rank).clone().requires_grad_()
        with Order() as order:
            sum(o.sum() for o in column_products(x, weights, biases, axis, True)).backward()  # type: ignore[union-attr]
        return order.names, x.grad is not None

    for names, has_gradient in run_ranks(work, SIZE):
        assert has_gradient
        assert names.count("product") == 6
