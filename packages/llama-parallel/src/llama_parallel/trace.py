"""What goes over the wire: every collective of a step, of our code and of FSDP's and the pipeline's.

A TorchDispatchMode sees them as operators: `_c10d_functional` those of collectives.py, `c10d` those of
torch.distributed's own functions. It goes along into the backward pass, whose threads take over the modes of the one
that started it (ATen/ThreadLocalState.h). Nothing is replaced; without a trace nothing is slower.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from . import ring_attention
from .planner.comm_volume import KINDS, gathered, reduced

_DIMS = ("tp", "cp", "dp_shard_cp", "dp_replicate", "pp", "dp_cp", "world")
_OPERATIONS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "allreduce": "all_reduce",
    "_allgather_base": "all_gather",
    "allgather": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "alltoall_base": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
}
"""Operators, without the underscore of those that write into their arguments, by the name of what they do."""


@dataclass(frozen=True)
class Transfer:
    """One collective on this rank."""

    step: int
    dim: str
    """Mesh dimension, or the group's own name if it is none of the mesh's."""
    operation: str
    shape: tuple[int, ...]
    """Of this rank's input; of the first one where several go together."""
    dtype: str
    sent: float
    """Bytes that this rank sends, by the ring algorithms of planner.comm_volume."""
    seconds: float
    """From its start to its end, with nothing beside it; 0 where that was not measured."""

    @property
    def kind(self) -> str:
        """tp, dp, cp, pp, or sums: single numbers, such as loss and norm, and what stages greet each other with."""
        return "sums" if math.prod(self.shape) == 1 else KINDS.get(self.dim, "other")


