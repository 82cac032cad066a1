"""Batches of sequences through the model: the prompts in one go, then one token a step for all that still run."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from llama_core import Llama, sample

from .outputs import StreamChunk
from .sequence import Sequence
from .static_cache import StaticKVCache

FIRST_ROOM = 256
"""Slots for new tokens that a cache begins with; it doubles when they are used up."""
PREFILL_TOKENS = 8192
"""The most prompt tokens, over all rows, in one pass of the model: it bounds the memory of activations."""


class Engine:
    """Generates with one model. Threads may share it; each of their batches runs on its own.

    Args:
        model: in evaluation mode, on the device it is to run on.
        max_model_len: the longest sequence, prompt and new tokens together.
        max_num_seqs: the most sequences in one batch.
    """

    def __init__(self, model: Llama, max_model_len: int, max_num_seqs: int) -> None:
        self.model = model
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self._warm: tuple[list[int], StaticKVCache] | None = None
        self._taking = threading.Lock()

    def run(self, sequences: list[Sequence]) -> Iterator[list[tuple[Sequence, StreamChunk]]]:
        """Runs all to their ends; yields after each step what it added to which sequence."""
        # Prompts of similar length together: less padding in the first pass.
        by_length = sorted(sequences, key=lambda sequence: len(sequence.prompt_ids))
        for start in range(0, len(by_length), self.max_num_seqs):
            yield from self._run_batch(by_length[start : start + self.max_num_seqs])

    def _run_batch(self, running: list[Sequence]) -> Iterator[list[tuple[Sequence, StreamChunk]]]:
        alone = running[0] if len(running) == 1 else None
        cache = self._take_cache(running)
        try:
            logits = self._prefill(cache, running)
            while True:
                tokens = next_tokens(logits, running)
                yield [(sequence, sequence.append(token)) for sequence, token in zip(running, tokens, strict=True)]
                alive = [row for row, sequence in enumerate(running) if sequence.finish_reason is None]
                if not alive:
                    return
                if len(alive) < len(running):
                    cache.keep(alive)
                    running = [running[row] for row in alive]
                logits = self._decode(cache, running)
        finally:
            if alone is not None:  # also after Ctrl-C: the next turn of a chat begins with these tokens
                self._warm = [*alone.prompt_ids, *alone.token_ids][: cache.lengths[0]], cache

    def _take_cache(self, running: list[Sequence]) -> StaticKVCache:
        """A cache for these sequences, holding what the last single one has in common with a single new one."""
        size = max(len(s.prompt_ids) + min(s.limit, FIRST_ROOM) for s in running)
        # Taken and cleared under a lock: two threads with one cache would write into each other's texts.
        with self._taking:
            warm, self._warm = (self._warm, None) if len(running) == 1 else (None, self._warm)
        if warm is None:
            return StaticKVCache(self.model.config, len(running), size, self.dtype, self.device)
        held_ids, cache = warm
        prompt_ids = running[0].prompt_ids
        # The last token always runs: its logits are what the first new token is drawn from.
        same = next(
            (i for i, (held, wanted) in enumerate(zip(held_ids, prompt_ids, strict=False)) if held != wanted),
            min(len(held_ids), len(prompt_ids)),
        )
        cache.truncate(min(same, len(prompt_ids) - 1))
        cache.grow(size)
        return cache

    def _prefill(self, cache: StaticKVCache, running: list[Sequence]) -> Tensor:
        """The prompts into the cache; returns the logits (B, V) after their last tokens."""
        done = cache.lengths[0]  # all zero but for a warm cache, which has one row
        longest = max(len(sequence.prompt_ids) for sequence in running)
        width = max(1, PREFILL_TOKENS // len(running))
        last_BE: list[Tensor] = [torch.empty(0)] * len(running)
        for start in range(done, longest, width):
            parts = [sequence.prompt_ids[start : start + width] for sequence in running]
            counts = [len(part) for part in parts]
            hidden_BSE = self._forward(cache, parts, counts)
            for row, count in enumerate(counts):
                if count and start + count == len(running[row].prompt_ids):
                    last_BE[row] = hidden_BSE[row, count - 1]
        return self._logits(torch.stack(last_BE))

    def _decode(self, cache: StaticKVCache, running: list[Sequence]) -> Tensor:
        """The newest token of each sequence into the cache; returns the logits (B, V) after it."""
        if max(cache.lengths) == cache.size:
            cache.grow(min(2 * cache.size, self.max_model_len))
        return self._logits(self._forward(cache, [sequence.token_ids[-1:] for sequence in running])[:, 0])

    @torch.inference_mode()
    def _forward(self, cache: StaticKVCache, ids: list[list[int]], counts: list[int] | None = None) -> Tensor:
        before = list(cache.lengths)
        width = max(map(len, ids))
        tokens_BS = torch.tensor([row + [0] * (width - len(row)) for row in ids], device=self.device)
        step = cache.append(width, counts)
        try:
            hidden_BSE: Tensor = self.model(tokens_BS, step.positions, step)
        except BaseException:  # half a pass, e.g. Ctrl-C: the cache doesn't hold these tokens
            cache.lengths = before
            raise
        return hidden_BSE

    @torch.inference_mode()
    def _logits(self, hidden_BE: Tensor) -> Tensor:
        return self.model.logits(hidden_BE)


@torch.inference_mode()
def next_tokens(logits_BV: Tensor, running: list[Sequence]) -> list[int]:
    """Draws the next token of each sequence by its own settings and generator."""
    for row, sequence in enumerate(running):
        if not sequence.may_end and sequence.end_ids:
            # A tokenizer may have more ids than the model has rows.
            rows = [token_id for token_id in sequence.end_ids if token_id < logits_BV.shape[1]]
            logits_BV[row, rows] = float("-inf")
    params = [sequence.params for sequence in running]
    drawn_B = sample(
        logits_BV,
        [p.temperature for p in params],
        [p.top_k for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
        [sequence.generator for sequence in running],
    )
    ids: list[int] = drawn_B.tolist()
    return ids
