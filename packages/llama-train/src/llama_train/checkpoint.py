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
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from .world import ALONE, World

_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial-"
_FORMAT = 2  # 1 had bfloat16 weights beside their float32 masters


_MOST_FILES = 4  # of a process, each written and read back by a thread
_BYTES_OF_A_FILE = 2**30


class SaveError(RuntimeError):
    """A checkpoint could not be written; earlier ones are intact."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk: its folder, and how many optimizer steps had been made."""

    path: Path
    step: int


class _Copied(DefaultSavePlanner):
    """Takes shapes and places from the live tensors, and values from copies of their local parts."""

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._copies = copies

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._copies[index.fqn]


@contextmanager
def quiet() -> Iterator[None]:
    """Around what calls DCP: one process needs no process group, and DCP would say so each time.

    Entered by the main thread, for a thread that writes too: the filters of warnings belong to all threads.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: dict[str, Tensor],
    keep: int,
    world: World = ALONE,
    *,
    keep_every: int = 0,
    copies: Mapping[str, Tensor] | None = None,
) -> Checkpoint:
    """Write a checkpoint and remove all but the newest `keep`, and those that stay for ever.

    With several processes each writes its own shards; rank 0 gives the checkpoint its name after all have written.

    Args:
        folder: holds all checkpoints of a run; made if absent. All processes must see the same one.
        step: optimizer steps made.
        tensors: everything to save, by name; DTensors where a process has a part only.
        keep: at least 1.
        world: the processes, all of which make this call.
        keep_every: checkpoints whose step is a multiple of it are never removed; 0 for none.
        copies: of the tensors' local parts, by the same names, on the CPU, where a thread makes this call beside the
            training that changes the tensors, whose values are not read then; the main thread has entered `quiet`.

    Raises:
        SaveError: the disk is full or not writable, for one process at least; earlier checkpoints are intact.
    """
    final = folder / f"step-{step:08d}"
    partial = folder / (_PARTIAL + final.name)
    try:
        world.main_does(lambda: _make_room(folder))
        nbytes = sum(_local(tensor).nbytes for tensor in tensors.values())
        threads = 1 + min(_MOST_FILES - 1, nbytes // _BYTES_OF_A_FILE)
        writer = FileSystemWriter(partial, thread_count=threads, per_thread_copy_ahead=0 if copies else 10_000_000)
        with quiet() if copies is None else nullcontext():
            save(
                tensors,
                checkpoint_id=partial,
                storage_writer=writer,
                planner=None if copies is None else _Copied(copies),
                no_dist=world.control is None,
                process_group=world.control,
            )
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
            if not keep_every or old.step % keep_every:
                shutil.rmtree(old.path)
    return Checkpoint(final, step)


def load_checkpoint(checkpoint: Checkpoint, tensors: dict[str, Tensor], world: World = ALONE) -> None:
    """Fill `tensors` in place from a checkpoint, of whatever layout; DTensors get their part.

    Raises:
        ValueError: the checkpoint holds other names or shapes.
    """
    try:
        with quiet():
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


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a folder that the user names: one itself, or a run, whose newest is taken.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        newest, passed_over = newest_checkpoint(path / "checkpoints")
        if newest is None:
            told = "".join(f"; {line}" for line in passed_over)
            raise ValueError(
                f"{path} is no checkpoint (such as RUN/checkpoints/step-00000500), and no run with one{told}"
            )
        return newest
    checkpoint = Checkpoint(path, int(match[1]))
    if (fault := _fault(checkpoint)) is not None:
        raise ValueError(f"{path} is no whole checkpoint: {fault}")
    return checkpoint


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
    with ThreadPoolExecutor(max_workers=_MOST_FILES) as pool:
        return dict(zip(own, pool.map(_fingerprint, [partial / name for name in own]), strict=True))


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


def _local(tensor: Tensor) -> Tensor:
    """This process's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
