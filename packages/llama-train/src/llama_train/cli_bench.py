"""`llama-train bench scaling` and `llama-train bench sweep`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from .config_checks import finite_and, require

_HELP = """usage: llama-train bench {sweep,scaling} ...

sweep BASE   speed, MFU and memory of layouts and batch sizes on this machine; BASE is a TOML file or a preset
scaling      speed-up and efficiency over numbers of processes, strong and weak

Each explains itself: llama-train bench sweep --help
"""


@dataclass(frozen=True)
class ScalingConfig:
    """Speed-up S = T1 / TP and efficiency E = S / P over numbers of processes, strong and weak.

    Strong: the same step on more processes. Weak: a step that grows with them. Each process computes with one thread:
    numbers up to that of free cores tell something; beyond it they share cores and cannot be faster.
    """

    device: Literal["cpu"] = "cpu"
    """Processes of this machine's CPU, which are started here."""
    processes: tuple[int, ...] = (1, 2, 4)
    """Numbers of processes; 1 is always measured."""
    dimension: Literal["dp", "dp_replicate", "tp", "pp", "cp"] = "dp"
    """The kind of parallelism that they make up."""
    rows: int = 4
    """Rows of one process's step; the strong step has as many for each of the most processes."""
    sequence_length: int = 128
    """Tokens in a row."""
    hidden_size: int = 128
    """Width of the model."""
    layers: int = 4
    """Its decoder layers."""
    steps: int = 5
    """Timed steps, of which the median counts."""
    plot: str | None = None
    """Where to draw the curves, an .svg file."""
    timeout: float = 600.0
    """Seconds for one number of processes."""

    def __post_init__(self) -> None:
        for name in ("rows", "sequence_length", "hidden_size", "layers", "steps"):
            require(getattr(self, name) >= 1, f"--{name.replace('_', '-')}", getattr(self, name), "at least 1")
        require(self.hidden_size % 32 == 0, "--hidden-size", self.hidden_size, "a multiple of 32")
        counts = self.processes
        most = 256  # they are all started on this machine
        fit = bool(counts) and min(counts) >= 1 and max(counts) <= most
        require(fit, "--processes", counts, f"numbers from 1 to {most}")
        require(finite_and(self.timeout, self.timeout > 0), "--timeout", self.timeout, "above 0")
        require(self.plot is None or self.plot.endswith(".svg"), "--plot", self.plot, "the name of an .svg file")


def main(arguments: list[str]) -> int:
    """Measure and print."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_HELP, end="")
        return 0 if arguments else 2
    kind, *rest = arguments
    if kind == "sweep":
        from .cli_bench_sweep import main as sweep

        return sweep(rest)
    if kind != "scaling":
        raise ValueError(f"unknown benchmark {kind!r}; there is: scaling, sweep")
    config = tyro.cli(ScalingConfig, args=rest, prog="llama-train bench scaling")

    from llama_core import LlamaConfig
    from llama_parallel import check_layout
    from llama_parallel.testing import RankError as Failure

    from .failures import RankError
    from .scaling import layout_of, measure, plot, points

    heads = config.hidden_size // 32
    shape = LlamaConfig(
        vocab_size=2048,
        hidden_size=config.hidden_size,
        intermediate_size=config.hidden_size * 3,
        num_hidden_layers=config.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=config.sequence_length,
    )
    counts = sorted({1, *config.processes})
    length = config.sequence_length
    kinds = {"strong": dict.fromkeys(counts, config.rows * counts[-1]), "weak": {n: config.rows * n for n in counts}}
    for rows_of in kinds.values():
        for count, rows in rows_of.items():
            check_layout(layout_of(config.dimension, count), shape, sequence_length=length, global_batch=rows)
    print(
        f"{config.layers} layers of {config.hidden_size}, rows of {length} tokens, {config.dimension}, one thread each"
        "\nscaling  P   rows    s/step       S      E   communication"
    )
    curves = {}
    for name, rows_of in kinds.items():
        try:
            measured = [
                measure(shape, layout_of(config.dimension, count), rows, length, config.steps, config.timeout)
                for count, rows in rows_of.items()
            ]
        except Failure as error:
            raise RankError(str(error)) from None
        curves[name] = points(measured, weak=name == "weak")
        for point in curves[name]:
            found = point.measured
            print(
                f"{name:7} {found.processes:2d} {found.rows:6d} {found.seconds:9.4f} {point.speedup:7.2f} "
                f"{point.efficiency:6.2f}   {100 * found.communication:.0f}%",
                flush=True,
            )
    if config.plot is not None:
        Path(config.plot).write_text(plot(curves), encoding="utf-8")
        print(f"drawn in {config.plot}")
    return 0
