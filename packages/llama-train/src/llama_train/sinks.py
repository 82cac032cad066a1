"""Which sinks a run writes its figures to: metrics.jsonl always, others by option."""

from __future__ import annotations

from .config import TrainConfig
from .metrics import MetricsFile, MetricsSink, Sinks
from .run_folder import RunFolder


def open_sinks(config: TrainConfig, folder: RunFolder, done: int) -> Sinks:
    """For a run that goes on after step `done`; called on rank 0 alone.

    Args:
        config, folder: of the run.
        done: optimizer steps made before this start: what sinks hold of later ones will be written again.
    """
    sinks: list[MetricsSink] = [MetricsFile(folder.metrics, done)]
    return Sinks(sinks)
