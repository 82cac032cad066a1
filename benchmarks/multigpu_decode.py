"""Decoding with tensor parallelism: one token for each of B sequences, from a paged cache, replayed as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from multigpu_jobs import Rank
from multigpu_train import timed
from multigpu_works import LLAMA3, SMALL
from torch import Tensor

import llama_kernels
from llama_core import Llama, LlamaConfig, Ops, pack_projections
from llama_parallel import ParallelConfig, ParallelPlan, build_mesh, init_shards, parallelize

_PAGE = 16


@dataclass(frozen=True)
class DecodeWork:
    """Steps of decoding by all GPUs of one tensor-parallel group."""

    name: str
    gpus: int
    model: LlamaConfig = LLAMA3
    batches: tuple[int, ...] = (1, 64)
    held: int = 512
    """Tokens of each sequence in the cache."""
    timeout: float = 75.0

    def tiny(self) -> DecodeWork:
        return replace(self, model=SMALL, batches=(1, 3), held=20)


@dataclass(frozen=True)
class Decoded:
    """Of one batch size."""

    batch: int
    seconds: float
    """Of a step, on the slowest rank."""


def decode_works(gpus: int) -> list[DecodeWork]:
    """tp 1, 2, 4, 8 as far as there are GPUs."""
    return [DecodeWork(f"decode tp{size}", size) for size in (1, 2, 4, 8) if size <= gpus]


class PagedDecode:
    """An `Attend` for steps of one token, over pages that hold `held` tokens of every sequence with the new one."""

    def __init__(self, work: DecodeWork, batch: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> None:
        pages = -(-work.held // _PAGE)
        shape = (batch * pages, _PAGE, kv_heads, work.model.head_width)
        layers = range(work.model.num_hidden_layers)
        self.caches = [[torch.randn(shape, dtype=dtype, device=device) for _ in range(2)] for _ in layers]
        self.tables = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
        self.lengths = torch.full((batch,), work.held, dtype=torch.int32, device=device)
        self.slots = torch.arange(batch, device=device) * pages * _PAGE + work.held - 1
        self.held = work.held

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, 1, H, D), k and v (B, 1, K, D) → (B, 1, H, D)."""
        k_cache, v_cache = self.caches[layer]
        llama_kernels.write_kv(k.squeeze(1), v.squeeze(1), k_cache, v_cache, self.slots)
        out = llama_kernels.paged_attention(
            q.squeeze(1), k_cache, v_cache, self.tables, self.lengths, max_seqlen_k=self.held
        )
        return out.unsqueeze(1)


@torch.no_grad()
def decode(rank: Rank, work: DecodeWork) -> None:
    """Say the time of a step for each batch size."""
    gpu = rank.device.type == "cuda"
    mesh = build_mesh(ParallelConfig(tp=work.gpus), rank.device.type)
    dtype = torch.bfloat16 if gpu else torch.float32
    ops = llama_kernels.ops(rank.device) if gpu else Ops()
    with torch.device("meta"):
        model = Llama(work.model, ops=ops).to(dtype)
    parallelize(model, mesh, ParallelPlan(sequence_parallel=False))
    init_shards(model, 0, rank.device)
    if work.gpus == 1:
        pack_projections(model)  # one GPU as fast as it can be; tensor-parallel layers know no packing
    kv_heads = max(1, work.model.kv_heads // work.gpus)
    for batch in work.batches:
        attend = PagedDecode(work, batch, kv_heads, dtype, rank.device)
        tokens = torch.ones(batch, 1, dtype=torch.int64, device=rank.device)
        positions = torch.full((batch, 1), work.held - 1, device=rank.device)

        def step(tokens: Tensor = tokens, positions: Tensor = positions, attend: PagedDecode = attend) -> None:
            logits = model.logits(model(tokens, positions, attend))
            tokens.copy_(logits.argmax(-1))

        call = captured(step) if gpu else step
        seconds, _ = timed(call, 50 if gpu else 2, rank.device)
        if rank.number == 0:
            rank.say(Decoded(batch, seconds))


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph, its communication included."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks CUDA from its own thread
        step()
    replay: Callable[[], None] = graph.replay
    return replay
