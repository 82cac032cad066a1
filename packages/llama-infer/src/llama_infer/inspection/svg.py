"""The report's figures, as small SVG written by hand: they scale, need no script, and text in them stays text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

CELL = 22
LABELS = 76
"""Room for token texts beside a heat map."""

Colour = tuple[int, int, int]
_COLD, _WHITE, _WARM = (33, 102, 172), (247, 247, 247), (178, 24, 43)
_LIGHT, _DEEP = (247, 251, 255), (8, 48, 107)


def heat_map(values: Sequence[Sequence[float]], labels: Sequence[str], title: str, signed: bool) -> str:
    """A square of cells: rows look, columns are looked at.

    Args:
        values: (S, S); minus infinity is drawn as masked.
        labels: S texts.
        title: what it is, for readers that hear it.
        signed: blue below and red above zero; else one colour, from 0 to 1.
    """
    size = LABELS + CELL * len(labels)
    finite = [abs(v) for row in values for v in row if math.isfinite(v)]
    largest = max(finite, default=1.0) or 1.0
    parts = [_open(size, size, title)]
    for index, label in enumerate(labels):
        middle = LABELS + CELL * (index + 0.5)
        text = escape(shown(label, 9))
        parts.append(f'<text x="{LABELS - 6}" y="{middle + 4:g}" text-anchor="end">{text}</text>')
        parts.append(f'<text transform="translate({middle + 4:g} {LABELS - 6}) rotate(-90)">{text}</text>')
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            place = f'x="{LABELS + CELL * j}" y="{LABELS + CELL * i}" width="{CELL - 1}" height="{CELL - 1}"'
            says = f"{shown(labels[i], 30)} → {shown(labels[j], 30)}: "
            if math.isfinite(value):
                colour = _signed(value / largest) if signed else _mix(_LIGHT, _DEEP, value)
                parts.append(f'<rect {place} fill="{colour}"><title>{escape(says)}{value:.3g}</title></rect>')
            else:
                parts.append(f'<rect {place} class="masked"><title>{escape(says)}masked</title></rect>')
    return "".join([*parts, "</svg>"])


def polar(frequencies: Sequence[float], positions: Sequence[int], labels: Sequence[str]) -> str:
    """One curve for each position: its angle in every channel pair, the fastest pair innermost."""
    middle, inner, outer = 200, 24, 180
    parts = [_open(2 * middle, 2 * middle, "rotary angles: one curve a position, one ring a channel pair")]
    step = (outer - inner) / max(1, len(frequencies) - 1)
    for pair in sorted(
        {0, len(frequencies) // 4, len(frequencies) // 2, 3 * len(frequencies) // 4, len(frequencies) - 1}
    ):
        parts.append(f'<circle cx="{middle}" cy="{middle}" r="{inner + step * pair:.1f}" class="ring"/>')
    for quarter, text in enumerate(("0", "π/2", "π", "3π/2")):
        x, y = _at(middle, outer + 12, quarter * math.pi / 2)
        parts.append(f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{text}</text>')
    for order, (position, label) in enumerate(zip(positions, labels, strict=True)):
        colour = f"hsl({300 * order / max(1, len(positions) - 1):.0f} 65% 45%)"
        points = [_at(middle, inner + step * pair, position * f) for pair, f in enumerate(frequencies)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{colour}"/>' for x, y in points)
        title = f"<title>position {position}: {escape(shown(label, 30))}</title>"
        parts.append(f'<g>{title}<polyline points="{path}" fill="none" stroke="{colour}" opacity=".35"/>{dots}</g>')
    return "".join([*parts, "</svg>"])


def shown(text: str, length: int) -> str:
    """A token's text with its spaces and line ends visible, no longer than so many characters."""
    text = text.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥")
    text = "".join(c if c.isprintable() else "�" for c in text)
    return text if len(text) <= length else text[: length - 1] + "…"


def _open(width: int, height: int, title: str) -> str:
    # A few tokens are drawn larger than their cells, a phone's width at most.
    widest = max(width, 300)
    return f'<svg viewBox="0 0 {width} {height}" role="img" style="max-width:{widest}px"><title>{escape(title)}</title>'


def _at(middle: float, radius: float, angle: float) -> tuple[float, float]:
    return middle + radius * math.cos(angle), middle - radius * math.sin(angle)


def _signed(value: float) -> str:
    return _mix(_WHITE, _WARM if value > 0 else _COLD, abs(value))


def _mix(a: Colour, b: Colour, share: float) -> str:
    share = min(max(share, 0.0), 1.0)
    return "#" + "".join(f"{round(x + (y - x) * share):02x}" for x, y in zip(a, b))
