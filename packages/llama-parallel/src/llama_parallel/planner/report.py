"""A plan as text."""

from __future__ import annotations

from llama_parallel.layout import describe

from .search import GB, Candidate, Plan

_PARTS = ("weights", "gradients", "optimizer", "activations", "buffers")


def describe_plan(plan: Plan, limit: int = 8) -> str:
    """What was asked, the recommended layout with its figures, the runners-up as a table; or what would fit.

    Plain text in lines of at most 120 characters, without colour.
    """
    asked = (
        f"{plan.gpus} GPUs of {plan.gpu_memory:g} GB, sequences of {plan.sequence_length} tokens, "
        f"{plan.global_batch} sequences a step, {plan.precision} precision"
    )
    if plan.best is None:
        lines = [asked, "", "Nothing fits.", *(f"- {line}" for line in plan.advice)]
        if plan.smallest is not None:
            lines += ["", "What needs least:", *_details(plan.smallest)]
        return "\n".join(lines)
    lines = [asked, "", f"Recommended: {describe(plan.best.layout)}", *_details(plan.best), ""]
    lines += [f"- {line}" for line in plan.advice]
    lines += ["", *_table(plan.candidates[:limit])]
    if len(plan.candidates) > limit:
        lines.append(f"… and {len(plan.candidates) - limit} more")
    return "\n".join(lines)


def _details(candidate: Candidate) -> list[str]:
    work, memory, cost = candidate.work, candidate.memory, candidate.cost
    how = f"{work.micro_batches} micro-batches of {work.micro_batch}, activation checkpointing {work.checkpointing}"
    if work.layout.pp > 1:
        how += f", schedule {work.schedule}"
        how += f" with {work.stages_per_rank} stages a rank" if work.stages_per_rank > 1 else ""
    parts = ", ".join(f"{name} {getattr(memory, name) / GB:.1f}" for name in _PARTS)
    of_buffers = ", ".join(
        f"{name} {getattr(memory, name) / GB:.1f}" for name in ("gathered", "loss", "communication", "slack")
    )
    lines = [
        f"  {how}",
        f"  memory   {memory.total / GB:.1f} GB a GPU: {parts}",
        f"           of buffers: {of_buffers}",
    ]
    for kind in cost.sent:
        if kind != "sums":
            lines.append(f"  {kind:8} {cost.sent[kind] / GB:.1f} GB sent a step, {cost.communication[kind]:.2f} s")
    lines.append(
        f"  step     {cost.step:.2f} s: arithmetic {cost.compute:.2f}, exposed communication {cost.exposed:.2f}, "
        f"bubble {cost.bubble:.2f}, optimizer {cost.optimizer:.2f}"
    )
    lines.append(f"  speed    {cost.tokens_per_second:,.0f} tokens/s a GPU, MFU {cost.mfu:.1%}")
    return lines


def _table(candidates: tuple[Candidate, ...]) -> list[str]:
    rows = [("layout", "micro", "checkpointing", "schedule", "GB", "step s", "tok/s/GPU", "MFU")]
    for candidate in candidates:
        work, cost = candidate.work, candidate.cost
        schedule = (
            ""
            if work.layout.pp == 1
            else f"{work.schedule}" + (f"×{work.stages_per_rank}" if work.stages_per_rank > 1 else "")
        )
        rows.append(
            (
                describe(work.layout),
                f"{work.micro_batches}×{work.micro_batch}",
                work.checkpointing,
                schedule,
                f"{candidate.memory.total / GB:.1f}",
                f"{cost.step:.2f}",
                f"{cost.tokens_per_second:,.0f}",
                f"{cost.mfu:.1%}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = (0, 2, 3)
    return [
        "  ".join(
            cell.ljust(size) if i in left else cell.rjust(size) for i, (cell, size) in enumerate(zip(row, widths))
        )
        for row in rows
    ]
