"""Every collective of the forward and backward pass, by name: plain local tensors in, plain local tensors out.

| function              | forward         | backward        | where                                             |
|-----------------------|-----------------|-----------------|---------------------------------------------------|
| `all_gather`          | all-gather      | reduce-scatter  | into column-parallel products, sequence-parallel  |
| `reduce_scatter`      | reduce-scatter  | all-gather      | out of row-parallel products, sequence-parallel   |
| `all_reduce_gradient` | nothing         | all-reduce      | parameters used on shards of the sequence         |
| `all_reduce`          | all-reduce      | nothing         | out of row-parallel products otherwise            |
| `split`               | own part        | all-gather      | a tensor that all hold, into shards               |
| `gather`              | all-gather      | own part        | shards, into a tensor that all hold               |
| `all_to_all`          | all-to-all      | all-to-all      | from shards of one dimension to those of another  |
| `start_shift`         | send, receive   | by its user     | keys and values round the ring                    |
| `start_exchange`      | all-to-all      | by its user     | out of row-parallel products, while they are made |

They are torch's functional collectives (torch.ops._c10d_functional): the same on gloo and NCCL, traced by torch.compile
as they are, and started without waiting, so that a caller may compute until `finish`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_ops = torch.ops._c10d_functional

TOKENS = None
"""In place of a dimension, for (B, S, …) shared by its tokens: laid end to end, row after row, they are cut into one
stretch for each rank, (B, S / size, …) in form only. What knows no neighbours (norms, products, losses) need not care,
and whole and parts are the same memory in the same order: nothing is copied beside what is sent."""


@dataclass(frozen=True)
class Axis:
    """One dimension of the mesh as this rank sees it. Plain values, so that torch.compile needs to know no group."""

    group: str
    """Name under which torch.distributed knows the process group."""
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh, dim: str) -> Axis:
        """The dimension `dim` of `mesh`."""
        group = mesh.get_group(dim)
        return cls(group.group_name, group.size(), mesh.get_local_rank(dim))


# --- started, not waited for -----------------------------------------------------------------------------------------


def start_all_gather(x: Tensor, axis: Axis) -> Tensor:
    """(n, …) → (size · n, …) in rank order, once `finish`ed."""
    return _ops.all_gather_into_tensor(x.contiguous(), axis.size, axis.group)  # type: ignore[no-any-return]


def start_reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """(size · n, …) → (n, …), this rank's part of the sum, once `finish`ed."""
    return _ops.reduce_scatter_tensor(x.contiguous(), "sum", axis.size, axis.group)  # type: ignore[no-any-return]


def start_all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks, once `finish`ed."""
    return _ops.all_reduce(x.contiguous(), "sum", axis.group)  # type: ignore[no-any-return]


def start_shift(x: Tensor, axis: Axis) -> Tensor:
    """x of the rank before this one, from the last one round to the first, once `finish`ed.

    An all-to-all in which each rank has something for one other only: no rank waits for its turn to send or receive.
    """
    source, target = [0] * axis.size, [0] * axis.size
    source[axis.rank - 1], target[(axis.rank + 1) % axis.size] = len(x), len(x)
    return _ops.all_to_all_single(x.contiguous(), source, target, axis.group)  # type: ignore[no-any-return]


def start_exchange(x: Tensor, axis: Axis) -> Tensor:
    """Equal parts for every other rank, in rank order → those that they have for this one, once `finish`ed."""
    sizes = [len(x) // (axis.size - 1)] * axis.size
    sizes[axis.rank] = 0
    return _ops.all_to_all_single(x.contiguous(), sizes, sizes, axis.group)  # type: ignore[no-any-return]


def finish(x: Tensor) -> Tensor:
    """Wait for what a `start_…` returned (on a GPU: have its stream wait) and return it."""
    return _ops.wait_tensor(x)  # type: ignore[no-any-return]


def parts_first(x: Tensor, axis: Axis, dim: int | None) -> Tensor:
    """Cut `dim` into `size` parts and put them one after the other along dimension 0, as the collectives want them."""
    if dim is TOKENS:
        return x.reshape(axis.size * x.shape[0], x.shape[1] // axis.size, *x.shape[2:])
    return x if dim == 0 else x.unflatten(dim, (axis.size, -1)).movedim(dim, 0).flatten(0, 1)


def parts_along(x: Tensor, axis: Axis, dim: int | None) -> Tensor:
    """The inverse of `parts_first`."""
    if dim is TOKENS:
        return x.view(x.shape[0] // axis.size, axis.size * x.shape[1], *x.shape[2:])
    return x if dim == 0 else x.unflatten(0, (axis.size, -1)).movedim(0, dim).flatten(dim, dim + 1)


# --- with their gradients --------------------------------------------------------------------------------------------


def all_gather(x: Tensor, axis: Axis, dim: int | None) -> Tensor:
    """Shards along `dim`, or of all tokens (`TOKENS`) → the whole; gradients are summed, and ranks get their shards."""
    return x if axis.size == 1 else _AllGather.apply(x, axis, _positive(x, dim))


def reduce_scatter(x: Tensor, axis: Axis, dim: int | None) -> Tensor:
    """Sum over ranks, of which each gets its part along `dim`, or its stretch of tokens; gradients are gathered.

    Raises:
        ValueError: a dimension that does not divide over the ranks.
    """
    if axis.size == 1:
        return x
    _check_divides(x, axis, dim)
    return _ReduceScatter.apply(x, axis, _positive(x, dim))  # type: ignore[no-any-return]


def all_reduce_gradient(x: Tensor, axis: Axis) -> Tensor:
    """x itself; gradients are summed over ranks, in float32 at least.

    For what all ranks hold alike but use on different tokens or for different heads.
    """
    return x if axis.size == 1 else _AllReduceGradient.apply(x, axis)


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum over ranks; all use the sum alike, so its gradient is everybody's."""
    return x if axis.size == 1 else _AllReduce.apply(x, axis)


