"""How heads are shared out and what is sent; values are tested in test_context_parallel."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from llama_core import Llama, LlamaConfig, causal_attend
from llama_parallel import ParallelConfig, ParallelPlan, build_mesh, parallelize
from llama_parallel.collectives import Axis
from llama_parallel.testing import RankError, run_ranks
from llama_parallel.ulysses import UlyssesAttend, kv_windows, take_heads


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "windows"),
    [
        (8, 8, 4, ((0, 2, 4, 6), 2)),
        (8, 4, 4, ((0, 1, 2, 3), 1)),
        (8, 2, 4, ((0, 0, 1, 1), 1)),  # fewer than ranks: each is sent the one it reads
        (8, 1, 8, ((0,) * 8, 1)),
        (6, 3, 2, ((0, 1), 2)),  # heads 0, 0, 1 | 1, 2, 2
        (6, 2, 3, ((0, 0, 0), 2)),  # heads 0, 0 | 0, 1 | 1, 1: the middle one needs two
        (12, 4, 3, ((0, 1, 2), 2)),
    ],
)
def test_each_rank_gets_the_heads_that_its_queries_read(
    heads: int, kv_heads: int, size: int, windows: tuple[tuple[int, ...], int]
) -> None:
    starts, width = kv_windows(heads, kv_heads, size)
    assert (starts, width) == windows
    own, group = heads // size, heads // kv_heads
    needs = [{head // group for head in range(rank * own, (rank + 1) * own)} for rank in range(size)]
    assert all(need <= set(range(start, start + width)) for need, start in zip(needs, starts, strict=True))
    assert width == max(map(len, needs))


def test_taken_heads_and_their_gradient() -> None:
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    assert take_heads(x, (0, 2), 2) is x
    taken = take_heads(x, (0, 1, 1, 2), 2)
    assert torch.equal(taken, x[:, :, [0, 1, 1, 2, 1, 2, 2, 3]])
    assert torch.autograd.gradcheck(lambda x: take_heads(x, (0, 1, 1, 2), 2), x)
    many = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    take_heads(many, (0,) * 513, 1).backward(torch.ones(1, 1, 513, 1, dtype=torch.bfloat16))
    assert many.grad is not None
    assert float(many.grad) == 512.0  # 513 in eight bits; a sum in bfloat16 would stop at 256, as 256 + 1 = 256


class Sent(TorchDispatchMode):
    """Elements of each all-to-all."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "all_to_all" in func.name():
            self.elements.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_transfers() -> None:
    rows, length, heads, kv_heads, width, size = 2, 3, 8, 2, 4, 4

    def work(rank: int) -> tuple[list[int], list[int]]:
        attend = UlyssesAttend(Axis.of(build_mesh(ParallelConfig(cp=size)), "cp"), causal_attend)
        shapes = ((rows, length, h, width) for h in (heads, kv_heads, kv_heads))
        q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
        with Sent() as forward:
            out = attend(0, q, k, v)
        with Sent() as backward:
            out.sum().backward()
        return forward.elements, backward.elements

    token = rows * length * width
    for forward, backward in run_ranks(work, size):
        assert forward == [token * (heads + 2 * size * 1), token * heads]  # one key head for each rank
        assert backward == forward[::-1]


@pytest.mark.parametrize(("mode", "repeated"), [("none", 0), ("selective", 0), ("full", 2)])
def test_activation_checkpointing_repeats_transfers_only_if_full(mode: str, repeated: int) -> None:
    shape = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip

    def work(rank: int) -> tuple[int, int]:
        plan = ParallelPlan(context="ulysses", activation_checkpointing=mode)
        parallel = parallelize(Llama(shape), build_mesh(ParallelConfig(cp=2)), plan)
        with Sent() as forward:
            hidden = parallel.forward(torch.arange(8).view(1, 8))
        with Sent() as backward:
            hidden.sum().backward()
        return len(forward.elements), len(backward.elements)

    assert run_ranks(work, 2) == [(2 * 2, 2 * (2 + repeated))] * 2


def test_heads_that_do_not_divide_are_refused() -> None:
    def work(rank: int) -> Tensor:
        q = torch.randn(1, 4, 3, 8)
        return UlyssesAttend(Axis.of(build_mesh(ParallelConfig(cp=2)), "cp"), causal_attend)(0, q, q, q)

    with pytest.raises(RankError, match="3 attention heads do not divide over cp 2"):
        run_ranks(work, 2)
