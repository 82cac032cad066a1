"""Which files are read, in what order, and how a compressed one is opened."""

from __future__ import annotations

import glob
import gzip
import io
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from .settings import PrepareConfig

_COMPRESSED = (".gz", ".zst")
_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".txt": "text", ".md": "text"}
STANDARD_INPUT = "-"


@dataclass(frozen=True)
class Input:
    """One file, standard input or data set.

    Attributes:
        name: as it was found; "-" is standard input.
        kind: "text", "jsonl", "parquet" or "dataset".
        size: bytes on disk, 0 where there are none; a file that has changed is known by it.
    """

    name: str
    kind: str
    size: int


def find_inputs(config: PrepareConfig) -> list[Input]:
    """All inputs: in the order given, those of a folder or glob by name.

    Raises:
        ValueError: nothing is there, or a file's name does not tell what it holds.
    """
    if config.dataset is not None:
        parts = [config.dataset, config.subset or "", config.split]
        return [Input(":".join(parts), "dataset", 0)]
    found: list[Input] = []
    for pattern in config.inputs:
        if pattern == STANDARD_INPUT:
            if config.format not in ("text", "jsonl"):
                raise ValueError("standard input has no name to tell what it holds: say --format text or jsonl")
            found.append(Input(STANDARD_INPUT, config.format, 0))
            continue
        found += [_input(path, config.format) for path in _paths(pattern, config.format)]
    names = [item.name for item in found]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"{twice[0]} is named twice; every input is read once")
    return found


def _paths(pattern: str, kind: str) -> list[Path]:
    path = Path(pattern)
    if path.is_file():
        return [path]
    if path.is_dir():
        # In a folder only what is known by its name, or everything where the user says what it is.
        inside = [file for file in path.rglob("*") if file.is_file() and (kind != "auto" or _kind(file) is not None)]
        if not inside:
            raise ValueError(f"{pattern} holds no file whose name ends in {_endings()}; --format reads all of a folder")
        return sorted(inside)
    matches = sorted(Path(name) for name in glob.glob(pattern, recursive=True) if Path(name).is_file())
    if not matches:
        raise ValueError(f"{pattern}: there is no such file or folder, and no file's name has that pattern")
    return matches


def _input(path: Path, kind: str) -> Input:
    known = _kind(path)
    if kind == "auto":
        # A name given in full is text unless it says otherwise: source code, logs, files without ending.
        kind = known or "text"
    return Input(str(path), kind, path.stat().st_size)


def _kind(path: Path) -> str | None:
    name = path.name.lower()
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    return _KINDS.get(Path(name).suffix)


def _endings() -> str:
    return ", ".join(sorted(_KINDS)) + f" (or these and {' or '.join(_COMPRESSED)})"


def extra(module: str, extra_name: str, purpose: str) -> Any:
    """A package that only this purpose needs.

    Raises:
        ValueError: it is not installed; the message says which extra brings it.
    """
    try:
        return import_module(module)
    except ImportError:
        raise ValueError(
            f"{purpose} needs the {module.partition('.')[0]} package: pip install 'llama-train[{extra_name}]'"
        ) from None


@contextmanager
def open_stream(source: Input, offset: int) -> Iterator[BinaryIO]:
    """The bytes of a text or JSONL input from `offset` on, counted after decompression.

    Raises:
        ValueError: the file cannot be read, or a compressed one is damaged.
    """
    name = "standard input" if source.name == STANDARD_INPUT else source.name
    try:
        if source.name == STANDARD_INPUT:
            _skip(sys.stdin.buffer, offset)
            yield sys.stdin.buffer
            return
        with open(source.name, "rb") as file:
            ending = Path(source.name).suffix.lower()
            if ending not in _COMPRESSED:
                file.seek(offset)
                yield file
                return
            with _decompressed(file, ending) as stream:
                _skip(stream, offset)
                yield stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{name} is damaged: {error}") from None
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror or error}") from None


def bytes_read(stream: BinaryIO) -> int:
    """How far the file beneath a stream has been read, for the progress bar; 0 where the system cannot say."""
    try:
        raw: Any = stream
        while isinstance(raw, io.BufferedReader | gzip.GzipFile) and not hasattr(raw, "name"):
            raw = raw.raw if isinstance(raw, io.BufferedReader) else raw.fileobj
        return os.lseek(raw.fileno(), 0, os.SEEK_CUR)
    except (OSError, AttributeError, ValueError, io.UnsupportedOperation):
        return 0


def _decompressed(file: BinaryIO, ending: str) -> Any:
    if ending == ".gz":
        return gzip.GzipFile(fileobj=file, mode="rb")
    zstandard = extra("zstandard", "zstd", "reading .zst files")
    return _ZstdFile(zstandard, file)


class _ZstdFile(io.BufferedReader):
    """A .zst file with all its frames; damage is an EOFError, as gzip's."""

    def __init__(self, zstandard: Any, file: BinaryIO) -> None:
        super().__init__(_ZstdRaw(zstandard, file), 1 << 20)


class _ZstdRaw(io.RawIOBase):
    def __init__(self, zstandard: Any, file: BinaryIO) -> None:
        self._fault = zstandard.ZstdError
        self._file = file
        self._new = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj
        self._frame = self._new()
        self._input = self._output = b""
        self._inside = False  # a frame has begun and not ended

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            data = self._input or self._file.read(1 << 18)
            self._input = b""
            if not data:
                if self._inside:
                    raise EOFError("the compressed file ends in the middle")
                return 0
            try:
                self._inside = True
                self._output = self._frame.decompress(data)
            except self._fault as error:
                raise EOFError(str(error)) from None
            if self._frame.eof:
                self._input, self._frame, self._inside = self._frame.unused_data, self._new(), False
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size


def _skip(stream: BinaryIO, offset: int) -> None:
    while offset:
        data = stream.read(min(offset, 1 << 20))
        if not data:
            raise EOFError(f"it ends {offset} bytes before the place where reading stopped last time")
        offset -= len(data)
