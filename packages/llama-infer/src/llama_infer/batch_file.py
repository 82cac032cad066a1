"""Prompts in, results out, a JSON object on each line; killed and started again, it goes on where it was.

Finished results go to a journal beside the output, each in one write. When all lines are done, the output appears at
once, complete and in the order of the input, and the journal goes. A result counts for a line only where the line's
text, the settings and the model are what they were (`Task.key`), so an input may be corrected or grow between two
starts: what has changed is done anew.

No torch here: a mistake must not wait for it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

PROMPTS = ("prompt", "messages", "prompt_token_ids")
"""A line has one of these; beside it an `id`, which is handed back, and sampling settings."""


@dataclass(frozen=True, eq=False)
class Task:
    """A line of the input."""

    line: int
    """Its number, from 1."""
    key: str
    """Of its text and of everything else that decides the result."""
    fields: Mapping[str, Any]
    """Empty where it has an error."""
    error: str | None = None
    """Why it cannot be done."""

    def head(self) -> dict[str, Any]:
        """What a result begins with."""
        kept = {name: self.fields[name] for name in ("id", *PROMPTS) if name in self.fields}
        return {"line": self.line, "key": self.key, **kept}


def read_tasks(file: Iterable[bytes], settings: Mapping[str, Any]) -> Iterator[Task]:
    """The lines of an input, blank ones left out.

    Args:
        file: lines of UTF-8.
        settings: whatever beside a line decides its result.
    """
    beside = json.dumps(settings, sort_keys=True, default=str).encode()
    for number, raw in enumerate(file, start=1):
        line = (raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw).strip()
        if line:
            key = hashlib.sha256(beside + b"\n" + line).hexdigest()[:16]
            try:
                yield Task(number, key, _fields(line))
            except (ValueError, RecursionError) as error:
                yield Task(number, key, {}, str(error))


def _fields(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(found, dict):
        raise ValueError(f"a JSON object is wanted, got {text[:40]}")
    given = [name for name in PROMPTS if name in found]
    if len(given) != 1:
        raise ValueError(f"one of {', '.join(PROMPTS)} is wanted, got {', '.join(given) or 'none of them'}")
    value = found[given[0]]
    if not isinstance(value, str if given[0] == "prompt" else list):
        raise ValueError(
            f"{given[0]} must be a {'text' if given[0] == 'prompt' else 'list'}, got {json.dumps(value)[:40]}"
        )
    return found


class Journal:
    """Results so far, on disk; where each begins is all that is held in memory. Made by `open_journal`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._begins: dict[tuple[int, str], int] = {}
        end = 0
        for raw in file:
            try:
                result = json.loads(raw)
                if raw.endswith(b"\n") and "error" not in result:  # what failed is tried again
                    self._begins[result["line"], result["key"]] = end
            except (ValueError, TypeError, KeyError):  # what a crash of the system may leave
                pass
            end += len(raw)
            if not raw.endswith(b"\n"):  # written half when the process was killed
                end -= len(raw)
        file.truncate(end)
        file.seek(end)

    def __contains__(self, task: Task) -> bool:
        return (task.line, task.key) in self._begins

    def add(self, task: Task, result: Mapping[str, Any]) -> None:
        """Keep a result, in one write."""
        begin = self._file.seek(0, os.SEEK_END)
        self._file.write(_line(result))
        self._file.flush()
        self._begins[task.line, task.key] = begin

    def finish(self, tasks: Iterable[Task], output: Path) -> None:
        """Write the results of these tasks, in their order, as the output, which appears complete."""
        hidden = output.with_name(f".{output.name}.tmp")
        try:
            with open(hidden, "wb") as file:
                for task in tasks:
                    self._file.seek(self._begins[task.line, task.key])
                    file.write(self._file.readline())
                file.flush()
                os.fsync(file.fileno())
            os.replace(hidden, output)
        except BaseException:
            hidden.unlink(missing_ok=True)
            raise


@contextmanager
def open_journal(output: Path) -> Iterator[Journal]:
    """The journal beside an output; removed at the end if the output exists by then.

    Raises:
        ValueError: another process writes it.
    """
    path = journal_path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as file:
        _lock(file, path)
        yield Journal(file)
        path.unlink(missing_ok=True)


def journal_path(output: Path) -> Path:
    return output.with_name(output.name + ".journal")


def errors_in(output: Path, tasks: Iterable[Task]) -> int | None:
    """How many of these tasks have errors in an output that is complete; None where there is no output.

    Raises:
        ValueError: there is one, of other tasks. It is never overwritten.
    """
    if not output.exists():
        return None
    with open(output, "rb") as file:
        found = [_place(raw) for raw in file]
    if [place[:2] for place in found] != [(task.line, task.key) for task in tasks]:
        raise ValueError(
            f"{output} exists, and not from this input, model and settings; move it, or choose another --output"
        )
    return sum(failed for _, _, failed in found)


def _place(raw: bytes) -> tuple[Any, Any, bool]:
    try:
        result = json.loads(raw)
        return result["line"], result["key"], "error" in result
    except (ValueError, TypeError, KeyError):
        return None, None, True


def _line(result: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(result, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, which the input has as \ud800
        return json.dumps(result).encode() + b"\n"


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(f"{path} is being written by another process") from None
