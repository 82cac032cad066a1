"""How well a model, as it is set up here, foretells a text: perplexity, and bits for each byte.

The text goes through the engine, so that rounded weights, a rounded cache, an attention or several ranks are measured
as they generate. A long text is cut into windows that overlap; each token is scored once, in the first window that it
stands in, with at least `window - stride` tokens before it (but for the first window). Perplexities of models with
other tokenizers cannot be compared, their bits for each byte can.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .llm import LLM
from .sampling_params import SamplingParams

TOGETHER = 16
"""Windows that are given to the engine at once."""


@dataclass(frozen=True)
class Perplexity:
    """What a text has cost."""

    nats: float
    """Negative log-likelihood of all tokens that were scored, natural logarithm."""
    tokens: int
    bytes: int
    """UTF-8, of those tokens."""
    windows: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp of the mean over tokens."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


@dataclass(frozen=True)
class Window:
    begin: int
    end: int
    first: int
    """The first token that is scored, from the text's beginning on."""


def cut(tokens: int, window: int, stride: int, first: int) -> Iterator[Window]:
    """Windows over a text of so many tokens, each token scored in one of them.

    Args:
        window: tokens of the longest.
        stride: from one's beginning to the next's; at most `window`.
        first: tokens at a window's beginning that cannot be scored: 1, or 0 where something stands before them.
    """
    begin = scored = 0
    while scored < tokens:
        end = min(begin + window, tokens)
        yield Window(begin, end, max(scored, begin + first))
        scored, begin = end, begin + stride


def measure(
    llm: LLM, text: str, window: int = 1024, stride: int = 512, tell: Callable[[int, int], None] | None = None
) -> Perplexity:
    """Score a text.

    Args:
        window: tokens that the model sees at once, BOS included where the tokenizer begins with it: every window does.
        stride: new tokens in each window after the first.
        tell: called with the windows that are done, and all of them.

    Raises:
        ValueError: a text of too few tokens, a window that does not fit the model, or a stride beyond it.
    """
    tokenizer = llm.requests.needs_tokenizer("a text")
    ids = tokenizer.encode(text, add_bos=False)
    before = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
    most = llm.max_model_len - 1
    if not 2 <= window <= most:
        raise ValueError(f"window must be from 2 to {most}, the context less 1, got {window}")
    size = window - len(before)
    if not 1 <= stride <= size:
        raise ValueError(f"stride must be from 1 to {size}, so that no token is passed over, got {stride}")
    if len(before) + len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens; at least {2 - len(before)} are needed")
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    windows = [each for each in cut(len(ids), size, stride, 1 - len(before)) if each.first < each.end]
    start = time.perf_counter()
    costs: list[float] = []
    scored: list[int] = []
    for at in range(0, len(windows), TOGETHER):
        group = windows[at : at + TOGETHER]
        prompts = [[*before, *ids[each.begin : each.end]] for each in group]
        for each, output in zip(group, llm.generate(prompts, params, show_progress=False), strict=True):
            if output.error is not None or output.prompt_logprobs is None:
                raise ValueError(f"tokens {each.begin} to {each.end}: {output.error}")
            for place in range(each.first, each.end):
                entry = output.prompt_logprobs[len(before) + place - each.begin]
                assert entry is not None
                costs.append(-entry[ids[place]].logprob)
                scored.append(ids[place])
        if tell is not None:
            tell(min(at + TOGETHER, len(windows)), len(windows))
    # SentencePiece's first token has a space that is not the text's.
    size_in_bytes = (
        len(text.encode()) if len(scored) == len(ids) else sum(len(tokenizer.token_bytes(i)) for i in scored)
    )
    return Perplexity(math.fsum(costs), len(scored), size_in_bytes, len(windows), time.perf_counter() - start)
