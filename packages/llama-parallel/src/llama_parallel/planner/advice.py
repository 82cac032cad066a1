"""Why a plan's first candidate is recommended and, where nothing fits, what would."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llama_parallel.layout import describe

from .memory import predict_memory

if TYPE_CHECKING:
    from .search import Candidate, Plan

GB = 1e9


def advise(plan: Plan, room: float) -> tuple[str, ...]:
    """Sentences; `room` is the memory that may be used, in bytes."""
    best = plan.candidates[0] if plan.candidates else None
    if best is not None:
        return _why(plan, best)
    if plan.smallest is None:
        return (
            f"no layout of {plan.gpus} GPUs can run this model: heads, layers, sequence length {plan.sequence_length} "
            f"or the global batch of {plan.global_batch} do not divide over any",
        )
    return _what_would(plan, plan.smallest, room)


def _why(plan: Plan, best: Candidate) -> tuple[str, ...]:
    found = [f"{describe(best.layout)} is the fastest of {len(plan.candidates)} layouts that fit"]
    spent = {
        "arithmetic": best.cost.compute,
        "exposed communication": best.cost.exposed,
        "the pipeline's bubble": best.cost.bubble,
        "the optimizer": best.cost.optimizer,
    }
    shares = [f"{seconds / best.cost.step:.0%} {name}" for name, seconds in spent.items()]
    found.append(f"its step is {', '.join(shares)}")
    others = [other for other in plan.candidates[1:] if other.layout != best.layout]
    if others:
        second = others[0]
        slower = second.cost.step / best.cost.step - 1
        found.append(f"next is {describe(second.layout)}, {slower:.1%} slower by this estimate")
    if best.work.checkpointing != "none":
        lighter = predict_memory(replace(best.work, checkpointing="none")).total / GB
        found.append(f"without activation checkpointing it would need {lighter:.0f} GB")
    return tuple(found)


def _what_would(plan: Plan, least: Candidate, room: float) -> tuple[str, ...]:
    need = least.memory.total
    found = [
        f"the layout that needs least, {describe(least.layout)} with {least.work.checkpointing} checkpointing and "
        f"micro-batches of {least.work.micro_batch}, needs {need / GB:.1f} GB of the {room / GB:.1f} GB there are"
    ]
    more = _more_gpus(plan)
    if more is not None:
        gpus, layout = more
        found.append(f"{gpus} GPUs of {plan.gpu_memory:g} GB would do, as {layout}")
    found.append(f"GPUs of {need / GB / (room / GB / plan.gpu_memory):.0f} GB would do")
    shorter = _shorter(plan)
    if shorter is not None:
        found.append(f"sequences of {shorter} tokens would do")
    lighter = [name for name in ("bfloat16",) if name != plan.precision and _fits(plan, precision=name)]
    found += [f"{name} weights and optimizer state would do, at a loss of precision" for name in lighter]
    parts = {
        name: getattr(least.memory, name) for name in ("weights", "gradients", "optimizer", "activations", "buffers")
    }
    largest = max(parts, key=lambda name: parts[name])
    hints = {
        "weights": "fewer layers or a narrower model",
        "gradients": "a smaller global batch, so that gradients need not be kept whole between micro-batches",
        "optimizer": "fewer parameters for each GPU: fewer layers, or a smaller vocabulary",
        "activations": "shorter sequences",
        "buffers": "a smaller vocabulary, or narrower layers",
    }
    found.append(f"the largest part is {largest}, {parts[largest] / GB:.1f} GB: {hints[largest]} would help")
    return tuple(found)


def _fits(plan: Plan, **changes: object) -> bool:
    return bool(_again(plan, **changes).candidates)


def _again(plan: Plan, **changes: object) -> Plan:
    from .search import plan as search

    asked = {
        "gpus": plan.gpus,
        "gpu_memory": plan.gpu_memory,
        "sequence_length": plan.sequence_length,
        "global_batch": plan.global_batch,
        "precision": plan.precision,
        "hardware": plan.hardware,
        **changes,
    }
    return search(plan.model, advised=False, **asked)  # type: ignore[arg-type]


def _more_gpus(plan: Plan) -> tuple[int, str] | None:
    """The least power-of-two multiple of the GPUs that fits."""
    for doubling in range(1, 9):
        gpus = plan.gpus << doubling
        found = _again(plan, gpus=gpus)
        if found.candidates:
            return gpus, describe(found.candidates[0].layout)
        if found.smallest is None:
            return None
    return None


def _shorter(plan: Plan) -> int | None:
    length = plan.sequence_length
    while length % 2 == 0 and length > 128:
        length //= 2
        if _fits(plan, sequence_length=length):
            return length
    return None
