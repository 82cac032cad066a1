"""What `llama-infer bench` has measured, as a table, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .device_rates import DeviceRates
from .engine_bench import Point

if TYPE_CHECKING:
    from rich.console import Console


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def told_rates(rates: DeviceRates) -> str:
    return f"copies {rates.copy / 1e9:.1f} GB/s, multiplies matrices at {rates.matmul / 1e12:.3g} TFLOP/s"


def print_table(points: Sequence[Point], title: str, console: Console) -> None:
    from rich import box
    from rich.table import Table

    style = {"title_justify": "left", "title_style": "bold"}
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, **style)  # type: ignore[arg-type]
    reading = ("batch", "prompt", "first\ntoken", "prompt\ntokens/s", "of\nroof")  # all fits into 80 columns
    for name in (*reading, "step", "new\ntokens/s", "of\nroof", "over\nall"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in points:
        table.add_row(
            str(point.batch),
            str(point.prompt),
            f"{1e3 * point.first_token:.1f} ms",
            f"{point.batch * point.prompt / point.prompts:.0f}",
            f"{point.prompts_roof / point.prompts:.0%}",
            f"{1e3 * point.step:.2f} ms",
            f"{point.decode_rate:.1f}",
            f"{point.step_roof / point.step:.0%}",
            f"{point.output_rate:.1f}",
        )
    console.print(table)


def write_json(path: Path, points: Sequence[Point], rates: DeviceRates, about: dict[str, Any]) -> None:
    """Everything, in seconds, bytes and operations."""
    content = {
        **about,
        "copy_bytes_per_second": rates.copy,
        "matmul_flops_per_second": rates.matmul,
        "points": [{**dataclasses.asdict(point), "output_rate": point.output_rate} for point in points],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_picture(path: Path, points: Sequence[Point], title: str) -> None:
    """Two panels, each with the roof dashed: new tokens per second over the batch, the first token over the prompt."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for prompt in sorted({point.prompt for point in points}):
        row = sorted((point for point in points if point.prompt == prompt), key=lambda point: point.batch)
        batches = [point.batch for point in row]
        (line,) = left.plot(batches, [point.decode_rate for point in row], "o-", label=f"prompts of {prompt}")
        left.plot(batches, [point.batch / point.step_roof for point in row], "--", color=line.get_color())
    for batch in sorted({point.batch for point in points}):
        row = sorted((point for point in points if point.batch == batch), key=lambda point: point.prompt)
        lengths = [point.prompt for point in row]
        (line,) = right.plot(lengths, [1e3 * point.prompts for point in row], "o-", label=f"batch {batch}")
        right.plot(lengths, [1e3 * point.prompts_roof for point in row], "--", color=line.get_color())
    left.set(xlabel="sequences at once", ylabel="new tokens/s", title="generating (dashed: roof)")
    right.set(xlabel="tokens of each prompt", ylabel="ms until all have a token", title="reading (dashed: roof)")
    for panel, values in ((left, {point.batch for point in points}), (right, {point.prompt for point in points})):
        panel.set_xscale("log")
        panel.set_xticks(sorted(values), [str(value) for value in sorted(values)], minor=False)
        panel.set_xticks([], minor=True)
        panel.set_yscale("log")
        panel.grid(alpha=0.3, which="both")
        panel.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
