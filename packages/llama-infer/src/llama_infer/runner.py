"""One step's work through the model: its tokens into one row, and the logits after those that sample.

On a GPU nothing waits here: inputs go over in one copy, and a token that was drawn a moment ago is read where the
sampler left it, so that the next step can be on its way before the host knows it.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from llama_core import Llama

from .block_pool import BlockTable
from .decode_graphs import DecodeGraphs
from .paged_cache import AttendRows, PagedKVCache, PagedStep, PlainStep, Span, sdpa_rows
from .scheduler import Work


class ModelRunner:
    """Runs batches of a scheduler.

    Args:
        model: in evaluation mode.
        cache: its keys and values.
        max_num_seqs, max_model_len: the largest batch and sequence.
        attend_rows: attention by torch, sequence by sequence; None for llama_kernels' paged kernels.
        graphs: replay decode steps as CUDA graphs; needs the paged kernels and a GPU.

    Attributes:
        newest: (max_num_seqs,) int64 on the device, the token that each sequence's slot drew last.
    """

    def __init__(
        self,
        model: Llama,
        cache: PagedKVCache,
        max_num_seqs: int,
        max_model_len: int,
        attend_rows: AttendRows | None = sdpa_rows,
        graphs: bool = False,
    ) -> None:
        self.model = model
        self.cache = cache
        self.device = cache.memory.device
        self.attend_rows = attend_rows
        blocks = -(-max_model_len // cache.block_size)
        self.newest = torch.zeros(max_num_seqs, dtype=torch.int64, device=self.device)
        self._tables = torch.zeros(max_num_seqs, blocks, dtype=torch.int32)
        self._written: list[tuple[BlockTable | None, int]] = [(None, 0)] * max_num_seqs
        self._graphs = DecodeGraphs(model, cache, self.newest, max_num_seqs, blocks) if graphs else None

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks of the cache (from, to), before anything is written."""
        self.cache.copy(pairs)

    @torch.inference_mode()
    def logits_of(self, hidden_TE: Tensor, rows: slice) -> Tensor:
        """The logits of some rows of what `run` has returned last."""
        return self.model.logits(hidden_TE[rows])

    @torch.inference_mode()
    def run(self, batch: list[Work]) -> tuple[Tensor, Tensor]:
        """The work's keys and values into the cache.

        Returns:
            hidden states (T, E) of all its tokens in their order, and the logits (R, V) after the last token of each
            work that samples. Where a graph ran, the hidden states are those of the sampling rows and both are
            overwritten by the next run.
        """
        if self.attend_rows is not None:
            return self._run_plain(batch)
        for work in batch:
            self._write_table(work)
        if self._graphs is not None and self._graphs.takes(batch):
            return self._graphs.run(batch, self._tables)
        return self._run_paged(batch)

    def _run_plain(self, batch: list[Work]) -> tuple[Tensor, Tensor]:
        assert self.attend_rows is not None
        spans = [Span(work.sequence.table.blocks, work.start, work.count) for work in batch]
        step = PlainStep(self.cache, spans, self.attend_rows)
        tokens = torch.tensor([_new_ids(batch)], device=self.device)
        for row, slot in _late(batch):
            tokens[0, row] = self.newest[slot]
        positions = [at for work in batch for at in range(work.start, work.start + work.count)]
        hidden_TE = self.model(tokens, torch.tensor([positions], device=self.device), step)[0]
        last_R = torch.tensor(_last_rows(batch), dtype=torch.int64, device=self.device)
        return hidden_TE, self._logits(hidden_TE, last_R)

    def _run_paged(self, batch: list[Work]) -> tuple[Tensor, Tensor]:
        counts = torch.tensor([work.count for work in batch])
        starts = torch.tensor([work.start for work in batch])
        bounds = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
        owner = torch.repeat_interleave(torch.arange(len(batch)), counts)
        positions = torch.arange(len(owner)) - (bounds[:-1] - starts)[owner]
        lengths = starts + counts
        longest = int(lengths.max())
        size = self.cache.block_size
        tables = self._tables[[work.sequence.slot for work in batch], : -(-longest // size)]
        slots = tables[owner, positions // size] * size + positions % size
        # Where a token has not arrived yet: the slot whose newest it is.
        late = torch.full((len(owner),), -1)
        for row, slot in _late(batch):
            late[row] = slot
        parts = [
            torch.tensor(_new_ids(batch)),
            late,
            positions,
            slots,
            lengths,
            bounds,
            torch.tensor(_last_rows(batch)),
        ]
        flat = torch.cat([part.to(torch.int32).flatten() for part in (*parts, tables)])
        if self.device.type == "cuda":
            flat = flat.pin_memory().to(self.device, non_blocking=True)
        ids, late, positions, slots, lengths, bounds, last, tables = flat.split([*map(len, parts), tables.numel()])
        ids = torch.where(late >= 0, self.newest[late.clamp(min=0)], ids)
        step = PagedStep(self.cache, slots, tables.view(len(batch), -1), lengths, bounds, int(counts.max()), longest)
        hidden_TE = self.model(ids.unsqueeze(0), positions.unsqueeze(0), step)[0]
        return hidden_TE, self._logits(hidden_TE, last)

    def _logits(self, hidden_TE: Tensor, last_R: Tensor) -> Tensor:
        if len(last_R) == len(hidden_TE):  # a decode step: every row is a last one
            return self.model.logits(hidden_TE)
        return self.model.logits(hidden_TE[last_R])

    def _write_table(self, work: Work) -> None:
        slot, table = work.sequence.slot, work.sequence.table
        written, count = self._written[slot]
        if written is not table:
            count = 0
        if count < len(table.blocks):
            new = torch.tensor(table.blocks[count:], dtype=torch.int32)
            self._tables[slot, count : count + len(new)] = new
        self._written[slot] = table, len(table.blocks)


def _new_ids(batch: list[Work]) -> list[int]:
    """The new tokens, 0 for those that have not arrived."""
    rows = ([*work.sequence.ids[work.start : work.start + work.count], *work.guesses] for work in batch)
    padded = (ids + [0] * (work.count - len(ids)) for work, ids in zip(batch, rows, strict=True))
    return list(itertools.chain.from_iterable(padded))


def _late(batch: list[Work]) -> list[tuple[int, int]]:
    """Rows of tokens that have not arrived here, and the slots whose newest they are."""
    ends = itertools.accumulate(work.count for work in batch)
    return [
        (end - 1, work.sequence.slot)
        for end, work in zip(ends, batch, strict=True)
        if work.start + work.count - len(work.guesses) > len(work.sequence.ids)
    ]


def _last_rows(batch: list[Work]) -> list[int]:
    """Rows whose logits are wanted: of each that samples the newest token, and those of guesses behind it."""
    ends = itertools.accumulate(work.count for work in batch)
    pairs = ((end, work) for end, work in zip(ends, batch, strict=True) if work.samples)
    return [row for end, work in pairs for row in range(end - 1 - len(work.guesses), end)]
