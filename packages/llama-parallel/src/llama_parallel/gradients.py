"""The gradient of the mean loss over every unmasked token of the global batch, however it lies on ranks and in time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llama_core import Llama

from .mesh import batch_group
from .parallel import Parallel
from .tied_embedding import tied_end


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass of one rank.

    With cp, a rank's own pieces of the sequences (`shard_sequence`, for all four); with tp, the same on all its ranks.
    """

    tokens: Tensor
    """(B, S), integers."""
    targets: Tensor
    """(B, S), int64; -100 where a token does not count."""
    positions: Tensor | None = None
    """(B or 1, S); None: 0, 1, … along the whole row, of which cp's ranks each have a part."""
    documents: Tensor | None = None
    """(B, S), integers that change from one document to the next: a token sees its own document only. None: one for
    each row. For positions that start anew in each, see llama_core.positions_from_documents."""


def count_targets(parallel: Parallel, micro_batches: Sequence[MicroBatch], ignore_index: int = -100) -> Tensor:
    """Unmasked tokens of the whole global batch: of all micro-batches of all ranks. A scalar, int64, on the device."""
    count = sum(((batch.targets != ignore_index).sum() for batch in micro_batches), _zero(parallel, torch.int64))
    dist.all_reduce(count, group=batch_group(parallel.mesh))
    return count


def accumulate_gradients(
    parallel: Parallel, micro_batches: Sequence[MicroBatch], ignore_index: int = -100, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Add to every gradient that of (sum of token losses) / (unmasked tokens), both of the whole global batch.

    One division for all: a mean of the ranks' means, or of the micro-batches', would weigh a token by how few
    neighbours it has. Ranks without a single unmasked token take part like all others. Gradients are summed over
    data-parallel ranks with the last micro-batch only.

    Args:
        parallel: of `parallelize`.
        micro_batches: this rank's; as many on every rank. With pp all of one shape, and on every stage's rank the same.
        ignore_index: marks targets that do not count.
        z_loss: weight of the mean of log²Z, as of `Ops.linear_cross_entropy`; it is part of the loss.

    Returns:
        (loss of the global batch, its unmasked tokens), scalars, the same on every rank. Without any unmasked token
        the loss is 0 and gradients are zero.

    Raises:
        ValueError: no micro-batch, a model without head, or what the pipeline's schedule cannot run.
    """
    if not micro_batches:
        raise ValueError("there is no micro-batch")
    if parallel.pipeline is None and parallel.model.lm_head is None:
        raise ValueError("this model has no output head, and there is no pipeline")
    count = count_targets(parallel, micro_batches, ignore_index)

    def loss_of(hidden: Tensor, model: Llama, batch: MicroBatch) -> Tensor:
        return sum_of_losses(hidden, model, batch, ignore_index, z_loss) / count.clamp(min=1)

    total = _zero(parallel, torch.promote_types(next(parallel.model.parameters()).dtype, torch.float32))
    with set_aside(summed_later(parallel)):
        if parallel.pipeline is not None:
            of_last = parallel.pipeline.accumulate(parallel, micro_batches, loss_of)
            total += 0 if of_last is None else of_last
        else:
            for number, batch in enumerate(micro_batches, start=1):
                parallel.set_gradient_sync(number == len(micro_batches))
                hidden = parallel.forward(batch.tokens, batch.positions, batch.documents)
                loss = loss_of(hidden, parallel.model, batch)
                loss.backward()
                total += loss.detach()
    return sum_of_ranks(parallel, total), count


def summed_later(parallel: Parallel) -> list[nn.Parameter]:
    """Parameters whose `grad` is summed over ranks where it lies: all that are replicated, and tied ends of a pipeline.

    FSDP sums what its backward passes made, and adds that to what was there.
    """
    pipeline = parallel.pipeline
    if parallel.replication is not None or (pipeline is not None and pipeline.replicas is not None):
        return list(parallel.model.parameters())
    end = None if pipeline is None else tied_end(parallel.model)
    return [] if end is None else [end]


@contextmanager
def set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Gradients of earlier calls, which are sums over ranks already, do not take part; they are added at the end."""
    before = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in before:
        parameter.grad = None
    yield
    with torch.no_grad():
        for parameter, gradient in before:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def sum_of_losses(hidden: Tensor, model: Llama, batch: MicroBatch, ignore_index: int, z_loss: float = 0.0) -> Tensor:
    """Of the unmasked tokens of one micro-batch, from hidden states after the final norm. A scalar."""
    assert model.lm_head is not None
    # the weight is asked for here, not before: FSDP has just gathered it
    weight = model.lm_head.weight
    return model.ops.linear_cross_entropy(
        hidden, weight, batch.targets, ignore_index=ignore_index, reduction="sum", z_loss=z_loss
    )


def sum_of_ranks(parallel: Parallel, total: Tensor) -> Tensor:
    """In place: over the ranks with other tokens, and from the pipeline's last stage (others give 0) to all."""
    dist.all_reduce(total, group=batch_group(parallel.mesh))
    if parallel.pipeline is not None:
        dist.all_reduce(total, group=parallel.pipeline.group)
    return total


def _zero(parallel: Parallel, dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype, device=next(parallel.model.parameters()).device)
