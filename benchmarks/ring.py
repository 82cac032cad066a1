"""Attention over a sequence that several GPUs share, against one GPU: is it right, and how much faster is it?

    torchrun --standalone --nproc-per-node 2 benchmarks/ring.py
    torchrun --standalone --nproc-per-node 2 benchmarks/ring.py --contexts ring --lengths 131072 --profile
    torchrun --standalone --nproc-per-node 2 benchmarks/ring.py --device cpu --lengths 64,256 --heads 4 --kv-heads 2

"Of ideal" is one GPU's time divided by the number of GPUs and by the time that they took together. Errors are norms
of the difference to one GPU's result over the norm of that; the largest of all ranks. On a CPU only they mean anything.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from llama_core import Attend
from llama_parallel import ParallelConfig, build_mesh, shard_sequence
from llama_parallel.context_parallel import context_attend
from llama_parallel.documents import DocumentAttend

NAMES = ("out", "dq", "dk", "dv")


@dataclass
class Times:
    """Milliseconds."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--contexts", default="ring,ulysses", help="ring, ulysses, or both (default)")
    parser.add_argument("--lengths", default="8192,32768,131072", help="tokens of the whole sequence")
    parser.add_argument("--rows", type=int, default=1, help="sequences in the batch")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--documents", type=int, default=0, help="documents packed into each sequence; 0: no mask")
    parser.add_argument("--backend", help="of llama_kernels.attention; by default the fastest")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32", "float64"))
    parser.add_argument("--times", type=int, default=10, help="runs, of which the median counts")
    parser.add_argument("--profile", action="store_true", help="the kernels that took longest on rank 0")
    return parser.parse_args()


def measure(call: Callable[[], object], device: torch.device, times: int) -> float:
    """Median milliseconds of a call that all ranks make, on the slowest rank."""
    for _ in range(3):
        call()
    found = []
    for _ in range(times):
        dist.barrier()
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end))
        else:
            begun = time.perf_counter()
            call()
            found.append((time.perf_counter() - begun) * 1e3)
    slowest = torch.tensor(median(found), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def run(attend: Attend, tensors: list[Tensor]) -> list[Tensor]:
    """out, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = attend(0, *leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def times_of(attend: Attend, tensors: list[Tensor], times: int) -> Times:
    leaves, device = [x.detach().requires_grad_() for x in tensors[:3]], tensors[0].device
    forward = measure(lambda: attend(0, *leaves), device, times)
    out = attend(0, *leaves)
    backward = measure(lambda: torch.autograd.grad(out, leaves, tensors[3], retain_graph=True), device, times)
    return Times(forward, backward)


def inputs(length: int, options: argparse.Namespace, device: torch.device) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v and the gradient of the result, and document numbers: whole, and the same on all ranks."""
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    generator = torch.Generator(device).manual_seed(length)
    heads = (options.heads, options.kv_heads, options.kv_heads, options.heads)
    shapes = [(options.rows, length, h, options.width) for h in heads]
    tensors = [torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes]
    if not options.documents:
        return tensors, None
    starts = torch.rand(options.rows, length, generator=generator, device=device).argsort(1)
    return tensors, (starts < options.documents - 1).long().cumsum(1)


def profile(attend: Attend, tensors: list[Tensor], device: torch.device) -> str:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    run(attend, tensors)
    with torch.profiler.profile(activities=activities) as profiler:
        run(attend, tensors)
        if device.type == "cuda":
            torch.cuda.synchronize()
    key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=key, row_limit=20, max_name_column_width=70)


def compare(length: int, options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    whole, documents = inputs(length, options, device)
    alone = DocumentAttend(documents, options.backend)
    wanted = run(alone, whole)
    one = times_of(alone, whole, options.times)
    if rank == 0:
        print(f"| {length} | one | {one.forward:.2f} | {one.backward:.2f} | {one.both:.2f} | | |", flush=True)
    contexts = options.contexts.split(",")
    shards = {context: [shard_sequence(x, mesh, context) for x in whole] for context in contexts}
    rights = {context: [shard_sequence(x, mesh, context) for x in wanted] for context in contexts}
    del whole, wanted
    for context in contexts:
        own = None if documents is None else shard_sequence(documents, mesh, context)
        attend = context_attend(mesh, context, own, options.backend)
        found = run(attend, shards[context])
        errors = [
            float((a - b).double().norm() / b.double().norm()) for a, b in zip(found, rights[context], strict=True)
        ]
        worst = torch.tensor(errors, device=device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        together = times_of(attend, shards[context], options.times)
        if rank == 0:
            shown = ", ".join(f"{name} {error:.1e}" for name, error in zip(NAMES, worst.tolist(), strict=True))
            print(
                f"| {length} | {size}, {context} | {together.forward:.2f} | {together.backward:.2f} "
                f"| {together.both:.2f} | {one.both / size / together.both:.2f} | {shown} |",
                flush=True,
            )
        if options.profile:
            table = profile(attend, shards[context], device)
            if rank == 0:
                print(table, flush=True)


def main() -> None:
    options = arguments()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    mesh = build_mesh(ParallelConfig(cp=dist.get_world_size()), device.type)
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        packed = f", {options.documents} documents in each" if options.documents else ""
        print(f"{name}, {options.heads} / {options.kv_heads} heads of {options.width}, {options.rows} rows{packed}\n")
        print("| tokens | devices | forward ms | backward ms | both ms | of ideal | error |")
        print("|---|---|---|---|---|---|---|", flush=True)
    for length in options.lengths.split(","):
        compare(int(length), options, mesh, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
