"""A run's figures for TensorBoard: `tensorboard --logdir runs` shows all runs beside each other."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from .metrics import EvaluationMetrics, StepMetrics


class TensorBoardSink:
    """Event files in a folder.

    Args:
        folder: of the events; made if absent. Each start adds a file.
        done: steps made before this start: what an earlier start wrote of later ones is hidden.

    Raises:
        ValueError: the package is not installed.
    """

    def __init__(self, folder: Path, done: int) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            raise ValueError("logging.tensorboard needs a package: pip install 'llama-train[tensorboard]'") from None
        self._writer = SummaryWriter(str(folder), purge_step=done + 1)

    def write(self, metrics: StepMetrics) -> None:
        """A scalar for each figure that is known: train/loss, train/tokens_per_second, …"""
        self._scalars("train", asdict(metrics), metrics.step)

    def write_evaluation(self, metrics: EvaluationMetrics) -> None:
        """held_out/loss, held_out/perplexity, …"""
        self._scalars("held_out", asdict(metrics), metrics.step)
        self._writer.flush()

    def write_sample(self, step: int, text: str) -> None:
        """As it is, not as Markdown, which TensorBoard would make of it."""
        code = "\n".join("    " + line for line in text.splitlines())
        self._writer.add_text("sample", code, step)

    def close(self) -> None:
        """Write what is still on its way."""
        self._writer.close()

    def _scalars(self, section: str, figures: dict[str, float | None], step: int) -> None:
        for name, value in figures.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(f"{section}/{name}", value, step)
