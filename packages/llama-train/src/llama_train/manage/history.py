"""What a run's metrics.jsonl tells: the figures of each step, whatever stops and starts it went through."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

Record = Mapping[str, float]
Axis = Literal["steps", "tokens", "time"]
AXES: tuple[Axis, ...] = ("steps", "tokens", "time")


@dataclass(frozen=True)
class History:
    """The lines that count, in the order of their steps."""

    train: tuple[Record, ...] = ()
    held_out: tuple[Record, ...] = ()
    damaged: int = 0
    """Lines that could not be read: the last one of a killed run is often cut."""

    @property
    def last_step(self) -> int:
        """Of the last training line; 0 where there is none."""
        return int(self.train[-1]["step"]) if self.train else 0

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of training up to each training line; pauses for evaluations, saves and stops are not counted.

        A line's speed is that since the line before, so the tokens between them over it are the time between them.
        """
        total, before, found = 0.0, 0.0, []
        for record in self.train:
            speed = record.get("tokens_per_second", 0.0)
            tokens = record.get("tokens", 0.0)
            if speed > 0 and math.isfinite(speed) and tokens > before:
                total += (tokens - before) / speed
            before = tokens
            found.append(total)
        return tuple(found)

    def positions(self, axis: Axis) -> tuple[float, ...]:
        """Where each training line stands on an axis: step, tokens, or seconds of training."""
        if axis == "time":
            return self.seconds
        return tuple(record.get("step" if axis == "steps" else "tokens", 0.0) for record in self.train)

    def place(self, step: float, axis: Axis) -> float:
        """Where any step stands on an axis: on the straight line between the training lines around it."""
        if axis == "steps" or not self.train:
            return step
        steps, places = (0.0, *self.positions("steps")), (0.0, *self.positions(axis))
        after = min(max(1, bisect_left(steps, step)), len(steps) - 1)
        low, high = steps[after - 1], steps[after]
        part = (step - low) / (high - low) if high > low else 1.0
        return places[after - 1] + part * (places[after] - places[after - 1])

    def curve(self, key: str, axis: Axis = "steps") -> list[tuple[float, float]]:
        """(place, value) of every training line that has a finite value; `key` "held_out" is the held-out loss."""
        if key == "held_out":
            pairs = [(self.place(record["step"], axis), record.get("loss")) for record in self.held_out]
        else:
            pairs = [(place, record.get(key)) for place, record in zip(self.positions(axis), self.train)]
        return [(place, value) for place, value in pairs if value is not None and math.isfinite(value)]


def read_history(path: Path) -> History:
    """Read metrics.jsonl; a file that is not there is an empty history.

    A run that is resumed, or rolled back, writes steps again. A line of step n therefore takes the place of all lines
    of step n and later that stand before it: those are of a past that did not last.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return History()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    train: list[Record] = []
    held_out: list[Record] = []
    damaged = 0
    for line in text.split("\n"):
        if not line.strip("\0 \r\t"):  # a machine that lost power may leave zeros
            continue
        kind, record = _parse(line)
        if record is None:
            damaged += 1
            continue
        if kind == "train":
            _drop_from(train, record["step"])
            train.append(record)
        if kind in ("train", "held_out"):
            _drop_from(held_out, record["step"])
        if kind == "held_out":
            held_out.append(record)
    return History(tuple(train), tuple(held_out), damaged)


def _parse(line: str) -> tuple[str, Record | None]:
    """(kind, its numbers); None instead of them where the line is damaged."""
    try:
        found = json.loads(line)
        if not isinstance(found, dict):
            return "", None
        numbers = {key: float(value) for key, value in found.items() if type(value) in (int, float)}
    except (ValueError, OverflowError, RecursionError):
        return "", None
    step = numbers.get("step")
    if step is None or not math.isfinite(step) or step < 0 or ("kind" not in found and "loss" not in numbers):
        return "", None
    return str(found.get("kind", "train")), numbers


def _drop_from(records: list[Record], step: float) -> None:
    while records and records[-1]["step"] >= step:
        records.pop()


def thin(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most about `most` points of a curve that look the same: of each stretch its lowest and highest."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / max(1, most // 2))
    value: Callable[[tuple[float, float]], float] = lambda point: point[1]  # noqa: E731
    kept = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        kept += sorted({min(stretch, key=value), max(stretch, key=value)})
    if kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept
