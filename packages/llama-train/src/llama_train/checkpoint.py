"""Checkpoints that are whole or absent: torch.distributed.checkpoint into a hidden folder, then one rename.

A checkpoint is a folder step-00000500 with DCP's files and manifest.json, which lists size and SHA-256 of each. A
save that is killed, or runs out of disk, leaves a hidden folder that no reader takes for a checkpoint and the next
save removes; the checkpoints before it are not touched until the new one stands.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from .world import ALONE, World

_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial-"
_FORMAT = 2  # 1 had bfloat16 weights beside their float32 masters


class SaveError(RuntimeError):
    """A checkpoint could not be written; earlier ones are intact."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk: its folder, and how many optimizer steps had been made."""

    path: Path
    step: int


def save_checkpoint(folder: Path, step: int, tensors: dict[str, Tensor], keep: int, world: World = ALONE) -> Checkpoint:
    """Write a checkpoint and remove all but the newest `keep`.

    With several processes each writes its own shards; rank 0 gives the checkpoint its name after all have written.

    Args:
        folder: holds all checkpoints of a run; made if absent. All processes must see the same one.
        step: optimizer steps made.
        tensors: everything to save, by name; DTensors where a process has a part only.
        keep: at least 1.
        world: the processes, all of which make this call.

    Raises:
        SaveError: the disk is full or not writable, for one process at least; earlier checkpoints are intact.
    """
    final = folder / f"step-{step:08d}"
    partial = folder / (_PARTIAL + final.name)
    try:
        world.main_does(lambda: _make_room(folder))
        with warnings.catch_warnings():
            # One process needs no process group; DCP says so each time.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            save(tensors, checkpoint_id=partial, no_dist=world.control is None, process_group=world.control)
        own = world.all_do(lambda: _fingerprints(partial, world))
        files = {name: entry for entries in world.gather(own) for name, entry in entries.items()}
        world.main_does(lambda: _commit(partial, final, step, dict(sorted(files.items()))))
    except (OSError, RuntimeError, CheckpointException) as error:
        world.barrier()  # nobody writes any more
        if world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise SaveError(f"step {step} could not be saved in {folder}: {_reason(error)}") from error
    if world.is_main:
        # Later steps than this one are of checkpoints that were found damaged: they must not push the whole ones out.
        for old in [checkpoint for checkpoint in list_checkpoints(folder) if checkpoint.step <= step][:-keep]:
            shutil.rmtree(old.path)
    return Checkpoint(final, step)


def load_checkpoint(checkpoint: Checkpoint, tensors: dict[str, Tensor], world: World = ALONE) -> None:
    """Fill `tensors` in place from a checkpoint, of whatever layout; DTensors get their part.

    Raises:
        ValueError: the checkpoint holds other names or shapes.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            load(tensors, checkpoint_id=checkpoint.path, no_dist=world.control is None, process_group=world.control)
    except (RuntimeError, ValueError, KeyError, CheckpointException) as error:
        raise ValueError(f"{checkpoint.path} does not fit this model: {_reason(error)}") from error


def stored_names(checkpoint: Checkpoint) -> frozenset[str]:
    """What it holds, by name."""
    return frozenset(FileSystemReader(checkpoint.path).read_metadata().state_dict_metadata)


def newest_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint whose files are all as they were written.

    Returns:
        (checkpoint or None, why newer ones were passed over, a line each).
    """
    passed_over: list[str] = []
    for checkpoint in reversed(list_checkpoints(folder)):
        fault = _fault(checkpoint)
        if fault is None:
            return checkpoint, passed_over
        passed_over.append(f"{checkpoint.path} is passed over: {fault}")
    return None, passed_over


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """All checkpoints by their step, oldest first; their files are not looked at."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return sorted((Checkpoint(path, int(match[1])) for match, path in found), key=lambda checkpoint: checkpoint.step)


def _fault(checkpoint: Checkpoint) -> str | None:
    path = checkpoint.path / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT:
            return f"it has format {manifest['format']}, this version reads {_FORMAT}"
        for name, expected in manifest["files"].items():
            if _fingerprint(checkpoint.path / name) != expected:
                return f"{name} is not as it was written"
        return None if manifest["step"] == checkpoint.step else f"manifest.json is of step {manifest['step']}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"manifest.json cannot be read: {error}"


def _fingerprint(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": digest}


def _make_room(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name.startswith(_PARTIAL):
            shutil.rmtree(path)


def _fingerprints(partial: Path, world: World) -> dict[str, dict[str, object]]:
    """Of the files that this process wrote, which DCP calls __RANK_NUMBER.distcp; rank 0 writes the rest too."""
    others = tuple(f"__{rank}_" for rank in range(world.size) if rank != world.process.rank)
    mine = f"__{world.process.rank}_"
    names = [path.name for path in sorted(partial.iterdir())]
    own = [name for name in names if name.startswith(mine) or (world.is_main and not name.startswith(others))]
    return {name: _fingerprint(partial / name) for name in own}


def _commit(partial: Path, final: Path, step: int, files: dict[str, dict[str, object]]) -> None:
    for name in files:
        if not (partial / name).exists():
            raise OSError(f"{partial / name} was written by another host, and is not here: the folder must be shared")
    _write(partial / "manifest.json", json.dumps({"format": _FORMAT, "step": step, "files": files}, indent=2) + "\n")
    _sync(partial)
    if final.exists():  # saved before, and the run went back: the same step of the same run
        shutil.rmtree(final)
    partial.rename(final)
    _sync(final.parent)


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    # A rename survives a power cut only once the folder itself is on disk.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException | None) -> str:
    """The cause in a line."""
    failures = getattr(error, "failures", None)  # DCP wraps what went wrong in its own exception, by rank
    if failures:
        inner = next(iter(failures.values()))
        error = inner[0] if isinstance(inner, tuple) else inner
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    # torch's file writer fails once more while it closes the file that the disk refused, and that is the error raised.
    cause = next((link for link in chain if isinstance(link, OSError) and link.strerror), chain[0])
    text = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause).strip()
    return text.splitlines()[0] if text else type(cause).__name__
