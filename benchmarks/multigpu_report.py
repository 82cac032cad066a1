"""What was measured, as lines at once, and at the end as a file of tables and a picture."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_timing import commit
from multigpu_decode import Decoded, DecodeWork
from multigpu_jobs import Outcome
from multigpu_parity import Found
from multigpu_shares import Shares
from multigpu_train import Profile, Timing
from multigpu_works import Work

from llama_core import Llama, LlamaConfig
from llama_train.flops import flops_per_token, mfu

PEAK = 989.5e12
"""Dense bfloat16 FLOP/s of an H100 or H200 by its data sheet; picotron's divisor."""

_COLUMNS = (
    "layout", "GPUs", "rows × length × acc.", "tokens/s/GPU", "MFU %", "standard %", "E", "S", "peak GB", "alone %",
    "idle %", "host %", "bubble %", "loss", "picotron",
)  # fmt: skip
_PARITY = ("layout against one process, float64", "largest difference", "of", "seconds", "")
_DECODING = ("decoding", "batch", "ms a step", "tokens/s", "times tp 1")
_LINKS = ("links and launches", "bytes received", "µs", "GB/s", "µs to launch")
_FAILURES = ("failed or not run", "why")


@dataclass(frozen=True)
class Line:
    """One work's numbers."""

    work: Work
    per_gpu: float
    """Tokens per second."""
    picotron_mfu: float
    standard_mfu: float
    efficiency: float | None
    peak: int
    shares: Shares | None
    loss: float
    host: float
    """Launching's share of a step, and that of computing threads in it."""
    busy: float


class Report:
    """Collects and prints. `out` gets tables.md, multigpu.png, errors.txt and profile-NAME.txt."""

    def __init__(self, out: Path, device: str, gpus: int, compiled: bool = False) -> None:
        self.out, self.wrong = out, 0
        self.lines: list[Line] = []
        self._decoded: dict[tuple[int, int], float] = {}
        how = ", layers compiled" if compiled else ""
        title = f"{gpus} × {device}, torch {torch.__version__}, commit {commit()}{how}"
        self._tables: dict[str, list[str]] = {title: []}  # rows by the head they stand under, in order of the heads
        self._last = ""
        print(title, flush=True)
        out.mkdir(parents=True, exist_ok=True)
        (out / "errors.txt").unlink(missing_ok=True)

    def show(self, row: str, columns: tuple[str, ...] = ()) -> None:
        """To the terminal and into the file, at once: a run may be cut. Without columns, a line of the end."""
        head = ""
        if columns:
            head = "\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|"
        self._tables.setdefault(head, []).append(row)
        if head != self._last:
            print(head, flush=True)
        self._last = head
        print(row, flush=True)
        text = "\n".join(line for title, rows in self._tables.items() for line in (title, *rows))
        (self.out / "tables.md").write_text(text + "\n", encoding="utf-8")

    def failure(self, name: str, outcome: Outcome) -> None:
        """A work that gave no result, or not all of it."""
        self.wrong += 1
        self.show(f"| {name} | {outcome.reason.replace('|', '/')} |", _FAILURES)
        with open(self.out / "errors.txt", "a", encoding="utf-8") as file:
            file.write(f"=== {name}\n{outcome.error}\n")

    def skipped(self, name: str, why: str) -> None:
        self.show(f"| {name} | {why} |", _FAILURES)

    # --- parity ------------------------------------------------------------------------------------------------------

    def parity(self, found: Found) -> None:
        self.wrong += not found.right
        verdict = "equal" if found.right else "DIFFERENT"
        self.show(f"| {found.name} | {found.worst:.1e} | {found.where} | {found.seconds:.1f} | {verdict} |", _PARITY)

    # --- training ----------------------------------------------------------------------------------------------------

    def training(self, work: Work, outcome: Outcome) -> None:
        """The line of a work, as far as it came."""
        timings = [message for said in outcome.said for message in said if isinstance(message, Timing)]
        profiles = [message for said in outcome.said for message in said if isinstance(message, Profile)]
        if timings:
            line = line_of(work, timings, [p.shares for p in profiles if p.shares is not None], self.lines)
            self.lines.append(line)
            self.show(row_of(line), _COLUMNS)
        if outcome.error is not None:
            self.failure(work.name + (" (after its timing)" if timings else ""), outcome)
        tables = [said for said in outcome.said if said and isinstance(said[-1], Profile) and said[-1].table]
        for number, said in enumerate(tables):
            name = re.sub(r"\W+", "-", work.name)
            (self.out / f"profile-{name}-rank{number}.txt").write_text(said[-1].table, encoding="utf-8")
            if number == 0:
                print(said[-1].table, flush=True)

    def links(self, outcome: Outcome) -> None:
        """What is there to be had."""
        for one in outcome.said[0]:
            rate = f"{one.nbytes / one.seconds / 1e9:.1f}" if one.nbytes else "–"
            self.show(
                f"| {one.name} | {one.nbytes:,} | {one.seconds * 1e6:.1f} | {rate} | {one.launched * 1e6:.1f} |", _LINKS
            )
        if outcome.error is not None:
            self.failure("links", outcome)

    # --- decoding ----------------------------------------------------------------------------------------------------

    def decoding(self, work: DecodeWork, found: list[Decoded], outcome: Outcome) -> None:
        for one in found:
            rate = one.batch / one.seconds
            self._decoded[work.gpus, one.batch] = rate
            alone = self._decoded.get((1, one.batch))
            times = "–" if alone is None else f"{rate / alone:.2f}"
            self.show(f"| {work.name} | {one.batch} | {one.seconds * 1e3:.2f} | {rate:,.0f} | {times} |", _DECODING)
        if outcome.error is not None:
            self.failure(work.name, outcome)

    def finish(self, seconds: float) -> None:
        self.show(f"{seconds:.0f} seconds, {self.wrong} wrong or failed")
        if any(line.shares for line in self.lines):
            try:
                draw(self.lines, self.out / "multigpu.png")
            except ImportError as error:
                print(f"no picture: {error}")


