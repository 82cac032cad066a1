"""What the links and the launching processes give, without any model: the two things a slow layout may be made of."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from multigpu_jobs import Rank
from multigpu_train import synchronize

import llama_kernels


@dataclass(frozen=True)
class Linked:
    """Of one operation, on the slowest rank."""

    name: str
    nbytes: int
    """Received by each rank; 0 where nothing is sent."""
    seconds: float
    """From one to the next, many in a row."""
    launched: float
    """Of the process, until the call returned."""


def links(rank: Rank, sizes: tuple[int, ...], times: int) -> None:
    """Say how long collectives of so many received bytes take, and what launching costs."""
    device, n = rank.device, rank.size
    x = torch.ones(1, 64, dtype=torch.bfloat16, device=device)
    weight = torch.ones(64, dtype=torch.bfloat16, device=device)
    calls: list[tuple[str, int, Callable[[], object]]] = [("addition of 64 numbers", 0, lambda: x + x)]
    calls.append(("llama_kernels.rms_norm of 64 numbers", 0, lambda: llama_kernels.rms_norm(x, weight, 1e-5)))
    for size in sizes if n > 1 else ():
        part = torch.ones(size // (2 * (n - 1)), dtype=torch.bfloat16, device=device)
        whole = torch.ones(part.numel() * n, dtype=torch.bfloat16, device=device)
        calls += [
            ("all-gather", size, lambda part=part, whole=whole: dist.all_gather_into_tensor(whole, part)),
            ("reduce-scatter", size, lambda part=part, whole=whole: dist.reduce_scatter_tensor(part, whole)),
            ("all-reduce", 2 * size, lambda whole=whole: dist.all_reduce(whole)),
            ("all-to-all", size, lambda whole=whole: dist.all_to_all_single(torch.empty_like(whole), whole)),
        ]
    for name, nbytes, call in calls:
        for _ in range(3):
            call()
        dist.barrier()
        synchronize(device)
        begun = time.perf_counter()
        for _ in range(times):
            call()
        launched = time.perf_counter() - begun
        synchronize(device)
        both = torch.tensor([time.perf_counter() - begun, launched], dtype=torch.float64, device=device) / times
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        if rank.number == 0:
            rank.say(Linked(name, nbytes, *both.tolist()))
