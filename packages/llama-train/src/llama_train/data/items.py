"""An input as a sequence of raw records, each with the place where reading goes on after it.

This runs in one process and only cuts; decoding, parsing and tokenizing are the workers' (`encode.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .inputs import Input, bytes_read, extra, open_stream
from .settings import PrepareConfig

PIECE = 4 * 2**20
"""Bytes of a text document from which on it is cut into pieces that are encoded apart."""
_LONGEST_LINE = 2**30
_MARK = b"\xef\xbb\xbf"  # UTF-8's byte order mark, which Windows editors put before a text


@dataclass(frozen=True, slots=True)
class Item:
    """A raw record, or a piece of a long one.

    Attributes:
        data: a JSON line or text as bytes, or a row as a dict.
        line: number of its first line or row in the input, from 1.
        offset: the byte (after decompression) or row of the input where the next item begins.
        next_line: line number there.
        begins, ends: whether the item holds the beginning and the end of its document.
        progress: bytes of the file, or rows, read so far.
        source: number of the input.
    """

    data: Any
    line: int
    offset: int
    next_line: int
    begins: bool = True
    ends: bool = True
    progress: int = 0
    source: int = 0


def read_items(
    source: Input, number: int, config: PrepareConfig, offset: int = 0, line: int = 1, cuts: bool = True
) -> Iterator[Item]:
    """The records of an input from a place on that an earlier item named.

    Args:
        source: the input.
        number: goes into every item.
        cuts: whether long texts may be cut into pieces at line ends.

    Raises:
        ValueError: the input cannot be read, is damaged, or is not what its name says.
    """
    if source.kind == "parquet":
        items = _parquet_rows(source, offset)
    elif source.kind == "dataset":
        items = _dataset_rows(config, offset)
    else:
        items = _stream_items(source, config, offset, line, cuts)
    return (replace(item, source=number) for item in items)


def _stream_items(source: Input, config: PrepareConfig, offset: int, line: int, cuts: bool) -> Iterator[Item]:
    with open_stream(source, offset) as stream:
        lines = _lines(stream, source, line)
        if source.kind == "jsonl" or config.document == "line":
            for data in lines:
                progress = bytes_read(stream)
                offset, number, line = offset + len(data), line, line + 1
                if number == 1:
                    data = data.removeprefix(_MARK)
                if source.kind == "text":
                    data = data.rstrip(b"\r\n")
                if data.strip():
                    yield Item(data, number, offset, line, progress=progress)
            return
        yield from _documents(lines, stream, config, offset, line, cuts)


def _documents(
    lines: Iterator[bytes], stream: Any, config: PrepareConfig, offset: int, line: int, cuts: bool
) -> Iterator[Item]:
    """Text documents of many lines. A line that parts two documents belongs to neither."""
    separator = None if config.separator is None else config.separator.encode()
    by_paragraph = config.document == "paragraph"
    held: list[bytes] = []
    size, first, begins = 0, line, True
    for data in lines:
        bare = data.rstrip(b"\r\n")
        if (separator is not None and bare == separator) or (by_paragraph and not bare.strip()):
            offset, line = offset + len(data), line + 1
            if held or not begins:
                yield Item(b"".join(held), first, offset, line, begins, True, bytes_read(stream))
            held, size, first, begins = [], 0, line, True
            continue
        # A tokenizer's words end at a line's end, unless the next line goes on with white space.
        if cuts and size >= PIECE and not data[:1].isspace():
            yield Item(b"".join(held), first, offset, line, begins, False, bytes_read(stream))
            held, size, first, begins = [], 0, line, False
        offset, line, size = offset + len(data), line + 1, size + len(data)
        held.append(data.removeprefix(_MARK) if line == 2 else data)
    if held or not begins:
        yield Item(b"".join(held), first, offset, line, begins, True, bytes_read(stream))


def _lines(stream: Any, source: Input, line: int) -> Iterator[bytes]:
    while data := stream.readline(_LONGEST_LINE):
        if len(data) == _LONGEST_LINE and not data.endswith(b"\n"):
            raise ValueError(f"{source.name}:{line}: a line of more than {_LONGEST_LINE} bytes; is this text?")
        yield data
        line += 1


def _parquet_rows(source: Input, offset: int) -> Iterator[Item]:
    parquet = extra("pyarrow.parquet", "parquet", "reading Parquet files")
    arrow = extra("pyarrow", "parquet", "reading Parquet files")
    try:
        file = parquet.ParquetFile(source.name)
        row = 0
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if row + size <= offset:  # read by an earlier start
                row += size
                continue
            for batch in file.iter_batches(batch_size=256, row_groups=[group]):
                for record in batch.to_pylist():
                    row += 1
                    if row > offset:
                        yield Item(record, row, row, row + 1, progress=row)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{source.name} cannot be read as Parquet: {str(error).splitlines()[0]}") from None


def _dataset_rows(config: PrepareConfig, offset: int) -> Iterator[Item]:
    datasets = extra("datasets", "hub", "reading Hugging Face data sets")
    try:
        rows = datasets.load_dataset(config.dataset, config.subset, split=config.split, streaming=True)
        rows = rows.skip(offset) if offset else rows
        for row, record in enumerate(rows, start=offset + 1):
            yield Item(dict(record), row, row, row + 1, progress=row)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        text = str(error).strip().splitlines()
        raise ValueError(f"data set {config.dataset!r} cannot be read: {text[0] if text else error}") from None