def line_of(work: Work, timings: list[Timing], shares: list[Shares], before: list[Line]) -> Line:
    """From what all ranks told; shares of time are means over ranks."""
    per_gpu = work.tokens / max(timing.seconds for timing in timings) / work.gpus
    alone = next((line.per_gpu for line in before if line.work.name == work.baseline), None)
    count = len(shares)
    mean = None
    if shares:
        fields = ("compute", "exposed", "idle", "communication")
        mean = Shares(*(sum(getattr(one, name) for one in shares) / count for name in fields))
    picotron, standard = (mfu(per_gpu, flops, PEAK) or 0.0 for flops in flops_of(work.model, work.length))
    return Line(
        work, per_gpu, picotron, standard, None if alone is None else per_gpu / alone,
        max(timing.peak for timing in timings), mean, timings[0].loss,
        timings[0].launched / timings[0].seconds, max(timing.busy / timing.seconds for timing in timings),
    )  # fmt: skip


def flops_of(config: LlamaConfig, length: int) -> tuple[int, int]:
    """Of a token, forward and backward: picotron's count, and the standard one.

    The standard one leaves out the input embedding, which multiplies nothing, and what causal attention never sees.
    """
    with torch.device("meta"):
        parameters = Llama(config).num_parameters()
    width = config.num_attention_heads * config.head_width
    whole = flops_per_token(parameters, config.num_hidden_layers, width, length)
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return whole, whole - 6 * embedding - 6 * config.num_hidden_layers * width * length


def row_of(line: Line) -> str:
    work, shares = line.work, line.shares
    percent = lambda x: "–" if x is None else f"{100 * x:.1f}"  # noqa: E731
    efficiency = line.efficiency
    bubble = "–"
    if work.bubble is not None:
        seen = None if shares is None else 1 - shares.compute
        bubble = f"{percent(seen)} (formula {percent(work.bubble)})"
    cells = (
        work.name, str(work.gpus), f"{work.rows} × {work.length} × {work.accumulation}", f"{line.per_gpu:,.0f}",
        percent(line.picotron_mfu), percent(line.standard_mfu), "–" if efficiency is None else f"{efficiency:.3f}",
        "–" if efficiency is None else f"{efficiency * work.gpus:.2f}", f"{line.peak / 1e9:.1f}",
        percent(None if shares is None else shares.exposed), percent(None if shares is None else shares.idle),
        f"{percent(line.host)} ({percent(line.busy)})", bubble,
        f"{line.loss:.3f}", "–" if work.picotron is None else f"{line.per_gpu / work.picotron:.2f} ×",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def draw(lines: list[Line], path: Path) -> None:
    """MFU of every layout beside picotron's, and where its time went."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    shown = [line for line in lines if line.shares is not None][::-1]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 1.5 + 0.32 * len(shown)), sharey=True)
    names = [line.work.name for line in shown]
    left.barh(names, [100 * line.picotron_mfu for line in shown], color="C0", label="MFU by picotron's formula")
    left.barh(names, [100 * line.standard_mfu for line in shown], color="C1", height=0.3, label="by the standard one")
    there = [line for line in shown if line.work.picotron is not None]
    theirs = [100 * line.picotron_mfu * (line.work.picotron or 0.0) / line.per_gpu for line in there]
    left.plot(theirs, [line.work.name for line in there], "k|", markersize=14, label="picotron (another run)")
    left.set_xlabel("MFU, % of 989.5 TFLOP/s")
    left.legend(fontsize=7)
    start = [0.0] * len(shown)
    for key, label, color in (
        ("compute", "arithmetic", "C2"), ("exposed", "communication alone", "C3"), ("idle", "no kernel", "C7"),
    ):  # fmt: skip
        part = [100 * getattr(line.shares, key) for line in shown]
        right.barh(names, part, left=start, label=label, color=color)
        start = [a + b for a, b in zip(start, part, strict=True)]
    right.set_xlabel("% of a step")
    right.legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
