"""The same look in a terminal, in a screenful or two."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .look import Look
from .report import amount, duration, shape, together, totals
from .splits import splits
from .svg import shown

SHADES = " ░▒▓█"
MOST_TOKENS = 24


def print_summary(look: Look, console: Console) -> None:
    """Tokens, the logit lens, the attention of the first head shown, costs and splits."""
    parameters, size = sum(t.elements for t in look.stored), sum(t.nbytes for t in look.stored)
    kinds = ", ".join(sorted({tensor.kind for tensor in look.stored}))
    sizes = f"{amount(parameters).strip()} parameters, {amount(size)}B"
    say(console, f"{look.name}: {len(look.stored)} tensors ({kinds}), {sizes}")
    tokens = " ".join(f"{shown(text, 20)}({i})" for text, i in zip(look.texts, look.ids, strict=True))
    say(console, f"{len(look.ids)} tokens: {tokens}")

    lens = _table("next token, if the model ended after layer …", "layer", "best", "", "then")
    for index in _some(len(look.lens)):
        best, *others = look.lens[index]
        then = "  ".join(shown(guess.token, 14) for guess in others[:3])
        lens.add_row(str(index), shown(best.token, 18), f"{best.probability:.1%}", Text(then))
    console.print(lens)

    head = look.heads[0]
    say(console, f"\nattention of layer {look.layer}, head {head.head} (rows look, darker is more):")
    shares = head.shares[-MOST_TOKENS:, -MOST_TOKENS:].tolist()
    for text, row in zip(look.texts[-MOST_TOKENS:], shares, strict=True):
        cells = "".join(SHADES[min(4, round(4 * share + 0.3))] * 2 for share in row)
        say(console, f"{shown(text, 14):>14} {cells}")

    whole = together("all", look.operations)
    cost = _table("operations of all layers", "operation", "times", "shape", "FLOPs", "bytes", "time", "share")
    outputs = {operation.name: shape(operation.output).replace(" ", "") for operation in look.operations}
    for total in totals(look.operations):
        cost.add_row(
            *(total.name, str(total.count), outputs[total.name], amount(total.flops), amount(total.moved) + "B"),
            *(duration(total.seconds), f"{total.seconds / whole.seconds:.0%}"),
        )
    console.print(cost)

    table = _table("what can be split", "parameter", "value", "over", "ways")
    for split in splits(look.config):
        if split.over != "—":
            table.add_row(split.parameter, split.value, split.over, split.ways)
    console.print(table)


def say(console: Console, text: str) -> None:
    """As it stands: brackets are no markup, numbers get no colours, and long lines wrap where the terminal does."""
    console.print(Text(text), soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for name in columns:
        right = name in ("layer", "", "times", "FLOPs", "bytes", "time", "share")
        table.add_column(name, justify="right" if right else "left")
    return table


def _some(count: int) -> list[int]:
    """First, last and a few between."""
    return sorted({round(i * (count - 1) / 7) for i in range(8)}) if count > 8 else list(range(count))
