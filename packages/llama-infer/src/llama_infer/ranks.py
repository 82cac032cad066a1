"""The processes that run one model together, as torchrun starts them.

Rank 0 has the requests, the scheduler and the sampler; the others compute what it tells them (`tensor_parallel.py`).
So arrivals, cancels, clocks, seeds and grammars concern one process only. A scheduler on every rank would need all of
these to be the same everywhere, to the step, and gain nothing: what rank 0 sends is a few hundred bytes.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llama_parallel import ParallelConfig, build_mesh, read_process
from llama_parallel.collectives import Axis

FIRST_BYTES = 8192
"""Of a message, sent at once with its length: enough for most steps."""
FOREVER = timedelta(days=365)
"""A server may wait for its next request as long as it likes. A process that died is noticed by torchrun, which ends
all, and by its closed connection."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that share a model."""

    axis: Axis
    """For the tensors."""
    words: dist.ProcessGroup
    """For messages between the hosts, by gloo."""
    device: torch.device
    owned: bool = True
    """Whether the processes met here, so that they part here too."""

    @property
    def is_first(self) -> bool:
        return self.axis.rank == 0

    def tell(self, message: Any) -> None:
        """From rank 0 to all others, which must `hear`."""
        data = pickle.dumps(message, protocol=5)
        first = torch.zeros(8 + FIRST_BYTES, dtype=torch.uint8)
        first[:8] = torch.tensor([len(data)]).view(torch.uint8)
        whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        first[8 : 8 + len(whole)] = whole[:FIRST_BYTES]
        dist.broadcast(first, 0, group=self.words)
        if len(whole) > FIRST_BYTES:
            dist.broadcast(whole[FIRST_BYTES:].clone(), 0, group=self.words)

    def hear(self) -> Any:
        """The next message of rank 0, whenever it comes."""
        first = torch.empty(8 + FIRST_BYTES, dtype=torch.uint8)
        dist.broadcast(first, 0, group=self.words)
        length = int(first[:8].view(torch.int64))
        whole = first[8 : 8 + length]
        if length > FIRST_BYTES:
            rest = torch.empty(length - FIRST_BYTES, dtype=torch.uint8)
            dist.broadcast(rest, 0, group=self.words)
            whole = torch.cat((whole, rest))
        return pickle.loads(whole.numpy().tobytes())

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        each = torch.tensor([number])
        dist.all_reduce(each, dist.ReduceOp.MIN, group=self.words)
        return int(each)

    def leave(self) -> None:
        """Part, once nothing more is to be said."""
        if self.owned and dist.is_initialized():
            dist.destroy_process_group()

    def from_first(self, tensor: Tensor) -> None:
        """Overwrite a tensor on the device with rank 0's, in place."""
        dist.broadcast(tensor, 0)


def join_ranks(size: int, device: str | torch.device, held: bool = False) -> Ranks:
    """Meet the other processes that torchrun has started.

    Args:
        size: how many are to share the model.
        device: "auto", "cpu" or "cuda": on a GPU each process takes the one of its number on the host.
        held: whether it is a model that the user holds.

    Raises:
        ValueError: another number of processes, a device for all of them, or a model that is whole already.
    """
    if held:
        raise ValueError("tensor_parallel_size shares a model as it is loaded; give its path, not a Llama")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"tensor_parallel_size must be a whole number of at least 1, got {size!r}")
    process = read_process(os.environ)
    # In a program that has met already (tests, one's own launcher), torchrun's variables don't matter.
    world = dist.get_world_size() if dist.is_initialized() else process.world_size
    if world != size:
        raise ValueError(
            f"tensor_parallel_size {size} needs {size} processes, here are {world}; "
            f"start them with: torchrun --nproc-per-node {size} …"
        )
    kind = str(device) if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda where ranks share a model, got {str(device)!r}")
    if kind == "cuda":
        if process.local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"rank {process.rank} wants GPU {process.local_rank}; torch sees {torch.cuda.device_count()} of them"
            )
        own = torch.device("cuda", process.local_rank)
        torch.cuda.set_device(own)
    else:
        own = torch.device("cpu")
    owned = not dist.is_initialized()
    if owned:
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    mesh = build_mesh(ParallelConfig(tp=size), kind)
    words = dist.new_group(backend="gloo", timeout=FOREVER)
    assert isinstance(words, dist.ProcessGroup)  # all ranks are in it
    return Ranks(Axis.of(mesh, "tp"), words, own, owned)
