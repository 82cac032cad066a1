"""Which sinks a run writes its figures to: metrics.jsonl always, others by option."""

from __future__ import annotations

from .config import TrainConfig
from .metrics import MetricsFile, MetricsSink, Sinks
from .run_folder import RunFolder
from .tolerant_sink import TolerantSink


def open_sinks(config: TrainConfig, folder: RunFolder, done: int) -> Sinks:
    """For a run that goes on after step `done`; called on rank 0 alone.

    Args:
        config, folder: of the run.
        done: optimizer steps made before this start: what sinks hold of later ones will be written again.

    Raises:
        ValueError: a package is not installed, or W&B refuses.
    """
    sinks: list[MetricsSink] = []
    if config.logging.tensorboard:
        from .tensorboard_sink import TensorBoardSink  # here: torch's writer takes a second to import

        sinks.append(TolerantSink(TensorBoardSink(folder.path / "tensorboard", done), "TensorBoard"))
    if config.logging.wandb is not None:
        from .wandb_sink import WandbSink

        sinks.append(TolerantSink(WandbSink(config, folder.path), "Weights & Biases"))
    sinks.insert(0, MetricsFile(folder.metrics, done))  # opened last: it drops lines, so all else must be well
    return Sinks(sinks)
