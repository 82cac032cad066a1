"""Row-parallel products against plain ones, and that communication hides behind arithmetic."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from llama_core import Llama, LlamaConfig
from llama_parallel import ParallelConfig, ParallelPlan, build_mesh, parallelize
from llama_parallel.collectives import Axis
from llama_parallel.deferred_products import DeferredProducts
from llama_parallel.parity import Task, differences, train_alone, train_on_ranks
from llama_parallel.row_products import row_product
from llama_parallel.testing import RankError, run_ranks

SHORT = {"all_gather_into_tensor": "gather", "all_to_all_single": "exchange", "wait_tensor": "wait", "mm": "product"}


class Order(TorchDispatchMode):
    """The communication and products that ran, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = SHORT.get(func.name().split("::")[1].split(".")[0])
        if name is not None:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def stretch(x: Tensor, size: int, rank: int) -> Tensor:
    """A rank's part of all tokens of (B, S, …), laid end to end."""
    return x.flatten(0, 1).chunk(size)[rank].unflatten(0, (len(x), -1))


def example(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """x (B, S, F of all ranks), weight (E, the same), the gradient of their product."""
    generator = torch.Generator().manual_seed(size)
    shapes = (3, 2 * size, 5 * size), (7, 5 * size), (3, 2 * size, 7)
    x, weight, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x, weight, grad


def on_rank(rank: int, size: int, deferring: bool) -> tuple[Any, ...]:
    x, weight, grad = example(size)
    axis = Axis.of(build_mesh(ParallelConfig(tp=size)), "tp")
    x, weight = (t.chunk(size, -1)[rank].clone().requires_grad_() for t in (x, weight))
    deferred = DeferredProducts() if deferring else None
    with Order() as forward:
        out = row_product(x, weight, axis, deferred)
    with Order() as backward:
        out.backward(stretch(grad, size, rank))
        if deferred is not None:
            assert weight.grad is None
            deferred.take()()
    return out.detach(), x.grad, weight.grad, forward.names, backward.names


@pytest.mark.parametrize("deferring", [False, True], ids=["at once", "deferred"])
@pytest.mark.parametrize("size", [2, 3])
def test_equals_plain_products(size: int, deferring: bool) -> None:
    x, weight, grad = example(size)
    x.requires_grad_()
    weight.requires_grad_()
    wanted = x @ weight.mT
    wanted.backward(grad)
    assert x.grad is not None
    assert weight.grad is not None
    for rank, (out, of_x, of_weight, forward, backward) in enumerate(run_ranks(on_rank, size, size, deferring)):
        torch.testing.assert_close(out, stretch(wanted.detach(), size, rank))
        torch.testing.assert_close(of_x, x.grad.chunk(size, -1)[rank])
        torch.testing.assert_close(of_weight, weight.grad.chunk(size, -1)[rank])
        others = ["product"] * (2 if 0 < rank < size - 1 else 1)  # the tokens before its own, and those after
        assert forward == [*others, "exchange", "product", "wait"]
        assert backward == ["gather", "product", "wait", *others, "product"]


def test_a_frozen_weight_costs_no_product() -> None:
    def work(rank: int) -> list[str]:
        x, weight, _ = example(2)
        axis = Axis.of(build_mesh(ParallelConfig(tp=2)), "tp")
        x, weight = (t.chunk(2, -1)[rank].clone() for t in (x, weight))
        with Order() as order:
            row_product(x.requires_grad_(), weight, axis).sum().backward()
        return order.names

    for names in run_ranks(work, 2):
        assert names.count("product") == 4


def test_a_length_that_does_not_divide_is_refused() -> None:
    def work(rank: int) -> None:
        axis = Axis.of(build_mesh(ParallelConfig(tp=2)), "tp")
        row_product(torch.ones(2, 3, 4), torch.ones(5, 4), axis)

    with pytest.raises(RankError, match=r"ValueError: dimension 1 of \(2, 3, 4\) does not divide over 2 ranks"):
        run_ranks(work, 2)


SHAPE = LlamaConfig(
    vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2, attention_bias=True,
    mlp_bias=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "plan"),
    [
        (ParallelConfig(tp=4), ParallelPlan(overlap_tp=True)),
        (ParallelConfig(tp=2, dp_shard=2), ParallelPlan(overlap_tp=True, activation_checkpointing="full")),
        (ParallelConfig(tp=2, pp=2), ParallelPlan(overlap_tp=True, schedule="zero_bubble")),
    ],
    ids=["tp4", "tp2 dp_shard2", "tp2 pp2"],
)
def test_training_equals_one_process(layout: ParallelConfig, plan: ParallelPlan) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, SHAPE.vocab_size, (2, 8, 9), generator=generator)
    task = Task(SHAPE, tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous(), accumulation=4)
    wanted = train_alone(task)
    for record in run_ranks(train_on_ranks, 4, task, layout, plan):
        # as in test_parallel.py: sums are taken in another order, by which results differ by about 1e-14
        assert max(differences(record, wanted).values()) < 1e-10


def test_what_sees_no_halves_of_products_is_refused() -> None:
    def work(rank: int) -> None:
        with torch.device("meta"):
            model = Llama(SHAPE)
        plan = ParallelPlan(overlap_tp=True, activation_checkpointing="selective")
        parallelize(model, build_mesh(ParallelConfig(tp=2)), plan)

    with pytest.raises(RankError, match="ValueError: overlap_tp goes neither with compile nor with selective"):
        run_ranks(work, 2)
