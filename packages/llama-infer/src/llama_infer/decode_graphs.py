"""Decode steps as CUDA graphs: a token of each of many sequences, with as many guesses each, in one launch.

The kernels of a decode step take a few microseconds each, less than Python needs to start one. A graph is captured for
a size of batch (rounded up; what is too much is padding, which writes nowhere), a length of block table (rounded up
too: it decides how finely attention splits the keys) and a number of tokens of each sequence, when it is first wanted.
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

FIELDS = 4
"""Numbers of each token: id, slot of a late id, position, place in the cache."""
WIDEST = 16
"""Tokens of a sequence, guesses included; steps with more are prompts."""


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    bounds: Tensor | None
    """Kept for as long as the graph reads it."""
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
        self._graphs: dict[tuple[int, int, int], _Graph] = {}
        self._pool: Any = None

    @staticmethod
    def takes(batch: list[Work]) -> bool:
        """Whether each sequence has its newest token in the batch, with as many guesses as the others and no more."""
        width = batch[0].count
        alike = all(work.samples and work.count == 1 + len(work.guesses) == width for work in batch)
        return alike and width <= WIDEST

    def run(self, batch: list[Work], host_tables: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states (N, E) and logits (N, V) of the tokens of a batch that it `takes`; overwritten by the next
        run."""
        width = batch[0].count
        longest = max(work.start for work in batch) + width
        rows, blocks = self._padded(len(batch)), self._table_length(longest)
        captured = self._graphs.get((rows, blocks, width))
        if captured is None:
            captured = self._graphs[rows, blocks, width] = self._capture(rows, blocks, width)
        host = self._blank(rows, blocks, width, pin=self.cache.memory.is_cuda)
        fields, lengths, tables = _parts(host, rows, blocks, width)
        used = len(batch) * width
        fields[:, :used] = torch.tensor([column for work in batch for column in self._columns(work)]).T
        lengths[: len(batch)] = torch.tensor([work.start + width for work in batch])
        tables[: len(batch)] = host_tables[[work.sequence.slot for work in batch], :blocks]
        captured.inputs.copy_(host, non_blocking=True)
        captured.graph.replay()
        return captured.hidden[:used], captured.logits[:used]

    def _columns(self, work: Work) -> list[tuple[int, int, int, int]]:
        """The fields of a sequence's tokens."""
        sequence, start, size = work.sequence, work.start, self.cache.block_size
        known = start < len(sequence.ids)
        ids = (sequence.ids[start] if known else 0, *work.guesses)
        return [
            (
                token_id,
                sequence.slot if not known and at == start else -1,
                at,
                sequence.table.blocks[at // size] * size + at % size,
            )
            for at, token_id in enumerate(ids, start)
        ]

    def _blank(self, rows: int, blocks: int, width: int, pin: bool = False) -> Tensor:
        """Inputs of a batch of padding, on the host: nothing of it goes into the cache."""
        host = torch.zeros((FIELDS * width + 1 + blocks) * rows, dtype=torch.int32, pin_memory=pin)
        fields, lengths, _ = _parts(host, rows, blocks, width)
        fields[1], fields[3] = -1, -1
        # A single token of padding reads nothing. Where a sequence has several, each must have a key to look at: the
        # first block's, whatever is in it; nobody reads the result.
        lengths[:] = 0 if width == 1 else width
        return host

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

    def _capture(self, rows: int, blocks: int, width: int) -> _Graph:
        device = self.cache.memory.device
        inputs = self._blank(rows, blocks, width).to(device)
        bounds = torch.arange(0, rows * width + 1, width, dtype=torch.int32, device=device) if width > 1 else None
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are compiled and libraries opened before, not while, it is captured
                self._pass(inputs, rows, blocks, width, bounds)
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        # By thread: where ranks share the model, NCCL's watchdog asks CUDA things from a thread of its own.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden, logits = self._pass(inputs, rows, blocks, width, bounds)
        self._pool = graph.pool()
        return _Graph(graph, inputs, bounds, hidden, logits)

    def _pass(self, inputs: Tensor, rows: int, blocks: int, width: int, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
        (ids, late, positions, slots), lengths, tables = _parts(inputs, rows, blocks, width)
        ids = torch.where(late >= 0, self.newest[late.clamp(min=0)], ids)
        longest = blocks * self.cache.block_size
        step = PagedStep(self.cache, slots, tables, lengths, bounds, width, longest)
        if rows == width == 1 and self._fused is not None:
            hidden = self._fused(ids, positions, step)
        else:
            hidden = self.model(ids.unsqueeze(0), positions.unsqueeze(0), step)[0]
        return hidden, self.model.logits(hidden)


def _parts(inputs: Tensor, rows: int, blocks: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the inputs: fields (FIELDS, rows · width) of the tokens, lengths (rows,), tables (rows, blocks)."""
    fields, lengths, tables = inputs.split([FIELDS * rows * width, rows, rows * blocks])
    return fields.view(FIELDS, rows * width), lengths, tables.view(rows, blocks)
