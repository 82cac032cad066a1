"""The report: one HTML file with everything in it, no script and no other file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files

import jinja2

from .look import MOST_TOKENS, PASSES, HeadScores, Look
from .recorder import Operation
from .splits import splits
from .svg import heat_map, polar, shown

MOST_POSITIONS = 12
"""Curves of the polar plot."""


@dataclass(frozen=True)
class Total:
    """Operations of one name, or of one layer, together."""

    name: str
    count: int
    flops: int
    moved: int
    """Bytes read and written."""
    seconds: float


def report(look: Look) -> str:
    """The HTML text of a look."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"amount": amount, "shape": shape, "shown": shown, "duration": duration}
    template = environment.from_string(files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8"))
    chosen = [operation for operation in look.operations if operation.layer in (None, look.layer)]
    layers = by_layer(look)
    return template.render(
        look=look,
        passes=PASSES,
        heads=[_figures(look, head) for head in look.heads],
        hidden_tokens=max(0, len(look.ids) - MOST_TOKENS),
        polar=_polar(look),
        chosen=chosen,
        by_name=totals(look.operations),
        layers=layers,
        slowest=max((layer.seconds for layer in layers), default=0.0) or 1.0,
        whole=together("all", look.operations),
        splits=splits(look.config),
        file_bytes=sum(tensor.nbytes for tensor in look.stored),
        elements=sum(tensor.elements for tensor in look.stored),
    )


def totals(operations: Iterable[Operation]) -> list[Total]:
    """By name, the slowest first."""
    groups: dict[str, list[Operation]] = {}
    for operation in operations:
        groups.setdefault(operation.name, []).append(operation)
    return sorted((together(name, group) for name, group in groups.items()), key=lambda total: -total.seconds)


def by_layer(look: Look) -> list[Total]:
    """By layer, in order; its time is the layer's own, with what stands between the operations."""
    layers = []
    for index, seconds in enumerate(look.layer_seconds):
        total = together(str(index), [operation for operation in look.operations if operation.layer == index])
        layers.append(Total(total.name, total.count, total.flops, total.moved, seconds))
    return layers


def together(name: str, operations: Iterable[Operation]) -> Total:
    group = list(operations)
    flops, moved = sum(o.flops for o in group), sum(o.read + o.written for o in group)
    return Total(name, len(group), flops, moved, sum(o.seconds for o in group))


def amount(value: float) -> str:
    """Three digits and a decimal prefix: 1234567 → 1.23 M."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "


def shape(sizes: Iterable[int]) -> str:
    return " × ".join(str(size) for size in sizes)


def duration(seconds: float) -> str:
    """Three digits and the unit that suits: 0.00123 → 1.23 ms."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _figures(look: Look, head: HeadScores) -> dict[str, object]:
    labels = look.texts[-MOST_TOKENS:]
    raw, masked, shares = (x.tolist() for x in (head.raw, head.masked, head.shares))
    name = f"layer {look.layer}, head {head.head}"
    return {
        "head": head.head,
        "kv_head": head.kv_head,
        "figures": [
            ("q·k / √D", heat_map(raw, labels, f"{name}: scores", signed=True)),
            ("after the mask", heat_map(masked, labels, f"{name}: masked scores", signed=True)),
            ("after softmax", heat_map(shares, labels, f"{name}: attention", signed=False)),
        ],
    }


def _polar(look: Look) -> str:
    count = min(MOST_POSITIONS, len(look.ids))
    positions = sorted({round(i * (len(look.ids) - 1) / max(1, count - 1)) for i in range(count)})
    return polar(look.frequencies, positions, [look.texts[position] for position in positions])
