"""`llama-train prepare`: inputs to a folder of token shards, resumable after any stop.

Reading is in order and a shard's end depends on the documents alone, so a run that was killed and started again writes
the same bytes: each shard's header says where its successor begins to read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llama_core import load_tokenizer
from llama_train.locate import locate

from .encode import Encoded, Encoder, cuts_are_exact
from .inputs import Input, find_inputs
from .items import Item, read_items
from .prepared_folder import INDEX, TOKENIZER, begin_folder, locked, read_json, write_json
from .settings import PrepareConfig
from .shard import id_type, read_shard, write_shard
from .workers import Task, encode_all

_TASK_BYTES, _TASK_ITEMS = 2**19, 1024
_SHOWN = 20  # bad lines that are told one by one


@dataclass(frozen=True)
class Totals:
    """What a finished folder holds."""

    shards: int
    documents: int
    tokens: int
    bytes: int
    skipped: int
    """Lines that could not be read."""


@dataclass
class _Position:
    """Where reading goes on: input number, place in it, line number there; and what came before."""

    source: int = 0
    offset: int = 0
    line: int = 1
    read: int = 0
    skipped: int = 0


@dataclass
class _Pending:
    """The shard that is being filled."""

    ids: list[NDArray[Any]] = field(default_factory=list)
    counted: list[NDArray[np.bool_] | None] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    tokens: int = 0

    def add(self, parts: list[Encoded]) -> None:
        for part in parts:
            self.ids.append(part.ids)
            self.counted.append(part.counted)
            self.tokens += len(part.ids)
        self.ends.append(self.tokens)
        self.sizes.append(sum(part.size for part in parts))

    def mask(self) -> NDArray[np.bool_] | None:
        if all(part is None for part in self.counted):
            return None
        pairs = zip(self.ids, self.counted)
        return np.concatenate([np.ones(len(a), dtype=np.bool_) if b is None else b for a, b in pairs])


def make_shards(
    config: PrepareConfig,
    note: Callable[[str], None] = lambda text: None,
    advance: Callable[[int, int], None] = lambda source, progress: None,
) -> Totals:
    """Write the shards, or those that are still missing.

    Args:
        config: inputs, tokenizer, output.
        note: receives a line for each thing worth telling.
        advance: receives (number of the input, bytes or rows read of it).

    Raises:
        ValueError: wrong settings, unreadable input, a bad line with on_bad_line = "fail", or a folder that was begun
            with other settings or other inputs.
        OSError: the disk is full; the shards that were finished stay.
    """
    tokenizer = load_tokenizer(locate(config.tokenizer))
    encoder = Encoder(tokenizer, config)
    sources = find_inputs(config)
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock"):
        begin_folder(folder, config, sources, tokenizer.fingerprint)
        if (folder / INDEX).is_file():
            note(f"complete   {folder} holds all of it already")
            return _totals(folder)
        tokenizer.save(folder / TOKENIZER)
        for left in folder.glob(".shard-*.tmp"):  # of a process that was killed
            left.unlink()
        names, position = _finished(folder)
        if names:
            note(f"resumed    after {len(names)} shards, {position.read:,} documents")
        writer = _Writer(folder, config, tokenizer.vocab_size, tokenizer.fingerprint, sources, note, names, position)
        results = encode_all(_tasks(sources, config, position, cuts_are_exact(tokenizer), advance), encoder,
                             folder / TOKENIZER, config)  # fmt: skip
        try:
            for items, encoded in results:
                writer.take(items, encoded)
                if writer.full:
                    break
        finally:
            results.close()  # type: ignore[attr-defined]  # a generator: its processes end here
        return writer.finish()


class _Writer:
    """Takes encoded records in order, joins pieces, and writes each shard as soon as it is full."""

    def __init__(
        self,
        folder: Path,
        config: PrepareConfig,
        vocab_size: int,
        fingerprint: str,
        sources: list[Input],
        note: Callable[[str], None],
        names: list[str],
        position: _Position,
    ) -> None:
        self.folder, self.config, self.sources, self.note, self.names = folder, config, sources, note, names
        self.vocab_size, self.fingerprint, self.position = vocab_size, fingerprint, position
        self.pending, self.parts = _Pending(), list[Encoded]()
        self.bad: str | None = None  # why the document whose pieces are coming cannot be read
        self.full = config.limit is not None and position.read >= config.limit

    def take(self, items: list[Item], encoded: list[Encoded | str]) -> None:
        for item, result in zip(items, encoded, strict=True):
            if self.full:
                return
            if isinstance(result, str):
                if self.bad is None:
                    self._report(item, result)
                self.bad, self.parts = result, []
            elif self.bad is None:
                self.parts.append(result)
            if item.ends:
                self._end_document(item)

    def _end_document(self, item: Item) -> None:
        self.position.source, self.position.offset, self.position.line = item.source, item.offset, item.next_line
        if self.bad is None and any(len(part.ids) for part in self.parts):
            self.pending.add(self.parts)
            self.position.read += 1
            self.full = self.position.read == self.config.limit
        self.bad, self.parts = None, []
        if self.pending.tokens >= self.config.shard_tokens:
            self._write()

    def _report(self, item: Item, reason: str) -> None:
        where = self.sources[item.source].name
        line = f"{'standard input' if where == '-' else where}:{item.line}: {reason}"
        if self.config.on_bad_line == "fail":
            raise ValueError(f"{line} (--on-bad-line skip goes on without such lines)")
        self.position.skipped += 1
        if self.position.skipped <= _SHOWN:
            more = "; further ones are counted only" if self.position.skipped == _SHOWN else ""
            self.note(f"skipped    {line}{more}")

    def _write(self) -> None:
        pending, self.pending = self.pending, _Pending()
        name = f"shard-{len(self.names):05d}.tokens"
        write_shard(
            self.folder / name,
            np.concatenate(pending.ids),
            np.asarray(pending.ends, dtype=np.uint64),
            np.asarray(pending.sizes, dtype=np.uint64),
            pending.mask(),
            vocab_size=self.vocab_size,
            tokenizer=self.fingerprint,
            facts=asdict(self.position),
        )
        self.names.append(name)

    def finish(self) -> Totals:
        if self.pending.tokens:
            self._write()
        if not self.names:
            raise ValueError(f"no document was found in {', '.join(item.name for item in self.sources[:3])}")
        shards: list[dict[str, object]] = []
        for name in self.names:
            shard = read_shard(self.folder / name)
            sizes = {"tokens": len(shard.tokens), "documents": len(shard.ends), "bytes": int(shard.bytes.sum())}
            shards.append({"name": name, **sizes})
        facts: dict[str, object] = {
            "tokenizer": self.fingerprint,
            "vocab_size": self.vocab_size,
            "dtype": id_type(self.vocab_size).name,
            "skipped": self.position.skipped,
            "shards": shards,
        }
        write_json(self.folder / INDEX, facts)
        return _totals(self.folder)


def _tasks(
    sources: list[Input], config: PrepareConfig, start: _Position, cuts: bool, advance: Callable[[int, int], None]
) -> Iterator[Task]:
    first, offset, line = start.source, start.offset, start.line
    for number in range(first, len(sources)):
        source = sources[number]
        kind = {"text": "text", "jsonl": "json"}.get(source.kind, "rows")
        at, at_line = (offset, line) if number == first else (0, 1)
        held: list[Item] = []
        size = 0
        for item in read_items(source, number, config, at, at_line, cuts):
            held.append(item)
            size += len(item.data) if isinstance(item.data, bytes) else 2048
            if size >= _TASK_BYTES or len(held) >= _TASK_ITEMS:
                advance(number, item.progress)
                yield kind, held
                held, size = [], 0
        if held:
            yield kind, held
        advance(number, -1)


def _finished(folder: Path) -> tuple[list[str], _Position]:
    """The shards that an earlier start wrote, and where the last of them ended."""
    names: list[str] = []
    position = _Position()
    while (folder / (name := f"shard-{len(names):05d}.tokens")).exists():
        position = _Position(**read_shard(folder / name).facts)
        names.append(name)
    return names, position


def _totals(folder: Path) -> Totals:
    index = read_json(folder / INDEX)
    sums = {key: sum(shard[key] for shard in index["shards"]) for key in ("documents", "tokens", "bytes")}
    return Totals(len(index["shards"]), **sums, skipped=index["skipped"])


def run_prepare(config: PrepareConfig) -> None:
    """The command: prints what is found, a progress bar on a terminal, and the totals."""
    from .progress import show_progress

    begun = time.perf_counter()
    with show_progress(config) as (note, advance):
        totals = make_shards(config, note, advance)
    seconds = time.perf_counter() - begun
    skipped = f", {totals.skipped:,} lines skipped" if totals.skipped else ""
    note(
        f"prepared   {totals.documents:,} documents, {totals.tokens:,} tokens of {totals.bytes:,} bytes{skipped}, in "
        f"{totals.shards} shard{'' if totals.shards == 1 else 's'}, {seconds:.1f} s: {config.output}"
    )
