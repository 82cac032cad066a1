"""Keys of [checkpoint]."""

from __future__ import annotations

from dataclasses import dataclass

from .config_checks import require


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved. It is also saved at its end and when it is told to stop."""

    every: int = 1000
    """Steps between checkpoints; 0 means none on the way."""
    asynchronous: bool = True
    """Train on while a checkpoint is written: its content is copied first, which takes as much memory of the host."""
    keep: int = 2
    """How many of the newest checkpoints stay."""
    keep_every: int = 0
    """Checkpoints of every multiple of so many steps stay for ever; 0 means none does."""
    export: bool = True
    """Whether the finished model is written as a Hugging Face folder, RUN/hf."""

    def __post_init__(self) -> None:
        require(self.every >= 0, "checkpoint.every", self.every, "0 or more")
        require(self.keep_every >= 0, "checkpoint.keep_every", self.keep_every, "0 or more")
        require(self.keep >= 1, "checkpoint.keep", self.keep, "at least 1")
