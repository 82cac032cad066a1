"""Who runs in the next step: running sequences go on, waiting ones join, and where memory ends the youngest step back.

One budget of tokens per step covers everything. A token each for those that generate comes first, so that nobody's
stream stands still behind a long prompt; what is left goes to prompts, in the order of their arrival, in chunks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .block_pool import BlockPool
from .prompt_lookup import guesses
from .sequence import Sequence, takes_guesses

FIRST_ROOM = 256
"""New tokens that a sequence's place in memory is chosen for where it may produce more."""


@dataclass(frozen=True)
class Work:
    """Tokens of one sequence in one step."""

    sequence: Sequence
    start: int
    """Tokens of it that the cache holds before."""
    count: int
    samples: bool
    """Whether its last token is the newest, so that the next is to be drawn."""
    guesses: tuple[int, ...] = ()
    """Tokens behind the newest that it may come to; `count` has them too."""


class Scheduler:
    """First come, first served; those who ran first are the last to be pre-empted.

    Args:
        pool: the blocks.
        max_num_seqs: the most sequences that run at once.
        max_num_batched_tokens: the most tokens of one step.
        speculative_tokens: the most guesses in a step of a sequence that generates (`prompt_lookup`).
        drafted: whether a draft model makes the guesses, so that only their places are kept.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        speculative_tokens: int = 0,
        drafted: bool = False,
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.speculative_tokens = speculative_tokens
        self.drafted = drafted
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._slots = list(reversed(range(max_num_seqs)))
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> list[Work]:
        """The next step's work; empty where nothing can run."""
        budget = self.max_num_batched_tokens
        batch: list[Work] = []
        preempted = False
        for sequence in sorted(self.running, key=lambda s: s.length - s.computed > 1):  # stable: by age within each
            count = min(sequence.length - sequence.computed, budget)
            if count < 1 or sequence.slot < 0 or sequence.exhausted:
                continue
            guessed = self._guesses(sequence, budget - count) if sequence.length - sequence.computed == 1 else []
            if guessed and self.pool.extend(sequence.table, sequence.computed + 1 + len(guessed)):
                batch.append(self._work(sequence, 1, tuple(guessed)))
                budget -= batch[-1].count
                continue
            while not self.pool.extend(sequence.table, sequence.computed + count):
                preempted = True
                victim = self.running[-1]
                budget += self._give_back(batch, victim)
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                batch.append(self._work(sequence, count))
                budget -= count
        while self.waiting and budget and not preempted and len(self.running) < self.max_num_seqs:
            admitted = self._admit(self.waiting[0], budget)
            if admitted is None:
                break
            batch.append(admitted)
            budget -= admitted.count
        return batch

    def _admit(self, sequence: Sequence, budget: int) -> Work | None:
        """The first part of a waiting sequence, if all of its tokens so far have room."""
        if sequence.pending:  # pre-empted, and its newest token has not arrived yet
            return None
        room = sequence.length + min(sequence.limit - len(sequence.token_ids), FIRST_ROOM)
        # Log-probabilities of a prompt want all of its rows, so nothing is taken from the cache.
        known = sequence.ids if sequence.params.prompt_logprobs is None else []
        table, held = self.pool.begin(known, room)
        if not self.pool.extend(table, sequence.length, room):
            self.pool.release(table, sequence.ids, held)
            return None
        self.waiting.popleft()
        self.running.append(sequence)
        sequence.table, sequence.computed, sequence.slot = table, held, self._slots.pop()
        sequence.cached = held if sequence.cached is None else sequence.cached
        return self._work(sequence, min(sequence.length - held, budget))

    def _guesses(self, sequence: Sequence, budget: int) -> list[int]:
        most = min(self.speculative_tokens, budget, sequence.limit - len(sequence.token_ids) - 1)
        if most < 1 or not takes_guesses(sequence):
            return []
        if self.drafted:
            return [0] * most
        guessed = guesses(sequence.ids, most)
        return guessed if sequence.guide is None else sequence.guide.fitting(guessed)

    def _work(self, sequence: Sequence, count: int, guessed: tuple[int, ...] = ()) -> Work:
        samples = sequence.computed + count == sequence.length
        work = Work(sequence, sequence.computed, count + len(guessed), samples, guessed)
        sequence.computed += work.count
        return work

    def undo(self, batch: list[Work]) -> None:
        """The batch has not run."""
        for work in batch:
            work.sequence.computed = min(work.sequence.computed, work.start)

    def remove(self, sequence: Sequence) -> None:
        """The sequence has ended, for whatever reason: its memory is free at once."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        # Only tokens that are known here: the newest may still be on its way.
        self.pool.release(sequence.table, sequence.ids, min(sequence.computed, len(sequence.ids)))
        self._slots.append(sequence.slot)
        sequence.computed, sequence.slot = 0, -1

    def _give_back(self, batch: list[Work], victim: Sequence) -> int:
        """Take a victim's work out of the batch; returns its tokens."""
        for index, work in enumerate(batch):
            if work.sequence is victim:
                victim.computed = work.start
                del batch[index]
                return work.count
        return 0
