"""One sample of a request on its way: its tokens and text so far, its place in the cache, and whether it has ended."""

from __future__ import annotations

import time
from collections import deque

import torch

from llama_core import Tokenizer

from .block_pool import BlockTable
from .guided import Guide
from .outputs import FinishReason, Logprob, Sample, StreamChunk, Timings
from .sampling_params import SamplingParams
from .stop_strings import StopStrings


class Sequence:
    """The state of a sample.

    Args:
        prompt_ids: at least one token id.
        params: of its request.
        limit: the most tokens to produce: `params.max_tokens`, or less where the context ends before.
        tokenizer: for the text; None leaves the text empty.
        index: of the sample in its request; each draws from a generator of its own.
        streaming: whether to keep chunks for somebody who reads them.
        guide: of the form that the output must have.

    Attributes:
        ids: the prompt's tokens and those produced.
        table, slot: its blocks and its row of the batch, while it runs.
        computed: tokens that the cache holds, or will when the steps under way are done.
        pending: tokens drawn on the device that have not arrived.
        cached: tokens that the cache held already when it first ran.
        guessed, accepted: its share of the engine's numbers of the same names.
    """

    def __init__(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        limit: int,
        tokenizer: Tokenizer | None = None,
        index: int = 0,
        streaming: bool = False,
        guide: Guide | None = None,
    ) -> None:
        assert prompt_ids
        assert limit >= 1
        self.prompt_ids = prompt_ids
        self.params = params
        self.limit = limit
        self.guide = guide
        self.ids = list(prompt_ids)
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.prompt_logprobs: dict[int, dict[int, Logprob]] = {}
        self.chunks: deque[StreamChunk] | None = deque() if streaming else None
        eos_ids = () if tokenizer is None or params.ignore_eos else tokenizer.eos_ids
        self.end_ids = frozenset((*eos_ids, *params.stop_token_ids))
        self.generator = torch.Generator()
        if params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed((params.seed + index) % 2**63)
        self.seed = self.generator.initial_seed() % 2**62
        self.table, self.slot = BlockTable(), -1
        self.computed = self.pending = 0
        self.guessed = self.accepted = 0
        self.cached: int | None = None
        self._vocab_size = 0 if tokenizer is None else tokenizer.vocab_size
        self._detokenizer = None if tokenizer is None else tokenizer.detokenizer(prompt_ids)
        self._stops = StopStrings(params.stop)
        self._arrived = time.perf_counter()
        self._first: float | None = None
        self._finished: float | None = None

    def has_ended(self) -> bool:
        return self.finish_reason is not None

    @property
    def length(self) -> int:
        """Tokens, those that have not arrived included."""
        return len(self.ids) + self.pending

    @property
    def exhausted(self) -> bool:
        """Whether nothing more is to be drawn."""
        return len(self.token_ids) + self.pending >= self.limit

    @property
    def may_end(self) -> bool:
        """Whether end tokens may come next (`min_tokens`)."""
        return len(self.token_ids) >= self.params.min_tokens

    def append(self, token_id: int) -> StreamChunk:
        """Take the next token; returns what it adds to the text and whether it is the last."""
        assert not self.has_ended()
        if self._first is None:
            self._first = time.perf_counter()
        self.ids.append(token_id)
        self.token_ids.append(token_id)
        ended = token_id in self.end_ids
        text = "" if ended else self._shown(self._decoded(token_id))
        if self.guide is not None and not ended:
            self.guide.advance(token_id)
        if ended or self._stops.matched is not None or (self.guide is not None and self.guide.over):
            self._finish("stop")
        elif self.guide is not None and self.guide.error is not None:
            self.abort(self.guide.error)
        elif len(self.token_ids) >= self.limit:
            self._finish("length")
        if self.has_ended() and self._stops.matched is None:
            text += self._shown(self._detokenizer.flush() if self._detokenizer else "")
            if self._stops.matched is None:
                text += self._stops.flush()
        self.text += text
        chunk = StreamChunk(text, token_id, self.finish_reason)
        if self.chunks is not None:
            self.chunks.append(chunk)
        return chunk

    def rewind(self, state: torch.Tensor, draws: int) -> None:
        """Have the generator stand where it would after so many draws from a state of it."""
        if self.params.temperature > 0:
            self.generator.set_state(state)
            for _ in range(draws):
                torch.rand(1, dtype=torch.float64, generator=self.generator)

    def abort(self, error: str | None = None) -> None:
        """End here, with what there is."""
        if self.finish_reason is None:
            self.error = error
            self._finish("abort")

    def sample(self) -> Sample:
        assert self.finish_reason is not None
        timings = Timings(self._arrived, self._first, self._finished)
        return Sample(
            self.text, self.token_ids, self.finish_reason, self.logprobs, self.error, timings,
            self.guessed, self.accepted,
        )  # fmt: skip

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self._finished = time.perf_counter()

    def _decoded(self, token_id: int) -> str:
        # A model may have more rows than its tokenizer has tokens; those rows have no text.
        known = self._detokenizer is not None and token_id < self._vocab_size
        return self._detokenizer.push(token_id) if self._detokenizer is not None and known else ""

    def _shown(self, text: str) -> str:
        counts = len(self.token_ids) > self.params.min_tokens
        return self._stops.push(text) if counts else text


def needs_history(sequence: Sequence) -> bool:
    """Whether the next draw depends on tokens that must have arrived on the host."""
    params = sequence.params
    wants_more = params.logprobs is not None or params.prompt_logprobs is not None or params.logit_bias
    return bool(sequence.guide is not None or wants_more or not takes_guesses(sequence))


def takes_guesses(sequence: Sequence) -> bool:
    """Whether several draws may be made after one another in one step."""
    params = sequence.params
    penalised = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    return not (penalised or (sequence.end_ids and not sequence.may_end))
