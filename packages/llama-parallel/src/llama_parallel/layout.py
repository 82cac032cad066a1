"""Whether a layout can run a model, said before any process group exists, and which nearby ones can."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from llama_core import LlamaConfig

from .config import ParallelConfig
from .schedules import micro_batch_faults, stages_of_rank
from .stage_layers import check_layers

_SHOWN = 3


def check_layout(
    layout: ParallelConfig,
    model: LlamaConfig,
    *,
    sequence_length: int,
    global_batch: int,
    context: str = "ring",
    sequence_parallel: bool = True,
    schedule: str = "1f1b",
    virtual_stages: int | None = None,
    layers_per_stage: Sequence[int] | None = None,
    micro_batches: int | None = None,
) -> None:
    """Raise unless the layout can train the model.

    Args:
        layout: sizes of the mesh.
        model: the shape.
        sequence_length: tokens of one row, over all context-parallel ranks together.
        global_batch: rows of one optimizer step, over all data-parallel ranks together.
        context: how a sequence is shared over cp, "ring" (zigzag) or "ulysses".
        sequence_parallel: whether tensor-parallel ranks also share the sequence outside the products.
        schedule, virtual_stages, layers_per_stage: of the pipeline, as in `ParallelPlan`.
        micro_batches: of one data-parallel rank in a step; None: not known yet, and not checked.

    Raises:
        ValueError: every reason, and the nearest layouts that work, of as many processes if there are any.
    """
    if context not in ("ring", "ulysses"):
        raise ValueError(f"context = {context!r}: must be 'ring' or 'ulysses'")
    sizes = {"sequence_length": sequence_length, "global_batch": global_batch, "micro_batches": micro_batches}
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} = {value}: must be at least 1")
    virtual = stages_of_rank(schedule, virtual_stages)

    def reasons(candidate: ParallelConfig) -> list[str]:
        general = _faults(candidate, model, sequence_length, global_batch, context, sequence_parallel)
        return [*general, *_pipeline_faults(candidate, model, schedule, virtual, layers_per_stage, micro_batches)]

    found = reasons(layout)
    if not found:
        return
    near = [candidate for candidate in _others(layout) if not reasons(candidate)][:_SHOWN]
    if near:
        count = layout.num_processes
        size = f"layouts of {count} processes" if near[0].num_processes == count else "smaller ones"
        advice = f"{size} that work: {'; '.join(map(describe, near))}"
    else:
        advice = "no other layout of as many or fewer processes works either"
    raise ValueError(f"{describe(layout)} cannot run this model: {'; '.join(found)} ({advice})")


def describe(layout: ParallelConfig) -> str:
    """The sizes that are not 1, as a user writes them."""
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
    sizes = [f"{name} {getattr(layout, name)}" for name in names if getattr(layout, name) != 1]
    return " ".join(sizes) or "one process"


def _faults(
    layout: ParallelConfig, model: LlamaConfig, length: int, batch: int, context: str, sequence_parallel: bool
) -> Iterator[str]:
    heads, kv_heads = model.num_attention_heads, model.kv_heads
    if heads % layout.tp:
        yield f"{heads} attention heads do not divide over tp {layout.tp}"
    if kv_heads % layout.tp and layout.tp % kv_heads:
        yield f"tp {layout.tp} is neither a divisor nor a multiple of {kv_heads} key/value heads"
    if model.intermediate_size % layout.tp:
        yield f"intermediate_size {model.intermediate_size} does not divide over tp {layout.tp}"
    if _rows_of_last(model.vocab_size, layout.tp) < 1:
        yield f"vocab_size {model.vocab_size} leaves a rank of tp {layout.tp} without a row"
    parts = 2 * layout.cp if layout.cp > 1 and context == "ring" else layout.cp
    if length % parts:
        why = f" (two pieces for each of cp {layout.cp}, so that causal work is equal)" if parts > layout.cp else ""
        yield f"sequence length {length} does not divide into {parts} pieces{why}"
    elif sequence_parallel and length // layout.cp % layout.tp:
        yield f"the {length // layout.cp} tokens of a sequence that a rank holds do not divide over tp {layout.tp}"
    if context == "ulysses" and layout.cp > 1 and not heads % layout.tp:
        local = heads // layout.tp
        if local % layout.cp:
            yield f"{local} attention heads of a tensor-parallel rank do not divide over cp {layout.cp}"
    if batch % layout.dp:
        yield f"a global batch of {batch} does not divide over {layout.dp} data-parallel ranks"


def _pipeline_faults(
    layout: ParallelConfig,
    model: LlamaConfig,
    schedule: str,
    virtual: int,
    layers: Sequence[int] | None,
    micro_batches: int | None,
) -> Iterator[str]:
    if layout.pp == 1:
        return
    stages = layout.pp * virtual
    if stages > model.num_hidden_layers:
        each = "" if virtual == 1 else f" with {virtual} stages on each rank"
        yield f"{model.num_hidden_layers} layers are fewer than pp {layout.pp}{each}"
    elif layers is not None:
        try:
            check_layers(layers, model, stages)
        except ValueError as error:
            yield str(error)
    if micro_batches is not None:
        yield from micro_batch_faults(schedule, layout.pp, micro_batches)


def _rows_of_last(rows: int, parts: int) -> int:
    """Rows of the last part where all others get the same, rounded up (torch.chunk's rule)."""
    return rows - (parts - 1) * -(-rows // parts)


def _others(layout: ParallelConfig) -> Iterator[ParallelConfig]:
    """Layouts of as many processes, the nearest first; then those of a half, a third, … of them."""
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp")

    def distance(candidate: ParallelConfig) -> float:
        return sum(abs(math.log2(getattr(candidate, name) / getattr(layout, name))) for name in names)

    def foreign(candidate: ParallelConfig) -> int:  # nobody who asked for tp wants to hear about pp first
        return sum(getattr(layout, name) == 1 < getattr(candidate, name) for name in names)

    for count in range(layout.num_processes, 0, -1):
        if layout.num_processes % count == 0:
            splits = (replace(layout, **dict(zip(names, sizes, strict=True))) for sizes in _splits(count, len(names)))
            yield from sorted(splits, key=lambda candidate: (foreign(candidate), distance(candidate)))


def _splits(count: int, dims: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `count` as an ordered product of `dims` factors."""
    if dims == 1:
        yield (count,)
        return
    for factor in range(1, count + 1):
        if count % factor == 0:
            for rest in _splits(count // factor, dims - 1):
                yield (factor, *rest)
