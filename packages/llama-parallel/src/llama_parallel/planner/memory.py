"""Peak memory of a rank in one training step, part by part.

A step's memory rises through forward as layers keep activations, is highest about the loss, and falls through backward
while gradients come: so the peak is looked for at the loss, at each layer's backward, and at the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from .activations import backward_of_layer, kept_by_layer, widths
from .parameters import Shape, Stage, elements, stage_elements, stages, vocabulary_rows
from .work import Work

LOGITS_BYTES = 1_100_000_000
"""Logits that llama_kernels.linear_cross_entropy holds at once on a GPU."""
SHARED_LOGITS = 1 << 28
"""Logits that vocab_loss.py holds at once."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at its peak."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float
    """FSDP: parameters gathered for a layer and on their way to the next, gradients on their way out."""
    loss: float
    """Logits in pieces and the gradients that the loss computes beside them."""
    communication: float
    """Pipeline and context parallelism: what arrives while something else is computed with."""
    slack: float
    """Products' work space, rounding and gaps of the allocator."""

    @property
    def total(self) -> float:
        """All parts."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    @property
    def buffers(self) -> float:
        """What is neither weights, gradients, optimizer nor activations."""
        return self.gathered + self.loss + self.communication + self.slack


def predict_memory(
    work: Work, pipeline_rank: int | None = None, *, workspace: float = 32 * 2**20, slack: float = 0.02
) -> Memory:
    """Peak of one rank.

    Args:
        work: the step.
        pipeline_rank: whose; `None` means the one that needs most.
        workspace: bytes that the library of matrix products reserves (cuBLAS on Hopper: 32 MiB).
        slack: part of everything that rounding and gaps of the allocator cost.
    """
    ranks = stages(work.model, work.layout.pp, work.stages_per_rank)
    # Of ranks with stages alike the first holds most micro-batches (`in_flight`), and so needs most.
    first = {stage: rank for rank, stage in reversed(list(enumerate(ranks)))}
    wanted = first.values() if pipeline_rank is None else (pipeline_rank,)
    found = [_of_stage(work, rank, ranks[rank]) for rank in wanted]
    most = max(found, key=lambda memory: memory.total)
    return Memory(**{**vars(most), "slack": workspace + slack * most.total})


def in_flight(work: Work, pipeline_rank: int) -> float:
    """Micro-batches, of all this rank's layers, whose activations it holds at once.

    GPipe keeps all. 1F1B keeps one for each stage from here to the end (Narayanan et al. 2019, PipeDream-flush). The
    interleaved schedule warms up with 2 (pp - rank - 1) + (chunks - 1) pp forward passes of a chunk, and has one more
    in hand (Narayanan et al. 2021, section 2.2).
    """
    pp, chunks, count = work.layout.pp, work.stages_per_rank, work.micro_batches
    if work.schedule == "gpipe" or pp == 1:
        return float(count if pp > 1 else 1)
    if chunks == 1:
        return float(min(count, pp - pipeline_rank))
    return min(float(count), (2 * (pp - pipeline_rank - 1) + (chunks - 1) * pp + 1) / chunks)


def _of_stage(work: Work, rank: int, stage: Stage) -> Memory:
    sizes, model, tp = work.bytes_of, work.model, work.layout.tp
    groups = stage.groups(model, tp)
    whole = float(stage_elements(stage, model, tp))
    own = float(stage_elements(stage, model, tp, work.shards)) if work.fsdp else whole
    held = in_flight(work, rank)
    boundaries = widths(work).stream * work.tokens
    moments = own * (2 * sizes.moment + sizes.master)
    resident, at_layer = _gathered(work, stage, groups)
    points = []  # (activations, gradients, loss, gathered) where memory may be highest
    accumulated = work.micro_batches > 1
    of_layer = float(elements(groups[-2]))
    tail, per_gradient = float(elements(groups[-1])), float(sizes.parameter)
    # FSDP sums micro-batches whole, in the type it reduces in, and shards them with the last (gradients.py).
    # With kernels the optimizer takes the first micro-batch's as they are, and sums from the second on in float32.
    as_they_are = work.kernels and sizes.master > 0 and not work.fsdp
    all_gradients = own * (sizes.parameter if as_they_are and not accumulated else sizes.master or sizes.parameter)
    if accumulated:
        before = whole * sizes.reduce if work.fsdp else all_gradients
        if as_they_are and work.micro_batches == 2:
            before = own * sizes.parameter
    else:
        before = 0.0
    kept = kept_by_layer(work)
    others = (held - 1) * (stage.layers * kept + boundaries) + boundaries  # of micro-batches not yet in backward
    during_loss, after_loss = _loss(work, stage)
    points.append((others + stage.layers * kept, before, during_loss, resident))
    grown = before
    for layer in sorted({stage.layers, 1, 0}, reverse=True):  # backward of the last, of the first; all of them done
        # (between them all is linear in the number of layers, so no other can be higher)
        coming = (tail + (stage.layers - layer) * of_layer) * per_gradient * (own / whole if work.fsdp else 1.0)
        if not accumulated:
            grown = coming
        elif sizes.master:  # sums lie in the optimizer, and each micro-batch's gradients come beside them
            grown = before + coming
        live = others + layer * kept + (backward_of_layer(work) if layer else 0.0)
        points.append((live, grown, after_loss if layer == stage.layers else 0.0, resident + at_layer))
    last = max(before, all_gradients) + (whole * sizes.parameter if sizes.master and accumulated else 0.0)
    points.append((others - boundaries if held > 1 else 0.0, last, float(of_layer * sizes.compute), 0.0))
    activations, gradients, loss, gathered = max(points, key=sum)
    return Memory(
        weights=own * sizes.parameter,
        gradients=gradients,
        optimizer=moments,
        activations=activations,
        gathered=gathered,
        loss=loss,
        communication=_communication(work),
        slack=0.0,
    )


def _gathered(work: Work, stage: Stage, groups: tuple[tuple[Shape, ...], ...]) -> tuple[float, float]:
    """Bytes that FSDP holds all through forward and backward, and those that come on top at one layer's backward.

    Norm and head stay gathered, and with pipelines everything. Otherwise a layer's parameters are there, the next one's
    arrive in a flat buffer and are copied out of it. The layer's gradients are there whole in the compute type and, to
    be summed, once more in the reduce type; so are the head's, until all layers are done, in the compute type.
    """
    if not work.fsdp:
        return 0.0, 0.0
    sizes = work.bytes_of
    layer, tail = float(elements(groups[-2])), float(elements(groups[-1]))
    if not work.reshards:
        return stage_elements(stage, work.model, work.layout.tp) * sizes.compute, layer * (sizes.compute + sizes.reduce)
    arriving = layer * sizes.compute if work.shards > 1 else 0.0
    return tail * sizes.compute, layer * (2 * sizes.compute + sizes.reduce) + arriving


def _loss(work: Work, stage: Stage) -> tuple[float, float]:
    """Bytes that head and loss of a micro-batch need at their own peak, and while the last layer runs backward."""
    if not stage.head:
        return 0.0, 0.0
    compute, model = work.bytes_of.compute, work.model
    wide = max(4, compute)
    rows, width = work.tokens, model.hidden_size
    part = vocabulary_rows(model, work.layout.tp)
    of_hidden, of_weight = float(rows * width * compute), float(part * width * compute)
    if work.layout.tp > 1:
        # vocab_loss.py: a chunk in the compute type and in float32, its exponentials, the gathered hidden states and
        # their gradient, and the weight's gradient summed in float32
        chunk = min(rows, max(1, SHARED_LOGITS // part)) * part
        peak = chunk * (compute + 2 * wide) + 2 * of_hidden + part * width * wide + of_weight
        return peak, of_weight
    if work.kernels:
        # one chunk of logits beside both gradients; then both once more, scaled by the incoming gradient
        chunk = min(LOGITS_BYTES, rows * part * compute)
        return max(chunk + of_hidden + of_weight, 2 * (of_hidden + of_weight)), of_weight
    # plain: log-softmax kept, the gradients of losses and of logits, all in float32
    return 3.0 * rows * part * wide, of_weight


def _communication(work: Work) -> float:
    """Keys and values that arrive, and their gradients in float32 on both ways; hidden states from the next stage."""
    w, found = widths(work), 0.0
    compute = work.bytes_of.compute
    if work.layout.cp > 1 and work.context == "ring":
        found += 2 * w.keys * work.tokens * (2 + 3 * max(4, compute) / compute)
    if work.layout.pp > 1:
        found += 2 * w.stream * work.tokens
    return found
