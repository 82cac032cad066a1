"""Files and folders that appear complete or not at all.

Everything is written beside the target under a hidden name and renamed at the end. An error on the way (a full disk,
an interrupt) removes what was written; a killed process leaves a hidden `.NAME.….tmp` and no half target.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO

from .errors import CheckpointError


@contextmanager
def new_folder(path: str | Path, overwrite: bool = False, stale: Sequence[str] = ()) -> Iterator[Path]:
    """A hidden folder to write into, which becomes `path` when the block ends without an error.

    Args:
        path: must not exist or be an empty folder, unless `overwrite`.
        overwrite: replace the files of an existing folder; others in it stay, except those that match `stale`.
        stale: patterns of file names that must not survive from the old folder.

    Raises:
        CheckpointError: `path` is a file, or a folder with something in it and `overwrite` is false.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file; a folder is to be written there")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise CheckpointError(f"{target} is not empty; choose another folder, or ask for overwriting")
    target.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex[:12]
    hidden, old = (target.parent / f".{target.name}.{mark}.{end}" for end in ("tmp", "old"))
    hidden.mkdir()
    try:
        yield hidden
        for file in hidden.rglob("*"):
            if file.is_file():
                _flush(file)
        if target.is_dir() and any(target.iterdir()):
            _carry_over(target, hidden, stale)
            os.rename(target, old)
        try:
            os.rename(hidden, target)
        except OSError:
            if old.exists():
                os.rename(old, target)
            raise
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def new_file(path: str | Path, overwrite: bool = False) -> Iterator[BinaryIO]:
    """A hidden file to write into, which becomes `path` when the block ends without an error.

    Raises:
        CheckpointError: `path` exists and `overwrite` is false, or it is a folder.
    """
    target = Path(path).resolve()
    if target.is_dir():
        raise CheckpointError(f"{target} is a folder; a file is to be written there")
    if target.exists() and not overwrite:
        raise CheckpointError(f"{target} exists; choose another name, or ask for overwriting")
    target.parent.mkdir(parents=True, exist_ok=True)
    hidden = target.parent / f".{target.name}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        with open(hidden, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(hidden, target)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise


def _flush(file: Path) -> None:
    descriptor = os.open(file, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _carry_over(old: Path, new: Path, stale: Sequence[str]) -> None:
    """Link what the new folder does not replace; copy where the file system has no hard links."""

    def skip(folder: str, names: list[str]) -> set[str]:
        if Path(folder) != old:
            return set()
        return {name for name in names if (new / name).exists() or any(fnmatch(name, pattern) for pattern in stale)}

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError:
            shutil.copy2(source, target, follow_symlinks=False)

    shutil.copytree(old, new, symlinks=True, ignore=skip, copy_function=link, dirs_exist_ok=True)
