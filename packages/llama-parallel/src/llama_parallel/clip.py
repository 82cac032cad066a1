"""The norm of a gradient that lies in pieces on all ranks, clipping by it, and which piece is not finite."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from .mesh import world_group
from .tied_embedding import counted_elsewhere as _tied_elsewhere

K = TypeVar("K")


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    mesh: DeviceMesh,
    *,
    counted_elsewhere: Collection[str] = (),
    norms: MutableMapping[str, Tensor] | None = None,
) -> Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`; a collective call of every rank.

    Each rank adds the squares of its own pieces, a parameter that several ranks hold alike (over tp, or over
    data-parallel replicas) being counted by one of them, and one all-reduce of one number does the rest. Torch's own
    function refuses parameters on different meshes, and knows of no pipeline stages.

    Args:
        model: with gradients; a parameter under two names (a tied head) is one.
        max_norm: infinity only measures.
        mesh: of `build_mesh`.
        counted_elsewhere: names of parameters here that another pipeline stage has too and counts, besides a tied head.
        norms: gets the norm of each gradient, of this rank's piece before clipping, where this rank counts it: which
            one is not finite can be looked up later, when the gradients are gone.

    Returns:
        The norm before clipping, a scalar, the same on every rank.

    Raises:
        ValueError: `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm = {max_norm}: must be above 0")
    counted_elsewhere = {*counted_elsewhere, *_tied_elsewhere(model)}
    named = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
    coordinate = [mesh.get_local_rank(name) for name in ("dp_replicate", "dp_shard", "cp", "tp")]
    counted = {
        name: _local(p.grad)
        for name, p in named
        if p.grad is not None and name not in counted_elsewhere and _counts_here(p.grad, coordinate)
    }
    square, own_norms = _squares(counted, _device(mesh))
    if norms is not None:
        norms.clear()
        norms.update(own_norms)
    dist.all_reduce(square, group=world_group(mesh))
    norm = square.sqrt()
    if max_norm < float("inf"):
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch.nn.utils.clip_grad_norm_'s formula
        gradients = [_local(p.grad) for _, p in named if p.grad is not None]
        for dtype in {gradient.dtype for gradient in gradients}:
            torch._foreach_mul_([g for g in gradients if g.dtype == dtype], scale.to(dtype))
    return norm


def sum_of_squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Of all elements of all tensors: a float64 scalar on every rank, whatever the rank holds, so that ranks can add.

    Within a tensor squares are added in float32, or in float64 where one tensor is float64.
    """
    return _squares(dict(enumerate(tensors)), device)[0]


def _squares(tensors: Mapping[K, Tensor], device: torch.device) -> tuple[Tensor, dict[K, Tensor]]:
    """The sum of all squares, and each tensor's norm."""
    tensors = {key: t for key, t in tensors.items() if t.numel()}  # an uneven shard may be empty
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device), {}
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors.values()) else torch.float32
    norms = torch._foreach_norm(list(tensors.values()), 2, dtype=wide)  # one kernel for many tensors
    return torch.stack(norms).double().square().sum(), dict(zip(tensors, norms, strict=True))


def nonfinite_gradients(model: nn.Module, mesh: DeviceMesh, *, limit: int = 8) -> list[str]:
    """Which gradients hold NaN or infinity, and on which ranks; a collective call, for when the norm is not finite.

    Args:
        limit: names at most from each rank: one NaN early in backward is soon in all that follow.

    Returns:
        Lines such as "rank 3: model.layers.0.mlp.up_proj.weight has 2 of 4096 elements not finite", the same on every
        rank; none if all is finite.
    """
    lines: list[str] = []
    for name, p in model.named_parameters():
        if p.grad is not None and len(lines) < limit:
            local = _local(p.grad)
            wrong = local.numel() - int(torch.isfinite(local).sum())
            if wrong:
                lines.append(f"rank {dist.get_rank()}: {name} has {wrong} of {local.numel()} elements not finite")
    group = world_group(mesh)
    of_ranks: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(of_ranks, lines, group=group)
    return [line for lines in of_ranks for line in lines]


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _counts_here(grad: Tensor | None, coordinate: list[int]) -> bool:
    """Whether this rank is the one of all holders of this piece that counts it."""
    if not isinstance(grad, DTensor):
        return not any(coordinate)  # a plain tensor is alike on all ranks of a stage
    own = grad.device_mesh.get_coordinate()
    assert own is not None
    first = all(place == 0 for place, kind in zip(own, grad.placements, strict=True) if isinstance(kind, Replicate))
    return first and _outside_is_first(grad.device_mesh, coordinate)


def _outside_is_first(mesh: DeviceMesh, coordinate: list[int]) -> bool:
    """A DTensor on part of the mesh is alike along the dimensions that its own mesh lacks."""
    dp_replicate, dp_shard, cp, tp = coordinate
    has = set(mesh.mesh_dim_names or ())
    return (
        ("dp_replicate" in has or dp_replicate == 0)
        and (bool(has & {"dp_shard_cp"}) or (dp_shard == 0 and cp == 0))
        and ("tp" in has or tp == 0)
    )


def _device(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
