"""One request on its way: its tokens so far, its text so far, its generator, and whether it has ended."""

from __future__ import annotations

import torch

from llama_core import Tokenizer

from .outputs import FinishReason, RequestOutput, StreamChunk
from .sampling_params import SamplingParams
from .stop_strings import StopStrings


class Sequence:
    """The state of a request.

    Args:
        prompt_ids: at least one token id.
        params: of this request.
        limit: the most tokens to produce: `params.max_tokens`, or less where the context ends before.
        tokenizer: for the text; None leaves the text empty.
        prompt: the text that the prompt came from, if any.
    """

    def __init__(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        limit: int,
        tokenizer: Tokenizer | None = None,
        prompt: str | None = None,
    ) -> None:
        assert prompt_ids
        assert limit >= 1
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.params = params
        self.limit = limit
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        eos_ids = () if tokenizer is None or params.ignore_eos else tokenizer.eos_ids
        self.end_ids = frozenset((*eos_ids, *params.stop_token_ids))
        self.generator = torch.Generator()
        if params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(params.seed)
        self._vocab_size = 0 if tokenizer is None else tokenizer.vocab_size
        self._detokenizer = None if tokenizer is None else tokenizer.detokenizer(prompt_ids)
        self._stops = StopStrings(params.stop)

    @property
    def may_end(self) -> bool:
        """Whether end tokens may come next (`min_tokens`)."""
        return len(self.token_ids) >= self.params.min_tokens

    def append(self, token_id: int) -> StreamChunk:
        """Take the next token; returns what it adds to the text and whether it is the last."""
        assert self.finish_reason is None
        self.token_ids.append(token_id)
        ended = token_id in self.end_ids
        text = "" if ended else self._shown(self._decoded(token_id))
        if ended or self._stops.matched is not None:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.limit:
            self.finish_reason = "length"
        if self.finish_reason is not None and self._stops.matched is None:
            text += self._shown(self._detokenizer.flush() if self._detokenizer else "")
            if self._stops.matched is None:
                text += self._stops.flush()
        self.text += text
        return StreamChunk(text, token_id, self.finish_reason)

    def output(self) -> RequestOutput:
        assert self.finish_reason is not None
        return RequestOutput(self.prompt, self.prompt_ids, self.text, self.token_ids, self.finish_reason)

    def _decoded(self, token_id: int) -> str:
        # A model may have more rows than its tokenizer has tokens; those rows have no text.
        known = self._detokenizer is not None and token_id < self._vocab_size
        return self._detokenizer.push(token_id) if self._detokenizer is not None and known else ""

    def _shown(self, text: str) -> str:
        counts = len(self.token_ids) > self.params.min_tokens
        return self._stops.push(text) if counts else text
