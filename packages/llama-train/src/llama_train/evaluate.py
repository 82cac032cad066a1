"""Loss on held-out text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from llama_core import Llama, Tokenizer

from .batches import IGNORED, Batch
from .forward import forward


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over `tokens` targets, in nats."""

    loss: float
    tokens: int
    bytes: int | None = None
    """UTF-8 bytes of text that these targets stand for; None where nobody counted."""

    @property
    def bits_per_byte(self) -> float | None:
        """(sum of the losses of all targets) / ln 2 / bytes of text: comparable between tokenizers.

        Bytes are those of the very tokens that were scored (`ByteCount`), so a part of the held-out text, masked
        prompts and first tokens without a prediction are counted right. The end of a text has no byte, but its loss
        counts: whoever stores the texts must store where they end.
        """
        return self.loss * self.tokens / math.log(2) / self.bytes if self.bytes else None

    @property
    def perplexity(self) -> float:
        """e^loss; infinite where that is beyond a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def fraction_of_chance(self, vocab_size: int) -> float:
        """The loss as a part of ln(vocabulary), which is that of a model that has learnt nothing."""
        return self.loss / math.log(vocab_size)


class ByteCount:
    """Counts the bytes of text behind the targets of batches that pass through `of`.

    A token stands for the bytes of its spelling, a special token for none. For vocabularies of bytes (GPT-2's kind,
    Llama 3's) the tokens of a text add up to exactly its UTF-8 bytes; a SentencePiece vocabulary with a leading space
    has one more for each document.

    Args:
        tokenizer: of the ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = tokenizer.special_ids
        sizes = [0 if i in special else len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)]
        self._sizes = torch.tensor(sizes)
        self.bytes = 0
        """Of all batches since `of` was called."""

    def of(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches, on the CPU, counted as they pass."""
        self.bytes = 0
        for batch in batches:
            self.bytes += int(self._sizes[batch.targets[batch.targets != IGNORED]].sum())
            yield batch


@torch.no_grad()
def evaluate(model: Llama, batches: Iterable[Batch]) -> Evaluation:
    """Mean over every unmasked token of all batches, each token counted once whatever its batch.

    Raises:
        ValueError: no batch has a target.
    """
    assert model.lm_head is not None
    head = model.lm_head.weight
    total, tokens = torch.zeros((), dtype=torch.float64, device=head.device), 0
    for batch in batches:
        tokens += batch.count
        batch = batch.to(head.device)
        total += model.ops.linear_cross_entropy(forward(model, batch), head, batch.targets, reduction="sum")
    if tokens == 0:
        raise ValueError("the held-out text has no token to predict; add text or raise data.held_out_fraction")
    return Evaluation(float(total) / tokens, tokens)
