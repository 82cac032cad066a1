"""The folder of `llama-train prepare`: the names in it, its lock, and whether another start may go on in it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .inputs import Input
from .settings import PrepareConfig

PLAN, INDEX, TOKENIZER = "plan.json", "index.json", "tokenizer"
# What may differ between two starts of one preparation, because the shards do not depend on it.
_FREE = ("output", "tokenizer", "inputs", "on_bad_line", "workers", "progress")


def begin_folder(folder: Path, config: PrepareConfig, sources: list[Input], fingerprint: str) -> None:
    """Write down what the folder is going to hold, or check that it was begun for the same.

    Raises:
        ValueError: it holds other files, or was begun with other settings, another tokenizer or other inputs.
    """
    settings = {key: value for key, value in asdict(config).items() if key not in _FREE}
    plan = {"settings": settings, "tokenizer": fingerprint, "inputs": [asdict(source) for source in sources]}
    path = folder / PLAN
    if not path.exists():
        if any(item.name != ".lock" for item in folder.iterdir()):
            raise ValueError(f"{folder} holds other files: choose another --output")
        write_json(path, plan)
        return
    before = read_json(path)
    if before == plan:
        return
    wrong = [f"{key} was {before['settings'].get(key)!r}, is {value!r}" for key, value in settings.items()
             if before["settings"].get(key) != value]  # fmt: skip
    if before["tokenizer"] != fingerprint:
        wrong.append(f"the tokenizer was {before['tokenizer'][:12]}…, is {fingerprint[:12]}…")
    if before["inputs"] != plan["inputs"]:
        wrong.append("the inputs are not the same files of the same sizes")
    raise ValueError(f"{folder} was begun otherwise ({'; '.join(wrong)}): set that back, or choose another --output")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with the process, however it ends. ValueError where another process holds it."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path.parent} is in use by another process: wait for it") from None
        except OSError:
            pass  # a network file system without locks
        yield


def read_json(path: Path) -> Any:
    """A JSON file of a prepared folder.

    Raises:
        ValueError: damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def write_json(path: Path, value: Any) -> None:
    """The file appears whole, on disk and under its name, or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
