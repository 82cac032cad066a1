"""The folder of a run: what lies where, and when a folder that exists may be used again. Nothing of it is ever
deleted here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from .checkpoint import list_checkpoints
from .config import TrainConfig
from .config_file import dump_config, load_config
from .manage.run_files import JOBS
from .manage.run_files import run_path as run_path
from .provenance import write_start
from .world import World

_LOCK = ".lock"
_OTHER = "choose another name with --name or another folder with --folder"


@dataclass(frozen=True)
class RunFolder:
    """Paths within a run folder."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved settings; `llama-train run` on it repeats the run."""
        return self.path / "config.toml"

    @property
    def starts(self) -> Path:
        """What every start was made with: command, versions, revision, devices; one JSON object a line."""
        return self.path / "starts.jsonl"

    @property
    def data(self) -> Path:
        """Tokenizer and token files."""
        return self.path / "data"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints, a folder each."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The figures of the console lines, one JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def traces(self) -> Path:
        """What [profile] asks for."""
        return self.path / "traces"

    @property
    def export(self) -> Path:
        """The finished model in Hugging Face's format."""
        return self.path / "hf"


@contextmanager
def open_run_folder(config: TrainConfig) -> Iterator[tuple[RunFolder, list[str]]]:
    """Make the run folder, or check that an existing one is of this run, and write the settings into it.

    While the context lasts, no other process can open the same folder.

    Args:
        config: resolved, that is with no "auto" left in device and dtype.

    Yields:
        (the folder, settings that differ from those of the last start, a line each).

    Raises:
        ValueError: the folder exists and may not be used: it is no run folder, `resume` is "never", another process
            uses it, or its checkpoints are of another model, other data or another seed.
    """
    run = RunFolder(run_path(config))
    if run.path.exists() and not run.path.is_dir():
        raise ValueError(f"{run.path} is a file, not a run folder: {_OTHER}")
    _check_usable(run, config)  # before anything is made in a folder that is not ours
    run.path.mkdir(parents=True, exist_ok=True)
    with _locked(run.path / _LOCK):
        changes = _check_usable(run, config)  # again: another process may have been here until now
        temporary = run.config.with_suffix(".tmp")
        temporary.write_text(dump_config(config), encoding="utf-8")
        temporary.replace(run.config)
        write_start(run.starts, config)
        yield run, changes


@contextmanager
def share_run_folder(config: TrainConfig, world: World) -> Iterator[tuple[RunFolder, list[str]]]:
    """`open_run_folder` by rank 0, for all."""
    with ExitStack() as stack:
        changes = world.main_does(lambda: stack.enter_context(open_run_folder(config))[1])
        yield RunFolder(run_path(config)), changes


def _check_usable(run: RunFolder, config: TrainConfig) -> list[str]:
    """Settings that changed since the last start; ValueError where the folder may not be used."""
    if not run.path.is_dir() or all(path.name in (_LOCK, JOBS) for path in run.path.iterdir()):
        return []
    if not run.config.is_file():
        raise ValueError(f"{run.path} exists and is no run folder (it has no config.toml): {_OTHER}")
    if config.resume == "never":
        raise ValueError(f"{run.path} exists: continue that run with --resume auto, or {_OTHER}")
    if config.checkpoint.export and run.export.exists() and not run.export.is_dir():
        raise ValueError(f"{run.export} is a file, and the finished model is to be written there: move it away")
    before = load_config(run.config)
    if not list_checkpoints(run.checkpoints):
        return []
    wrong, changed = what_differs(before, config)
    if wrong:
        raise ValueError(f"{run.path} holds another run ({'; '.join(wrong)}): set that back, or {_OTHER}")
    return changed


def what_differs(before: TrainConfig, now: TrainConfig) -> tuple[list[str], list[str]]:
    """Settings that must not change within a run and did, and those that may; a line each.

    Args:
        before, now: resolved.
    """
    return _differences(_fixed(before), _fixed(now)), _differences(_free(before), _free(now))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with the process, however it ends. Where the system has none, go without."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path.parent} is in use by another process: wait, or choose another name") from None
        except OSError:
            pass  # a network file system without locks
        yield


def _fixed(config: TrainConfig) -> dict[str, object]:
    """What must not change within a run: the saved numbers would mean something else."""
    data = config.data
    return {
        "seed": config.seed,
        "dtype": config.dtype,
        "optimizer.master_weights": config.optimizer.master_weights,
        **{f"model.{key}": value for key, value in vars(config.model).items()},
        **{f"lora.{key}": value for key, value in vars(config.lora).items()},
        "data.source": data.source,
        "data.sources": data.sources,
        "data.weights": data.weights,
        "data.held_out": data.held_out,
        "data.packing": data.packing,
        "data.mask_documents": data.mask_documents,
        "data.suffixes": data.suffixes,
        "data.held_out_fraction": data.held_out_fraction,
        "data.tokenizer": data.tokenizer,
        "data.vocab_size": data.vocab_size,
        "data.sequence_length": data.sequence_length,
        "data.micro_batch_size * data.gradient_accumulation_steps * data-parallel processes": config.rows_per_step,
    }


def _free(config: TrainConfig) -> dict[str, object]:
    """What may change, and is worth a line when it does, because later steps follow the new value."""
    return {
        f"{name}.{key}": value
        for name, section in (
            ("optimizer", config.optimizer),
            ("schedule", config.schedule),
            ("parallel", config.parallel),
        )
        for key, value in vars(section).items()
    }


def _differences(before: dict[str, object], now: dict[str, object]) -> list[str]:
    return [f"{key} was {before[key]!r}, is {now[key]!r}" for key in before if before[key] != now[key]]