class CommTrace(TorchDispatchMode):
    """Records every collective that runs inside it.

    >>> with CommTrace(mesh) as trace:  # doctest: +SKIP
    ...     accumulate_gradients(parallel, batches)
    >>> print(trace.table())  # doctest: +SKIP

    Args:
        mesh: of `build_mesh`, for the names of its dimensions.
        timed: wait for each collective before going on. Then its time is its own (and that of waiting for slower
            ranks), but nothing overlaps, so a traced step is slower. Sends and receives are never waited for, since a
            rank that waits to be received from may be waited for itself.
    """

    def __init__(self, mesh: DeviceMesh, timed: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.timed, self.step = timed, 0
        self.transfers: list[Transfer] = []
        self._cuda = mesh.device_type == "cuda"
        self._dims: dict[str, list[str]] = {}
        for dim in _DIMS:  # dimensions of the same ranks have one group
            group = (mesh._get_root_mesh() if dim == "dp_shard_cp" else mesh).get_group(dim)
            self._dims.setdefault(group.group_name, []).append(dim)

    def next_step(self) -> None:
        """What follows belongs to the next step."""
        self.step += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inside: Any = ring_attention.FUNCTIONS.get(func)
        if inside is not None:  # an operator of ours that communicates: the same function, in sight
            with self:
                return inside(*args, **kwargs)
        if func.namespace not in ("c10d", "_c10d_functional"):
            return func(*args, **kwargs)
        operation = _OPERATIONS.get(func.overloadpacket.__name__.removesuffix("_"))
        if operation is None:
            return func(*args, **kwargs)
        # A collective may overwrite its input, so what is known of it is read before.
        inputs, group = _inputs(func.namespace, operation, args), _group(args, kwargs)
        size = group.size()
        if size == 1:
            return func(*args, **kwargs)
        seconds, result = self._run(func, args, kwargs, operation)
        if operation == "all_to_all":
            share, operation = _leaving(func.namespace, args, group)
            sent = share * sum(x.numel() * x.element_size() for x in inputs)
        else:
            sent = sum(_sent(operation, x.numel() * x.element_size(), size) for x in inputs)
        first = inputs[0]
        dims = self._dims.get(group.group_name, [group.group_name])
        # With dp_shard 1, FSDP works on the group of cp: only that sends from each rank to each, or round a ring.
        dim = "dp_shard_cp" if "dp_shard_cp" in dims and operation not in ("all_to_all", "shift") else dims[0]
        dtype = str(first.dtype).removeprefix("torch.")
        self.transfers.append(Transfer(self.step, dim, operation, tuple(first.shape), dtype, sent, seconds))
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, operation: str) -> tuple[float, Any]:
        if not self.timed or operation in ("send", "receive"):
            return 0.0, func(*args, **kwargs)
        self._settle()
        start = time.perf_counter()
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            torch.ops._c10d_functional.wait_tensor(result)
        else:
            work = result[-1] if isinstance(result, list | tuple) else result
            if hasattr(work, "wait"):
                work.wait()
        self._settle()
        return time.perf_counter() - start, result

    def _settle(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def rows(self) -> list[dict[str, Any]]:
        """Alike transfers of a step together: step, kind, dim, operation, shape, dtype, calls, sent, seconds."""
        sums: dict[tuple[Any, ...], list[float]] = {}
        for t in self.transfers:
            entry = sums.setdefault((t.step, t.kind, t.dim, t.operation, t.shape, t.dtype), [0, 0.0, 0.0])
            for place, value in enumerate((1, t.sent, t.seconds)):
                entry[place] += value
        names = ("step", "kind", "dim", "operation", "shape", "dtype", "calls", "sent", "seconds")
        return [dict(zip(names, (*key, *entry), strict=True)) for key, entry in sums.items()]

    def sums(self, step: int | None = None) -> dict[str, tuple[int, float, float]]:
        """Of each kind: collectives, bytes sent by this rank, seconds; of one step, or of all."""
        found: dict[str, tuple[int, float, float]] = {}
        for t in self.transfers:
            if step is None or t.step == step:
                calls, sent, seconds = found.get(t.kind, (0, 0.0, 0.0))
                found[t.kind] = calls + 1, sent + t.sent, seconds + t.seconds
        return found

    def table(self, step: int | None = None) -> str:
        """The rows of one step, or of all, and their sums by kind, as text."""
        head = ("kind", "group", "operation", "input", "dtype", "calls", "MB sent", "ms")
        lines = [
            (
                row["kind"], row["dim"], row["operation"], "×".join(map(str, row["shape"])) or "scalar", row["dtype"],
                str(int(row["calls"])), f"{row['sent'] / 1e6:.3f}", f"{row['seconds'] * 1e3:.2f}",
            )
            for row in self.rows()
            if step is None or row["step"] == step
        ]  # fmt: skip
        for kind, (calls, sent, seconds) in sorted(self.sums(step).items()):
            lines.append((kind, "", "all", "", "", str(calls), f"{sent / 1e6:.3f}", f"{seconds * 1e3:.2f}"))
        return "\n".join(_aligned([head, *lines], numbers=3))


def _aligned(rows: list[tuple[str, ...]], numbers: int) -> Iterable[str]:
    """Columns of equal width, the last `numbers` flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = len(widths) - numbers
    for row in rows:
        cells = (cell.ljust(w) if i < text else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        yield "  ".join(cells).rstrip()


def _inputs(namespace: str, operation: str, args: Any) -> list[Tensor]:
    """Tensors that this rank brings along."""
    # c10d's operators of two tensors have the output first
    place = 1 if namespace == "c10d" and operation in ("all_gather", "reduce_scatter", "all_to_all") else 0
    value = args[place]
    while isinstance(value, list | tuple) and not isinstance(value[0], Tensor):
        value = value[0]
    return list(value) if isinstance(value, list | tuple) else [value]


def _group(args: Any, kwargs: Any) -> dist.ProcessGroup:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value)
            except RuntimeError:  # a ReduceOp
                continue
    name: Any = next(value for value in reversed(args) if isinstance(value, str))
    return torch._C._distributed_c10d._resolve_process_group(name)


def _leaving(namespace: str, args: Any, group: dist.ProcessGroup) -> tuple[float, str]:
    """Which part of an all-to-all's input is for others, and its name: "shift" where it all is for one other."""
    places = [value for value in args if isinstance(value, list | tuple) and value and isinstance(value[0], int)]
    if not places:
        return gathered(1.0, group.size()), "all_to_all"
    to = places[1]  # how it leaves; the first says how it arrives
    leaving = [part for rank, part in enumerate(to) if rank != group.rank()]
    return sum(leaving) / sum(to), "shift" if sum(map(bool, to)) == 1 and sum(leaving) else "all_to_all"


def _sent(operation: str, size: float, ranks: int) -> float:
    if operation == "all_gather":
        return gathered(size * ranks, ranks)
    if operation == "reduce_scatter":
        return gathered(size, ranks)
    if operation == "all_reduce":
        return reduced(size, ranks)
    return 0.0 if operation == "receive" else size
