"""From text to token files in the run folder: once, and found again by a resumed run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .batches import Batch, TrainingRows, held_out_batches
from .config import DataConfig
from .corpus import Document, read_corpus, split_held_out
from .data.mixture import Mixture
from .data.open_sources import HeldOut, Sources, open_sources
from .tokenizer_training import BOS_TOKEN, EOS_TOKEN, save_tokenizer, train_tokenizer
from .tokens import TokenArray, read_tokens, write_tokens

_SETTINGS = ("source", "suffixes", "held_out_fraction", "tokenizer", "vocab_size")
_AT_ONCE = 64  # documents encoded together, by all cores


@dataclass(frozen=True)
class PreparedData:
    """What training reads, and where it lies."""

    tokenizer: Path
    """Folder with tokenizer.json."""
    train: TokenArray | Sources
    held_out: TokenArray | HeldOut
    vocab_size: int
    bos_id: int | None
    eos_id: int | None


def prepare(config: DataConfig, folder: Path, note: Callable[[str], None] = lambda text: None) -> PreparedData:
    """Make the tokenizer and the token files, unless the folder already holds those of the same settings.

    Each document becomes: begin token, text, end token. The tokenizer is learnt from the training part alone.

    Args:
        config: source, held-out part and tokenizer.
        folder: where files go; made if absent.
        note: receives one line for each thing done.

    Raises:
        ValueError: the source or the tokenizer cannot be read, or there is too little text.
    """
    if config.sources:
        opened = open_sources(config, note)
        data = PreparedData(
            opened.tokenizer, opened.train, opened.held_out, opened.vocab_size, opened.bos_id, opened.eos_id
        )
        return _told(data, note)
    settings = {key: value for key, value in asdict(config).items() if key in _SETTINGS}
    settings = json.loads(json.dumps(settings))  # tuples become lists, as they will be read back
    index = folder / "prepared.json"
    if not (index.exists() and _read_index(index)["settings"] == settings):
        folder.mkdir(parents=True, exist_ok=True)
        index.unlink(missing_ok=True)  # what it described is about to be replaced
        made = _make(config, folder, note)
        temporary = index.with_suffix(".tmp")
        temporary.write_text(json.dumps({"settings": settings, **made}, indent=2) + "\n", encoding="utf-8")
        temporary.replace(index)
    facts = _read_index(index)
    train, held_out = read_tokens(folder / "train.npy"), read_tokens(folder / "held_out.npy")
    tokenizer = folder / "tokenizer"
    return _told(PreparedData(tokenizer, train, held_out, facts["vocab_size"], facts["bos_id"], facts["eos_id"]), note)


def training_rows(data: PreparedData, config: DataConfig, seed: int) -> TrainingRows | Mixture:
    """The rows that training draws from.

    Raises:
        ValueError: too few tokens for a row of data.sequence_length.
    """
    if isinstance(data.train, Sources):
        return data.train.rows(config, seed)
    return TrainingRows(data.train, config.sequence_length, seed, data.bos_id)


def measuring_batches(
    data: PreparedData, config: DataConfig, rows: int, max_tokens: int | None = None
) -> Iterator[Batch]:
    """The held-out text once, or about `max_tokens` of it, in batches of up to `rows` rows."""
    if isinstance(data.held_out, HeldOut):
        return data.held_out.batches(config, rows, max_tokens)
    return held_out_batches(data.held_out, config.sequence_length, rows, data.bos_id, max_tokens)


def _told(data: PreparedData, note: Callable[[str], None]) -> PreparedData:
    found = f"{len(data.train):,} training and {len(data.held_out):,} held-out tokens, vocabulary {data.vocab_size:,}"
    note(f"data       {found}")
    return data


def _read_index(index: Path) -> dict[str, Any]:
    """What was prepared. Damage is an error and no reason to make it anew: the source may have changed since, and the
    checkpoints are of the old one."""
    try:
        facts = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{index} cannot be read: {error}") from None
    if not isinstance(facts, dict) or not {"settings", "vocab_size", "bos_id", "eos_id"} <= facts.keys():
        raise ValueError(f"{index} is damaged: remove it, and what lies beside it is made again")
    if not (index.parent / "tokenizer" / "tokenizer.json").is_file():
        raise ValueError(f"{index.parent / 'tokenizer'} has no tokenizer.json: remove {index} and it is made again")
    return facts


def _make(config: DataConfig, folder: Path, note: Callable[[str], None]) -> dict[str, object]:
    documents = read_corpus(config.source, config.suffixes)
    train, held_out = split_held_out(documents, config.held_out_fraction)
    characters = sum(len(document.text) for document in documents)
    note(f"text       {len(documents):,} documents, {characters:,} characters, {len(held_out):,} documents held out")
    if config.tokenizer is None:
        note(f"tokenizer  learning a vocabulary of {config.vocab_size:,}")  # the next line may take half a minute
        tokenizer = train_tokenizer((document.text for document in train), config.vocab_size)
        # No length limit: the model's is in config.json, and a reader that knows a second one would cut texts by it.
        save_tokenizer(tokenizer, folder / "tokenizer", max_length=10**30)
        bos, eos = tokenizer.token_to_id(BOS_TOKEN), tokenizer.token_to_id(EOS_TOKEN)
        encode = _encoder(tokenizer)
        vocab_size = tokenizer.get_vocab_size()
    else:
        from llama_core import load_tokenizer

        loaded = load_tokenizer(config.tokenizer)
        loaded.save(folder / "tokenizer")
        bos, eos = loaded.bos_id, loaded.eos_id
        vocab_size = loaded.vocab_size

        def encode(texts: list[str]) -> list[list[int]]:
            return [list(ids) for ids in loaded.encode_batch(texts, add_bos=False)]

    for name, part in (("train", train), ("held_out", held_out)):
        write_tokens(folder / f"{name}.npy", _documents(part, encode, bos, eos), vocab_size)
    digest = hashlib.sha256((folder / "tokenizer" / "tokenizer.json").read_bytes()).hexdigest()
    return {
        "documents": len(documents),
        "characters": characters,
        "held_out": [document.name for document in held_out],
        "tokenizer_sha256": digest,
        "vocab_size": vocab_size,
        "bos_id": bos,
        "eos_id": eos,
    }


def _encoder(tokenizer: Tokenizer) -> Callable[[list[str]], list[list[int]]]:
    # A text that spells a special token is text: the ids are those of its characters.
    tokenizer.encode_special_tokens = True

    def encode(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]

    return encode


def _documents(
    documents: Sequence[Document], encode: Callable[[list[str]], list[list[int]]], bos: int | None, eos: int | None
) -> Iterator[list[int]]:
    first, last = [] if bos is None else [bos], [] if eos is None else [eos]
    for start in range(0, len(documents), _AT_ONCE):
        for ids in encode([document.text for document in documents[start : start + _AT_ONCE]]):
            yield first + ids + last
