"""The engine: schedule, run, draw, collect; again and again, while anybody waits for tokens."""

from __future__ import annotations

import math
import threading
from collections.abc import Generator
from dataclasses import dataclass

from torch import Tensor

from .draft import Drafter
from .guided_mask import allowed_tokens
from .logprobs import LogprobWriter
from .runner import ModelRunner
from .sampler import Drawn, Sampler
from .scheduler import Scheduler, Work
from .sequence import Sequence, needs_history


@dataclass(frozen=True)
class _Step:
    """A step that was sent off."""

    batch: list[Work]
    drawing: list[Work]
    states: list[Tensor | None]
    """Of the generators of those with guesses, before the draws."""
    drawn: Drawn | None
    logits: Tensor


class Engine:
    """Generates with one model. Threads may share it: whoever waits takes the next step, for all that run.

    Args:
        scheduler, runner, sampler, logprobs: its parts.
        overlap: send a step off before the tokens of the one before are on the host; for a GPU, and without guesses.
        drafter: a draft model that makes the guesses.

    Attributes:
        guessed, accepted: tokens that were guessed (`prompt_lookup`, `draft`), and those of them that were right.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        sampler: Sampler,
        logprobs: LogprobWriter,
        overlap: bool,
        drafter: Drafter | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.sampler = sampler
        self.logprobs = logprobs
        self.overlap = overlap
        self.drafter = drafter
        self.guessed = self.accepted = 0
        self._under_way: _Step | None = None
        self._turn = threading.RLock()

    def add(self, sequence: Sequence) -> None:
        with self._turn:
            self.scheduler.add(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence now; its memory is free at once. One that has ended stays as it is."""
        with self._turn:
            sequence.abort()
            self.scheduler.remove(sequence)

    def run(self, sequences: list[Sequence]) -> Generator[None, None, None]:
        """Runs all to their ends, taking turns with others; yields after each step."""
        try:
            for sequence in sequences:
                self.add(sequence)
            while not all(sequence.has_ended() for sequence in sequences):
                self.step()
                yield
        finally:  # also after Ctrl-C, or where nobody reads on
            for sequence in sequences:
                self.abort(sequence)

    def step(self) -> None:
        """Schedule, run and draw; then collect what has been drawn."""
        with self._turn:
            ahead = self.overlap and not any(map(needs_history, self.scheduler.running))
            if not ahead:
                self._collect()
            batch = self.scheduler.schedule()
            sent = self._send(batch) if batch else None
            self._collect()
            self._under_way = sent
            if not ahead or any(needs_history(work.sequence) for work in batch):
                self._collect()

    def _send(self, batch: list[Work]) -> _Step:
        try:
            pool = self.scheduler.pool
            for runner in (self.runner, *([] if self.drafter is None else [self.drafter.runner])):
                runner.copy(pool.copies)
            pool.copies.clear()
            proposals = None
            if self.drafter is not None:
                batch, proposals = self.drafter.propose(batch)
            hidden, logits = self.runner.run(batch)
            drawing = [work for work in batch if work.samples]
            looked_up = self.drafter is None  # a draft's tokens have random numbers of their own
            states = [work.sequence.generator.get_state() if work.guesses and looked_up else None for work in drawing]
            drawn = None
            if drawing:
                rows = [work.sequence for work in drawing for _ in range(1 + len(work.guesses))]
                allowed = allowed_tokens(drawing, logits.shape[1])
                drawn = self.sampler.draw(logits, rows, self.runner.newest, allowed, proposals)
            if any(work.sequence.params.prompt_logprobs is not None for work in batch):
                self.logprobs.of_prompt(batch, hidden)
        except BaseException:  # half a pass, e.g. Ctrl-C: the cache doesn't hold these tokens
            self.scheduler.undo(batch)
            raise
        for work in drawing:
            work.sequence.pending += 1
        return _Step(batch, drawing, states, drawn, logits)

    def _collect(self) -> None:
        step, self._under_way = self._under_way, None
        if step is None:
            return
        results = step.drawn.wait() if step.drawn is not None else []
        row = 0
        for work, state in zip(step.drawing, step.states, strict=True):
            rows = range(row, row + 1 + len(work.guesses))
            row = rows.stop
            sequence = work.sequence
            sequence.pending -= 1
            if sequence.has_ended():  # while these tokens were on their way
                continue
            taken = self._take(work, [results[at] for at in rows], step.logits[rows.start : rows.stop])
            if work.guesses:
                self.guessed += len(work.guesses)
                self.accepted += taken - 1
                sequence.guessed += len(work.guesses)
                sequence.accepted += taken - 1
                sequence.computed = min(sequence.computed, len(sequence.ids) - 1)
                if state is not None:  # as if only what was taken had been drawn
                    sequence.rewind(state, taken)
            if sequence.has_ended():
                self.scheduler.remove(sequence)
        for work in step.batch:
            sequence = work.sequence
            if sequence.slot >= 0:
                self.scheduler.pool.commit(sequence.table, sequence.ids, min(sequence.computed, len(sequence.ids)))

    def _take(self, work: Work, results: list[tuple[int, float]], logits_RV: Tensor) -> int:
        """Append the tokens drawn at the newest and at the guesses behind it, up to the first that was not guessed
        right; returns how many."""
        sequence = work.sequence
        for count, (token_id, largest) in enumerate(results, start=1):
            if not math.isfinite(largest):
                sequence.abort(
                    f"the largest logit is {largest}; it must be a finite number: the weights are damaged, or the "
                    "model overflows in this dtype"
                )
                return count
            if sequence.logprobs is not None:
                wanted = sequence.params.logprobs or 0
                sequence.logprobs.append(self.logprobs.entry(logits_RV[count - 1], token_id, wanted))
            sequence.append(token_id)
            if sequence.has_ended() or count > len(work.guesses) or work.guesses[count - 1] != token_id:
                return count
        raise AssertionError("the last row has no guess behind it")
