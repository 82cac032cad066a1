"""Training steps of one work on all its ranks: their time, memory, and where it goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from multigpu_jobs import Rank
from multigpu_shares import Shares, kernels_of, shares_of, top_kernels
from multigpu_works import Work
from torch import Tensor

import llama_kernels
from llama_core import Llama, Ops
from llama_parallel import (
    MicroBatch,
    Parallel,
    ParallelPlan,
    accumulate_gradients,
    build_mesh,
    init_shards,
    parallelize,
    shard_sequence,
)
from llama_parallel.documents import DocumentAttend

WARM_UP = 2


@dataclass(frozen=True)
class Timing:
    """What a rank tells first."""

    seconds: float
    """Of a step, on this rank."""
    steps: int
    peak: int
    """Bytes allocated at most."""
    loss: float
    parameters: int
    """Of this rank, in elements."""
    launched: float = 0.0
    """Seconds of a step until its last call returned: near `seconds`, the process is what a GPU waits for (or its
    queue is full)."""
    busy: float = 0.0
    """Seconds of a step that the process's threads computed, all together."""


@dataclass(frozen=True)
class Profile:
    """What a rank tells next."""

    shares: Shares | None
    table: str | None = None


def train(rank: Rank, work: Work, seconds: float, compiled: bool, table: bool) -> None:
    """Warm up, time about `seconds` of steps, then look at one with the profiler.

    No clipping and no look at the loss, like the steps of the programs that these numbers are held against.
    """
    gpu = rank.device.type == "cuda"
    parallel = build(work, rank.device, compiled)
    parameters = list(parallel.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batches = micro_batches(work, parallel, rank.device)

    def step() -> Tensor:
        loss, _ = accumulate_gradients(parallel, batches)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    loss = float(step())  # of the initial weights: about log V, on every layout
    warm, _ = timed(step, WARM_UP - 1, rank.device)
    steps = min(8, max(2, round(seconds / warm)))
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    working = time.process_time()
    spent, launched = timed(step, steps, rank.device)
    busy = (time.process_time() - working) / steps
    peak = torch.cuda.max_memory_allocated() if gpu else 0
    held = sum(local(p).numel() for p in parameters)
    rank.say(Timing(spent, steps, peak, loss, held, launched, busy))
    rank.say(profile(step, gpu, table))


def build(work: Work, device: torch.device, compiled: bool = False) -> Parallel:
    """The work's model with fresh weights, on fast kernels where there is a GPU."""
    gpu = device.type == "cuda"
    mesh = build_mesh(work.layout, device.type)
    compiled = compiled and work.plan.schedule != "zero_bubble"
    plan: ParallelPlan = replace(
        work.plan,
        attend=DocumentAttend(None) if work.layout.cp == 1 else None,
        compute_dtype=torch.bfloat16 if work.master else None,
        compile=compiled,
    )
    ops = llama_kernels.ops(device) if gpu else Ops()
    with torch.device("meta"):
        model = Llama(work.model, ops=ops).to(torch.bfloat16 if gpu and not work.master else torch.float32)
    parallel = parallelize(model, mesh, plan)
    init_shards(model, 0, device)
    return parallel


def micro_batches(work: Work, parallel: Parallel, device: torch.device) -> list[MicroBatch]:
    """Random tokens, alike on the ranks that share a row, others on other replicas."""
    mesh = parallel.mesh
    replica = mesh.get_local_rank("dp_replicate") * mesh["dp_shard"].size() + mesh.get_local_rank("dp_shard")
    generator = torch.Generator(device).manual_seed(replica)
    found = []
    for _ in range(work.accumulation):
        size = (work.rows, work.length + 1)
        rows = torch.randint(work.model.vocab_size, size, generator=generator, device=device)
        halves = (rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        found.append(MicroBatch(*(shard_sequence(x, mesh, work.plan.context) for x in halves)))
    return found


def timed(call: Callable[[], object], times: int, device: torch.device) -> tuple[float, float]:
    """Seconds of one call, from when all ranks are ready to when the slowest is done, and until the slowest has
    launched it; the same on every rank."""
    dist.barrier()
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(times):
        call()
    launched = time.perf_counter() - begun
    synchronize(device)
    both = torch.tensor([time.perf_counter() - begun, launched], dtype=torch.float64, device=device) / times
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    spent, launched = both.tolist()
    return spent, launched


def profile(step: Callable[[], object], gpu: bool, table: bool) -> Profile:
    """One step seen by the profiler, with a table another one, of the host's side: operators and calls of CUDA."""
    activity = torch.profiler.ProfilerActivity.CUDA if gpu else torch.profiler.ProfilerActivity.CPU
    if not gpu and not table:
        return Profile(None)
    dist.barrier()
    with torch.profiler.profile(activities=[activity]) as profiler:
        step()
        if gpu:
            torch.cuda.synchronize()
    if not gpu:
        return Profile(None, _host_table(profiler))
    kernels = kernels_of(profiler)
    if not table:
        return Profile(shares_of(kernels))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, activity]) as both:
        step()
        torch.cuda.synchronize()
    return Profile(shares_of(kernels), f"{top_kernels(kernels)}\n\n{_host_table(both)}")


def _host_table(profiler: torch.profiler.profile) -> str:
    found: str = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=60)
    return found


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def local(parameter: Tensor) -> Tensor:
    to_local = getattr(parameter, "to_local", None)
    part: Tensor = parameter if to_local is None else to_local()
    return part
