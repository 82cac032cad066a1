"""The documents of a folder that `llama-train prepare` wrote, or a part of them, as one long row of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llama_train.shuffle import permute

from .prepared_folder import INDEX, read_json
from .shard import Shard, read_shard


@dataclass(frozen=True)
class Window:
    """Some neighbouring tokens: ids (int64), which count as targets, and the number of each one's document."""

    ids: NDArray[np.int64]
    counted: NDArray[np.bool_]
    documents: NDArray[np.int64]


class TokenSet:
    """Documents of shards, one behind the other. Nothing but the index is read until tokens are asked for.

    Args:
        name: the folder, for messages.
        shards: in order; at least one.
        chosen: numbers of the documents that belong to the set, rising; None: all.
    """

    def __init__(self, name: str, shards: list[Shard], chosen: NDArray[np.int64] | None = None) -> None:
        self.name, self.shards = name, shards
        self._shard_starts = np.cumsum([0, *(len(shard.tokens) for shard in shards)])
        parts = [shard.ends.astype(np.int64) + start for shard, start in zip(shards, self._shard_starts)]
        ends = np.concatenate(parts)
        starts = np.concatenate([[0], ends[:-1]])
        sizes = np.concatenate([shard.bytes for shard in shards])
        self.chosen = np.arange(len(ends)) if chosen is None else chosen
        """Numbers of the documents, counted through all shards."""
        if chosen is not None:
            starts, ends, sizes = starts[chosen], ends[chosen], sizes[chosen]
        self.starts = starts
        """(D,) where each document begins in the shards, counted through all of them."""
        self.lengths = ends - starts
        """(D,) tokens of each document."""
        self.bytes = int(sizes.sum())
        """UTF-8 bytes of the text that counts."""
        self._places = np.cumsum(np.concatenate([[0], self.lengths]))  # where each begins in this set

    def __len__(self) -> int:
        return int(self._places[-1])

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return self.shards[0].vocab_size

    @property
    def tokenizer(self) -> str:
        """Fingerprint of the tokenizer that made the ids."""
        return self.shards[0].tokenizer

    @property
    def is_masked(self) -> bool:
        """Whether some tokens, those of prompts, do not count as targets."""
        return any(shard.counted is not None for shard in self.shards)

    def window(self, start: int, stop: int) -> Window:
        """Tokens from `start` to `stop`, counted through the documents of this set."""
        first = int(np.searchsorted(self._places, start, side="right")) - 1
        last = int(np.searchsorted(self._places, stop, side="left"))
        ids, counted, documents = [], [], []
        for number in range(first, last):
            begin = max(start - int(self._places[number]), 0)
            end = min(stop - int(self._places[number]), int(self.lengths[number]))
            if begin < end:
                part, counts = self.stored(int(self.starts[number]) + begin, end - begin)
                ids.append(part)
                counted.append(counts)
                documents.append(np.full(end - begin, number))
        return Window(np.concatenate(ids), np.concatenate(counted), np.concatenate(documents))

    def stored(self, start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Ids of a part of one document, by its place in the shards, and which of them count as targets.

        Raises:
            ValueError: an id that the vocabulary does not have: the file is damaged.
        """
        number = int(np.searchsorted(self._shard_starts, start, side="right")) - 1
        shard, begin = self.shards[number], start - int(self._shard_starts[number])
        ids = shard.tokens[begin : begin + count].astype(np.int64)
        if len(ids) and int(ids.max()) >= shard.vocab_size:
            raise ValueError(f"{shard.path} is damaged: it holds id {ids.max()}, the vocabulary {shard.vocab_size}")
        return ids, shard.counts(begin, begin + count)


def open_folder(folder: str, held_out: float | None = None) -> tuple[TokenSet, TokenSet | None]:
    """The documents of a prepared folder.

    Args:
        folder: of `llama-train prepare`.
        held_out: part of the documents to set apart, chosen by their numbers, always the same; None: none.

    Returns:
        (documents to train on, those set apart).

    Raises:
        ValueError: no such folder, one that is not finished or damaged, or too few documents to divide.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"{folder} does not exist; `llama-train prepare` makes such folders")
    if not (path / INDEX).is_file():
        raise ValueError(f"{folder} holds no finished shards: start its `llama-train prepare` command again")
    index: Any = read_json(path / INDEX)
    try:
        shards = [read_shard(path / shard["name"]) for shard in index["shards"]]
        wrong = [shard.path for shard in shards if shard.tokenizer != index["tokenizer"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path / INDEX} is damaged: {error!r}") from None
    if wrong:
        raise ValueError(f"{wrong[0]} was made by another tokenizer than {path / INDEX} says")
    if not shards or not sum(len(shard.tokens) for shard in shards):
        raise ValueError(f"{folder} holds no token")
    if held_out is None:
        return TokenSet(folder, shards), None
    count = sum(len(shard.ends) for shard in shards)
    if count < 2:
        raise ValueError(f"{folder} holds a single document; name other held-out data with data.held_out")
    apart = np.sort(permute(np.arange(min(max(1, round(held_out * count)), count - 1)), count, key=0))
    rest = np.setdiff1d(np.arange(count), apart, assume_unique=True)
    return TokenSet(folder, shards, rest), TokenSet(folder, shards, apart)
