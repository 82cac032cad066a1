"""Each collective against plain arithmetic on the whole tensor, values and gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from llama_parallel import ParallelConfig, build_mesh
from llama_parallel import collectives as c
from llama_parallel.collectives import Axis
from llama_parallel.testing import RankError, run_ranks

SIZE = 4
Run = tuple[Tensor, Tensor]  # output, gradient of the input


def run(rank: int, function: Callable[[Tensor, Axis], Tensor], inputs: list[Tensor], grads: list[Tensor]) -> Run:
    axis = Axis.of(build_mesh(ParallelConfig(tp=SIZE)), "tp")
    assert (axis.rank, axis.size) == (rank, SIZE)
    x = inputs[rank].clone().requires_grad_()
    out = function(x, axis)
    out.backward(grads[rank])
    assert x.grad is not None
    return out.detach(), x.grad


def on_ranks(function: Callable[[Tensor, Axis], Tensor], inputs: list[Tensor], grads: list[Tensor]) -> list[Run]:
    results: list[Run] = run_ranks(run, SIZE, function, inputs, grads)
    return results


def draw(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(SIZE)]


def summed(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather(dim: int) -> None:
    shards = draw(3, 2, 5)
    whole = torch.cat(shards, dim)
    grads = draw(*whole.shape)
    for rank, (out, grad) in enumerate(on_ranks(lambda x, a: c.all_gather(x, a, dim), shards, grads)):
        torch.testing.assert_close(out, whole, rtol=0, atol=0)
        torch.testing.assert_close(grad, summed(grads).chunk(SIZE, dim)[rank])


def test_tokens_are_shared_row_after_row_without_a_copy() -> None:
    """Of 3 rows with 8 tokens, rank 1 of 4 has the last two of the first row and the first four of the second."""
    whole = draw(3, 8, 5)[0]
    shards = [part.unflatten(0, (3, 2)) for part in whole.flatten(0, 1).chunk(SIZE)]
    torch.testing.assert_close(shards[1].flatten(0, 1), torch.cat((whole[0, 6:], whole[1, :4])), rtol=0, atol=0)
    grads, partial = draw(3, 8, 5), draw(3, 8, 5)
    for rank, (out, grad) in enumerate(on_ranks(lambda x, a: c.all_gather(x, a, c.TOKENS), shards, grads)):
        torch.testing.assert_close(out, whole, rtol=0, atol=0)
        torch.testing.assert_close(grad.flatten(0, 1), summed(grads).flatten(0, 1).chunk(SIZE)[rank])
    for rank, (out, grad) in enumerate(on_ranks(lambda x, a: c.reduce_scatter(x, a, c.TOKENS), partial, shards)):
        torch.testing.assert_close(out.flatten(0, 1), summed(partial).flatten(0, 1).chunk(SIZE)[rank])
        torch.testing.assert_close(grad, whole, rtol=0, atol=0)
    axis = Axis("", SIZE, 0)
    parts = c.parts_first(whole, axis, c.TOKENS)
    assert parts.data_ptr() == whole.data_ptr() == c.parts_along(parts, axis, c.TOKENS).data_ptr()


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_reduce_scatter(dim: int) -> None:
    partial = draw(4, 8, 12)
    grads = [g.contiguous() for g in draw(*summed(partial).chunk(SIZE, dim)[0].shape)]
    for rank, (out, grad) in enumerate(on_ranks(lambda x, a: c.reduce_scatter(x, a, dim), partial, grads)):
        torch.testing.assert_close(out, summed(partial).chunk(SIZE, dim)[rank])
        torch.testing.assert_close(grad, torch.cat(grads, dim), rtol=0, atol=0)


def test_all_reduce_gradient() -> None:
    same, grads = [draw(3, 5)[0]] * SIZE, draw(3, 5)
    for out, grad in on_ranks(c.all_reduce_gradient, same, grads):
        torch.testing.assert_close(out, same[0], rtol=0, atol=0)
        torch.testing.assert_close(grad, summed(grads))


def test_all_reduce() -> None:
    partial, grads = draw(3, 5), [draw(3, 5)[0]] * SIZE
    for out, grad in on_ranks(c.all_reduce, partial, grads):
        torch.testing.assert_close(out, summed(partial))
        torch.testing.assert_close(grad, grads[0], rtol=0, atol=0)


@pytest.mark.parametrize("dim", [0, 1])
def test_split(dim: int) -> None:
    whole, grads = [draw(4, 8)[0]] * SIZE, draw(*((1, 8) if dim == 0 else (4, 2)))
    for rank, (out, grad) in enumerate(on_ranks(lambda x, a: c.split(x, a, dim), whole, grads)):
        torch.testing.assert_close(out, whole[0].chunk(SIZE, dim)[rank], rtol=0, atol=0)
        torch.testing.assert_close(grad, torch.cat(grads, dim), rtol=0, atol=0)


@pytest.mark.parametrize("dim", [0, 1])
def test_gather(dim: int) -> None:
    shards = draw(2, 3)
    grads = [draw(8, 3)[0] if dim == 0 else draw(2, 12)[0]] * SIZE
    for rank, (out, grad) in enumerate(on_ranks(lambda x, a: c.gather(x, a, dim), shards, grads)):
        torch.testing.assert_close(out, torch.cat(shards, dim), rtol=0, atol=0)
        torch.testing.assert_close(grad, grads[0].chunk(SIZE, dim)[rank], rtol=0, atol=0)


@pytest.mark.parametrize(("split_dim", "join_dim"), [(2, 1), (1, 2), (0, 1), (1, 0), (-1, 0)])
def test_all_to_all(split_dim: int, join_dim: int) -> None:
    # Sequence shards to head shards, as Ulysses does it: rank r gets part r of everybody's shard.
    shards = draw(4, 8, 12)
    whole = torch.cat(shards, join_dim)
    grads = [g.contiguous() for g in draw(*whole.chunk(SIZE, split_dim)[0].shape)]
    whole_grad = torch.cat(grads, split_dim)
    outs = on_ranks(lambda x, a: c.all_to_all(x, a, split_dim, join_dim), shards, grads)
    for rank, (out, grad) in enumerate(outs):
        torch.testing.assert_close(out, whole.chunk(SIZE, split_dim)[rank], rtol=0, atol=0)
        torch.testing.assert_close(grad, whole_grad.chunk(SIZE, join_dim)[rank], rtol=0, atol=0)


def test_alone_nothing_is_sent() -> None:
    axis, x = Axis("no such group", 1, 0), torch.randn(3, 4)
    for out in (
        c.all_gather(x, axis, 0), c.reduce_scatter(x, axis, 0), c.all_reduce(x, axis), c.all_reduce_gradient(x, axis),
        c.split(x, axis, 1), c.gather(x, axis, 1), c.all_to_all(x, axis, 0, 1),
    ):  # fmt: skip
        assert out is x


def test_uneven_dimension_is_refused() -> None:
    with pytest.raises(RankError, match=r"ValueError: dimension 0 of \(6, 5\) does not divide over 4 ranks"):
        on_ranks(lambda x, a: c.reduce_scatter(x, a, 0), draw(6, 5), draw(6, 5))


def test_half_precision_gradients_are_summed_in_float32() -> None:
    # 256 + 1 + 1 + 1 in bfloat16, one after the other, stays 256.
    grads = [torch.full((1,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0)]
    for _, grad in on_ranks(c.all_reduce_gradient, [torch.zeros(1, dtype=torch.bfloat16)] * SIZE, grads):
        assert grad.item() == 260.0  # 259 rounded to 8 bits