def split(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's part along `dim` of what all hold alike; gradients are gathered. ValueError if it does not divide."""
    if axis.size == 1:
        return x
    _check_divides(x, axis, dim)
    return _Split.apply(x, axis, _positive(x, dim))  # type: ignore[no-any-return]


def gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Shards along `dim` → the whole, which all use alike; each keeps its part of the gradient."""
    return x if axis.size == 1 else _Gather.apply(x, axis, _positive(x, dim))


def all_to_all(x: Tensor, axis: Axis, split_dim: int, join_dim: int) -> Tensor:
    """Shards along `join_dim` → the whole of it, cut along `split_dim` instead; gradients go the way back.

    Raises:
        ValueError: `split_dim` does not divide over the ranks.
    """
    if axis.size == 1:
        return x
    _check_divides(x, axis, split_dim)
    return _AllToAll.apply(x, axis, split_dim % x.dim(), join_dim % x.dim())  # type: ignore[no-any-return]


def _positive(x: Tensor, dim: int | None) -> int | None:
    return None if dim is None else dim % x.dim()


def _check_divides(x: Tensor, axis: Axis, dim: int | None) -> None:
    dim = 1 if dim is TOKENS else dim
    if x.shape[dim] % axis.size:
        raise ValueError(f"dimension {dim} of {tuple(x.shape)} does not divide over {axis.size} ranks")


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int | None) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return parts_along(finish(start_all_gather(x, axis)), axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return finish(start_reduce_scatter(parts_first(grad, ctx.axis, ctx.dim), ctx.axis)), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int | None) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return finish(start_reduce_scatter(parts_first(x, axis, dim), axis))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return parts_along(finish(start_all_gather(grad, ctx.axis)), ctx.axis, ctx.dim), None, None


class _AllReduceGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        return finish(start_all_reduce(wide, ctx.axis)).to(grad.dtype), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return finish(start_all_reduce(x, axis))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return x.chunk(axis.size, dim)[axis.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return parts_along(finish(start_all_gather(grad, ctx.axis)), ctx.axis, ctx.dim), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return parts_along(finish(start_all_gather(x, axis)), axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.chunk(ctx.axis.size, ctx.dim)[ctx.axis.rank].contiguous(), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, split_dim: int, join_dim: int) -> Tensor:
        ctx.axis, ctx.dims = axis, (split_dim, join_dim)
        return _exchange(x, axis, split_dim, join_dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        split_dim, join_dim = ctx.dims
        return _exchange(grad, ctx.axis, join_dim, split_dim), None, None, None


def _exchange(x: Tensor, axis: Axis, split_dim: int, join_dim: int) -> Tensor:
    parts = x.unflatten(split_dim, (axis.size, -1)).movedim(split_dim, 0).contiguous()  # part r goes to rank r
    ones = [1] * axis.size
    received: Tensor = finish(_ops.all_to_all_single(parts, ones, ones, axis.group))
    return received.movedim(0, join_dim).flatten(join_dim, join_dim + 1)
