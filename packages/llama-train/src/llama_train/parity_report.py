"""The table of `llama-train parity`, and what in it is a fault."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llama_parallel.parity import Record, differences


def report(records: Sequence[Record], alone: Record, tolerance: float) -> tuple[str, str | None]:
    """Compare a layout's records with one process's.

    Args:
        records: of every rank; of all but the first only `parts` is looked at.
        alone: the oracle's.
        tolerance: largest relative difference allowed.

    Returns:
        (the table, what is wrong first or None).
    """
    first = records[0]
    found = differences(first, alone)
    fault = _initial(first, alone)
    rows = []
    for name in alone.weights:
        gradient, weight = found.get(f"gradient of {name}", 0.0), found[f"weight {name}"]
        rows.append((name, f"{gradient:.1e}", f"{weight:.1e}"))
    for key, value in found.items():
        if fault is None and not value <= tolerance:
            what = {"loss": "the loss", "norm": "the gradient norm"}.get(key, key)
            fault = f"{what} differs by {value:.1e} of its largest element; allowed are {tolerance:.0e}"
    if fault is None or fault.startswith(("the loss", "the gradient norm")):
        # a parameter says more about where it happens than a sum over all
        named = next((key for key, value in found.items() if " " in key and not value <= tolerance), None)
        if named is not None:
            fault = f"{named} differs by {found[named]:.1e} of its largest element; allowed are {tolerance:.0e}"
    drifted = _replicas(records)
    fault = fault or drifted
    width = max(len(name) for name, _, _ in rows)
    lines = [f"{'largest difference, relative':{width}}  gradient   weight"]
    lines += [f"{name:{width}}  {gradient:>8}  {weight:>7}" for name, gradient, weight in rows]
    worst = max(found.values())
    lines.append(f"{'loss':{width}}  {found['loss']:8.1e}")
    lines.append(f"{'gradient norm':{width}}  {found['norm']:8.1e}")
    lines.append(f"replicas   {'differ' if drifted else 'equal to the bit'}")
    verdict = "equal to one process" if fault is None else "NOT equal to one process"
    lines.append(f"{verdict}: the largest difference is {worst:.1e}, allowed are {tolerance:.0e}")
    return "\n".join(lines), fault


def _initial(first: Record, alone: Record) -> str | None:
    for name, weight in alone.initial.items():
        if not torch.equal(first.initial[name], weight):
            return f"the initial {name} is not the same"
    return None


def _replicas(records: Sequence[Record]) -> str | None:
    held: dict[tuple[str, tuple[int, ...]], str] = {}
    for rank, record in enumerate(records):
        for name, (offsets, digest) in record.parts.items():
            if held.setdefault((name, offsets), digest) != digest:
                return f"{name} on rank {rank} is not to the bit what another rank holds of it"
    return None
