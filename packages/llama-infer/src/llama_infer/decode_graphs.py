"""Decode steps as CUDA graphs: a token of each of many sequences through the model in one launch.

The kernels of a decode step take a few microseconds each, less than Python needs to start one. A graph is captured for
a size of batch (rounded up; what is too much is padding, which writes nowhere and reads nothing) and a length of block
table (rounded up too: it decides how finely attention splits the keys), when it is first wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llama_core import Llama

from .fused_decode import fused_decode
from .paged_cache import PagedKVCache, PagedStep
from .scheduler import Work

FIELDS = 5
"""Numbers of each sequence beside its table: id, slot of a late id, position, place in the cache, length."""


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    hidden: Tensor
    logits: Tensor


class DecodeGraphs:
    """Graphs of one model and cache; `newest` as in `ModelRunner`."""

    def __init__(self, model: Llama, cache: PagedKVCache, newest: Tensor, max_num_seqs: int, max_blocks: int) -> None:
        self.model = model
        self.cache = cache
        self.newest = newest
        self.max_num_seqs = max_num_seqs
        self.max_blocks = max_blocks
        self._fused = fused_decode(model, cache.memory.dtype)
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._pool: Any = None

    def run(self, batch: list[Work], host_tables: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states (N, E) and logits (N, V) of a batch of single tokens; overwritten by the next run."""
        size = self.cache.block_size
        longest = max(work.start for work in batch) + 1
        rows, blocks = self._padded(len(batch)), self._table_length(longest)
        captured = self._graphs.get((rows, blocks))
        if captured is None:
            captured = self._graphs[rows, blocks] = self._capture(rows, blocks)
        host = torch.zeros(FIELDS + blocks, rows, dtype=torch.int32, pin_memory=True).flatten()
        fields, tables = host[: FIELDS * rows].view(FIELDS, rows), host[FIELDS * rows :].view(rows, blocks)
        fields[1:4] = -1
        fields[2] = 0
        columns = []
        for work in batch:
            sequence, start = work.sequence, work.start
            known = start < len(sequence.ids)
            columns.append(
                (
                    sequence.ids[start] if known else 0,
                    -1 if known else sequence.slot,
                    start,
                    sequence.table.blocks[start // size] * size + start % size,
                    start + 1,
                )
            )
        fields[:, : len(batch)] = torch.tensor(columns, dtype=torch.int32).T
        tables[: len(batch)] = host_tables[[work.sequence.slot for work in batch], :blocks]
        captured.inputs.copy_(host, non_blocking=True)
        captured.graph.replay()
        return captured.hidden[: len(batch)], captured.logits[: len(batch)]

    def _padded(self, rows: int) -> int:
        """1, 2, 4, 8, then eighths of the next power of two."""
        step = max(1, (1 << (rows - 1).bit_length()) // 8) if rows > 8 else 1
        rows = -(-rows // step) * step if rows > 8 else 1 << (rows - 1).bit_length()
        return min(rows, self.max_num_seqs)

    def _table_length(self, longest: int) -> int:
        """Blocks for 512, 2048, 8192, … tokens."""
        tokens = 512
        while tokens < longest:
            tokens *= 4
        return min(-(-tokens // self.cache.block_size), self.max_blocks)

    def _capture(self, rows: int, blocks: int) -> _Graph:
        device = self.cache.memory.device
        inputs = torch.zeros((FIELDS + blocks) * rows, dtype=torch.int32, device=device)
        inputs[rows : 2 * rows] = -1
        inputs[3 * rows : 4 * rows] = -1  # nothing of the trial runs goes into the cache
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are compiled and libraries opened before, not while, it is captured
                self._pass(inputs, rows, blocks)
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        # By thread: where ranks share the model, NCCL's watchdog asks CUDA things from a thread of its own.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden, logits = self._pass(inputs, rows, blocks)
        self._pool = graph.pool()
        return _Graph(graph, inputs, hidden, logits)

    def _pass(self, inputs: Tensor, rows: int, blocks: int) -> tuple[Tensor, Tensor]:
        ids, late, positions, slots, lengths, tables = inputs.split([rows] * FIELDS + [rows * blocks])
        ids = torch.where(late >= 0, self.newest[late.clamp(min=0)], ids)
        longest = blocks * self.cache.block_size
        step = PagedStep(self.cache, slots, tables.view(rows, blocks), lengths, None, 1, longest)
        if rows == 1 and self._fused is not None:
            hidden = self._fused(ids, positions, step)
        else:
            hidden = self.model(ids.unsqueeze(0), positions.unsqueeze(0), step)[0]
        return hidden, self.model.logits(hidden)
