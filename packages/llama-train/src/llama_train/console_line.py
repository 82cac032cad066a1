"""The console line of a step."""

from __future__ import annotations

from .metrics import StepMetrics, human


def format_line(metrics: StepMetrics, last_step: int) -> str:
    """The figures in columns; every line of a run has the same width, until a step is skipped.

    What one device does stands there where there are several, MFU where the device's peak is known: by picotron's
    formula and, behind the stroke, by torchtitan's.
    """
    width, each, used = len(str(last_step)), "", ""
    if metrics.tokens_per_second_per_device != metrics.tokens_per_second:
        each = f"  {human(metrics.tokens_per_second_per_device):>7} tok/s each"
    if metrics.mfu is not None and metrics.mfu_torchtitan is not None:
        used = f"  MFU {100 * metrics.mfu:4.1f}% / {100 * metrics.mfu_torchtitan:4.1f}%"
    skipped = f"  skipped {metrics.skipped}" if metrics.skipped else ""
    return (
        f"step {metrics.step:{width}d}/{last_step}  loss {metrics.loss:7.4f}  grad {metrics.grad_norm:8.3f}  "
        f"lr {metrics.learning_rate:.2e}  tokens {human(metrics.tokens):>7}  "
        f"{human(metrics.tokens_per_second):>7} tok/s{each}{used}  memory {metrics.memory / 1e9:6.2f} GB  "
        f"wait {metrics.data_wait:5.1f} ms{skipped}"
    )
