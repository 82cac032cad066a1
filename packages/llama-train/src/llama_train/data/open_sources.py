"""`data.sources` of a run: prepared folders to rows, and what must fit between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llama_core import load_tokenizer
from llama_train.batches import Batch
from llama_train.config import DataConfig
from llama_train.shuffle import mix

from .mixture import Mixture, set_batches
from .prepared_folder import TOKENIZER
from .rows import CutRows, PackedRows
from .token_set import TokenSet, open_folder


@dataclass(frozen=True)
class Sources:
    """Several sets of documents to train on; its length is their tokens."""

    sets: Sequence[TokenSet]

    def __len__(self) -> int:
        return sum(len(tokens) for tokens in self.sets)

    def rows(self, config: DataConfig, seed: int) -> Mixture:
        """Their rows, packed and mixed as the settings say.

        Raises:
            ValueError: too few tokens for a row, or a weight that is too small.
        """
        make = PackedRows if config.packing == "best-fit" else CutRows
        rows = [make(tokens, config.sequence_length, mix(seed, index)) for index, tokens in enumerate(self.sets)]
        weights = config.weights or (1.0,) * len(rows)
        return Mixture(rows, weights, seed, config.masks_documents)


@dataclass(frozen=True)
class HeldOut:
    """Documents that measure the model; its length is their tokens."""

    tokens: TokenSet

    def __len__(self) -> int:
        return len(self.tokens)

    def batches(self, config: DataConfig, rows: int, max_tokens: int | None) -> Iterator[Batch]:
        """All of them once, or about `max_tokens`."""
        return set_batches(self.tokens, config.sequence_length, rows, config.masks_documents, max_tokens)


@dataclass(frozen=True)
class OpenedSources:
    """Everything a run takes from its sources."""

    train: Sources
    held_out: HeldOut
    tokenizer: Path
    vocab_size: int
    bos_id: int | None
    eos_id: int | None


def open_sources(config: DataConfig, note: Callable[[str], None]) -> OpenedSources:
    """Open all folders of `data.sources` and the held-out documents.

    Raises:
        ValueError: a folder that cannot be used, or shards of different tokenizers.
    """
    part = config.held_out_fraction if config.held_out is None else None
    opened = [open_folder(folder, part) for folder in config.sources]
    train = [tokens for tokens, _ in opened]
    apart = [tokens for _, tokens in opened if tokens is not None]
    if config.held_out is not None:
        apart = [open_folder(config.held_out)[0]]
    tokenizer_path = Path(config.tokenizer) if config.tokenizer is not None else Path(config.sources[0]) / TOKENIZER
    tokenizer = load_tokenizer(tokenizer_path)
    for tokens in (*train, *apart):
        if tokens.tokenizer != tokenizer.fingerprint:
            raise ValueError(
                f"{tokens.name} was made by the tokenizer {tokens.tokenizer[:12]}…; {tokenizer_path} is "
                f"{tokenizer.fingerprint[:12]}…: prepare the text again with that one, or leave data.tokenizer out"
            )
    for tokens in train:
        note(f"source     {tokens.name}: {len(tokens.lengths):,} documents, {len(tokens):,} tokens")
    # Held-out parts of all sources measure together.
    measured = apart[0] if len(apart) == 1 else _together(apart)
    return OpenedSources(
        Sources(train), HeldOut(measured), tokenizer_path, tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id
    )


def _together(sets: Sequence[TokenSet]) -> TokenSet:
    shards = [shard for tokens in sets for shard in tokens.shards]
    numbers, before = [], 0
    for tokens in sets:
        numbers.append(tokens.chosen + before)
        before += sum(len(shard.ends) for shard in tokens.shards)
    return TokenSet(" and ".join(tokens.name for tokens in sets), shards, np.concatenate(numbers))
