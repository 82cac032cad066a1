"""From what a user asks to sequences for the engine, and from ended sequences to what the user gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from llama_core import Tokenizer

from .guided import Guide, GuideMaker
from .outputs import RequestOutput
from .sampling_params import SamplingParams
from .sequence import Sequence
from .structured_outputs import StructuredOutputsParams

Prompt = str | Seq[int]
"""A text, or its token ids."""
Message = Mapping[str, Any]
"""A turn of a chat: `role` and `content`."""


@dataclass(frozen=True)
class Request:
    """A prompt and the sequences that continue it, one for each sample."""

    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    sequences: list[Sequence]

    def output(self) -> RequestOutput:
        first = self.sequences[0]
        prompt_logprobs = None
        if self.params.prompt_logprobs is not None:
            prompt_logprobs = [first.prompt_logprobs.get(at) for at in range(len(self.prompt_ids))]
        samples = [sequence.sample() for sequence in self.sequences]
        return RequestOutput(self.prompt, self.prompt_ids, samples, prompt_logprobs, first.cached or 0)


class Requests:
    """Makes requests for one model.

    Args:
        tokenizer: None takes token ids only.
        vocab_size: of the model.
        max_model_len: the longest sequence.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._guides = None if tokenizer is None else GuideMaker(tokenizer)

    def encode(self, prompt: Prompt | Seq[Message], index: int = 0) -> tuple[str | None, list[int]]:
        """A text, token ids or a chat → the text, if it was one, and its ids."""
        if isinstance(prompt, str):
            return prompt, self.needs_tokenizer("a text prompt").encode(prompt)
        if isinstance(prompt, Seq) and len(prompt) > 0 and isinstance(prompt[0], Mapping):
            return None, self.needs_tokenizer("a chat").encode_chat(list(prompt))  # type: ignore[arg-type]
        if not isinstance(prompt, Iterable):
            raise ValueError(f"prompt {index} is {prompt!r}; a text or a list of token ids is wanted")
        # A model may have more rows than its tokenizer has tokens, or fewer; those have no text, or no meaning.
        known = self.vocab_size if self.tokenizer is None else min(self.vocab_size, self.tokenizer.vocab_size)
        for token_id in prompt:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < known:
                raise ValueError(
                    f"prompt {index} holds {token_id!r}; token ids are Python integers from 0 to {known - 1}"
                )
        return None, list(prompt)  # type: ignore[arg-type]

    def request(
        self, prompt: str | None, ids: list[int], params: SamplingParams, index: int = 0, streaming: bool = False
    ) -> Request:
        """Raises ValueError, naming prompt, value and limit, for what cannot be generated."""
        room = self.max_model_len - len(ids)
        if not ids:
            raise ValueError(f"prompt {index} is empty; at least 1 token is needed")
        if room < 1:
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens; the context is {self.max_model_len}, "
                f"so a prompt may have at most {self.max_model_len - 1}"
            )
        if params.stop:
            self.needs_tokenizer("a stop string")
        for name, given in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
            if beyond := [token_id for token_id in given if token_id >= self.vocab_size]:
                raise ValueError(f"{name} hold {beyond[0]}; token ids are from 0 to {self.vocab_size - 1}")
        limit = min(params.max_tokens or room, room)
        guides = [self._guide(params, index) for _ in range(params.n)]
        sequences = [
            Sequence(ids, params, limit, self.tokenizer, i, streaming, guide) for i, guide in enumerate(guides)
        ]
        return Request(prompt, ids, params, sequences)

    def _guide(self, params: SamplingParams, index: int) -> Guide | None:
        if params.structured_outputs is None:
            return None
        self.needs_tokenizer("structured_outputs")
        assert self._guides is not None
        assert isinstance(params.structured_outputs, StructuredOutputsParams)
        try:
            return self._guides.guide(params.structured_outputs)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None

    def needs_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and this LLM has none; give LLM(model, tokenizer=…)")
        return self.tokenizer
