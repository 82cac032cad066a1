"""A sink that may fail: a tracker that is down, or out of disk, is no reason to lose a training."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .metrics import EvaluationMetrics, MetricsSink, StepMetrics

_log = logging.getLogger(__name__)


class TolerantSink:
    """Passes figures on until that fails; then it says so, once, and drops them. metrics.jsonl has them all.

    Args:
        sink: where to.
        name: what a user calls it.
    """

    def __init__(self, sink: MetricsSink, name: str) -> None:
        self._sink: MetricsSink | None = sink
        self._name = name

    def write(self, metrics: StepMetrics) -> None:
        """Those of a step."""
        self._try(lambda sink: sink.write(metrics))

    def write_evaluation(self, metrics: EvaluationMetrics) -> None:
        """Those of a measurement."""
        self._try(lambda sink: sink.write_evaluation(metrics))

    def write_sample(self, step: int, text: str) -> None:
        """A text."""
        self._try(lambda sink: sink.write_sample(step, text))

    def close(self) -> None:
        """Nothing more will come."""
        self._try(lambda sink: sink.close())

    def _try(self, call: Callable[[MetricsSink], None]) -> None:
        if self._sink is None:
            return
        try:
            call(self._sink)
        except Exception as error:
            self._sink = None
            _log.warning("%s gets no more figures: %s: %s", self._name, type(error).__name__, error)
