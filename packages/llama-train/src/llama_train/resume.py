"""Which checkpoint a run goes on from: the newest of its own, or that of another run which it branches off from."""

from __future__ import annotations

from pathlib import Path

from .checkpoint import Checkpoint, find_checkpoint, newest_checkpoint
from .config import TrainConfig
from .config_file import load_config
from .run_folder import RunFolder, what_differs

_FACTS = "prepared.json"  # numbers of documents and characters, hash of the tokenizer; shards have their own check


def choose_checkpoint(config: TrainConfig, folder: RunFolder) -> tuple[Checkpoint | None, list[str]]:
    """Reads and writes nothing but files; for rank 0.

    The run's own newest checkpoint that is whole comes first, so that a branch that was stopped goes on; then
    `resume_from`.

    Args:
        config: resolved.
        folder: of the run, its data prepared.

    Returns:
        (checkpoint or None, lines to tell: what was passed over, and settings that differ from the other run's).

    Raises:
        ValueError: `resume_from` is no whole checkpoint, or of a run with another model, other data or another seed.
    """
    checkpoint, passed_over = newest_checkpoint(folder.checkpoints)
    lines = [f"warning    {line}" for line in passed_over]
    if checkpoint is not None or config.resume_from is None:
        return checkpoint, lines
    checkpoint = find_checkpoint(Path(config.resume_from))
    other = RunFolder(checkpoint.path.parent.parent)
    if other.config.is_file():  # a checkpoint that was copied away has none; then shapes are all that is checked
        wrong, changed = what_differs(load_config(other.config), config)
        ours, theirs = folder.data / _FACTS, other.data / _FACTS
        if ours.is_file() and theirs.is_file() and ours.read_bytes() != theirs.read_bytes():
            wrong.append(f"its text or tokenizer was another, see {theirs}")
        if wrong:
            raise ValueError(f"resume_from is {config.resume_from!r}, a checkpoint of another run: {'; '.join(wrong)}")
        lines += [f"changed    {line}" for line in changed]
    return checkpoint, lines
