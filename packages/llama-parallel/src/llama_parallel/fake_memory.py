"""Memory of one rank of any layout, on a laptop: the real model and its real step, on tensors without contents.

torch's FakeTensorMode gives every operation shapes and no data, its fake process group collectives that send nothing.
So a rank of a 70B model on 64 GPUs runs on a CPU in a minute, and every byte that its step would hold is counted where
it is allocated and freed. The oracle of `planner.predict_memory`, which is a formula.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import llama_kernels
from llama_core import Llama, Ops
from llama_kernels.swiglu_linear import through_kernels

from .gradients import MicroBatch, accumulate_gradients
from .mesh import build_mesh
from .parallel import Parallel, ParallelPlan, parallelize
from .planner.memory import LOGITS_BYTES
from .planner.work import Work


@dataclass(frozen=True)
class FakeMemory:
    """Bytes at the moment when a step holds most. The work space of products and the allocator's gaps are not in it."""

    weights: int
    gradients: int
    optimizer: int
    rest: int
    """Activations, gathered parameters and their gradients, logits, buffers."""

    @property
    def total(self) -> int:
        """All parts."""
        return self.weights + self.gradients + self.optimizer + self.rest


def memory_at(work: Work, rank: int = 0) -> FakeMemory:
    """Peak memory of `rank` in a step of `work`, after the first step: moments are there, gradients are not.

    Makes the process's default process group, a fake one, and leaves none.

    Args:
        work: model, layout, batch. Precision "master" is no matter of this package and is refused.
        rank: in the world of `work.layout`.

    Raises:
        ValueError: precision "master", or a process group that exists already.
    """
    if work.bytes_of.master:
        raise ValueError(
            f"precision {work.precision!r} keeps copies in the optimizer, which this package does not have"
        )
    with fake_process_group(rank, work.layout.num_processes):
        parallel = _build(work)
        with FakeTensorMode(allow_non_fake_inputs=True):
            parallel.model.to_empty(device="cpu")
            counter = _Counter(parallel.model)
            with counter:
                _step(work, parallel, counter)
        return counter.peak


def _step(work: Work, parallel: Parallel, counter: _Counter) -> None:
    moments = [torch.zeros_like(p) for p in counter.locals() for _ in range(2)]
    counter.optimizer = {id(m.untyped_storage()) for m in moments}
    tokens = torch.zeros(work.micro_batch, work.sequence_length // work.layout.cp, dtype=torch.int64)
    accumulate_gradients(parallel, [MicroBatch(tokens, tokens)] * work.micro_batches)


@contextmanager
def fake_process_group(rank: int, size: int) -> Iterator[None]:
    """A default process group of `size` ranks, of which only this one exists."""
    if dist.is_initialized():
        raise ValueError("this process has a process group already; a fake one needs a process of its own")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _build(work: Work) -> Parallel:
    sizes = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    mixed = work.bytes_of.parameter != work.bytes_of.compute
    plan = ParallelPlan(
        sequence_parallel=work.sequence_parallel,
        activation_checkpointing=work.checkpointing,
        compute_dtype=sizes[work.bytes_of.compute] if mixed else None,
        reshard_after_forward=work.reshard_after_forward,
        context=work.context,
        schedule=work.schedule,
        virtual_stages=work.stages_per_rank,
    )
    with torch.device("meta"):
        model = Llama(work.model, ops=kernel_ops() if work.kernels else Ops(), attend=_attend)
        model = model.to(sizes[work.bytes_of.parameter])
    return parallelize(model, build_mesh(work.layout), plan)


def _attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = llama_kernels.attention(q, k, v, causal=True)
    return out


def kernel_ops() -> Ops:
    """llama_kernels' operators as a GPU has them, of which fake tensors need no more than shapes."""
    ops = torch.ops.llama_kernels
    return Ops(ops.rms_norm, ops.add_rms_norm, _rope, ops.swiglu, _loss, through_kernels)


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    rotated: tuple[Tensor, Tensor] = torch.ops.llama_kernels.rope(q, k, cos, sin, False)
    return rotated


def _loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100, reduction: str = "mean",
    z_loss: float = 0.0,
) -> Tensor:  # fmt: skip
    rows = hidden.reshape(-1, hidden.shape[-1])
    chunk = min(len(rows), max(1, LOGITS_BYTES // (len(weight) * hidden.element_size())))
    inside = hidden.new_empty(chunk, len(weight))  # the logits that the operator holds and nobody sees
    loss: Tensor = torch.ops.llama_kernels.linear_cross_entropy(
        rows, weight, targets.reshape(-1), ignore_index, reduction == "mean", z_loss, True, True, False
    )[0]
    del inside
    return loss


def _local(tensor: Tensor) -> Tensor:
    """The memory itself: a DTensor around it has the size of the whole and holds nothing."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _Counter(TorchDispatchMode):
    """Adds up the memory of all tensors that are alive, after every operation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.optimizer: set[int] = set()
        self.peak = FakeMemory(0, 0, 0, 0)
        self._most = 0
        self._alive: dict[int, weakref.ref[Any]] = {}
        for parameter in self.locals():
            self._see(parameter)
        self.weights = set(self._alive)  # later FSDP puts gathered parameters in their place for a while

    def locals(self) -> list[Tensor]:
        """This rank's parts of the parameters."""
        return [_local(p) for p in self.model.parameters()]

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, partial(self._forget, key))

    def _forget(self, key: int, _: Any) -> None:
        self._alive.pop(key, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0  # a question about contents, such as whether any token is outside the vocabulary: no
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._see(_local(tensor))
        # FSDP frees by resizing a storage to nothing, which is no operation: so each is asked for its size anew.
        total = sum(storage.nbytes() for storage in self._storages())
        if total > self._most:
            self._most, self.peak = total, self._parts(total)
        return result

    def _storages(self) -> list[Any]:
        return [storage for ref in list(self._alive.values()) if (storage := ref()) is not None]

    def _parts(self, total: int) -> FakeMemory:
        sizes = {id(storage): storage.nbytes() for storage in self._storages()}
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        gradients = {id(_local(g).untyped_storage()) for g in grads}
        weights, summed, moments = (
            sum(sizes.get(key, 0) for key in keys) for keys in (self.weights, gradients, self.optimizer)
        )
        return FakeMemory(weights, summed, moments, total - weights - summed - moments)
