"""The loss of a global batch without gradients, under every layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .gradients import MicroBatch, count_targets, sum_of_losses, sum_of_ranks
from .parallel import Parallel
from .pipeline_forward import forward_only
from .stages import reshard


@torch.no_grad()
def mean_loss(
    parallel: Parallel, micro_batches: Sequence[MicroBatch], ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """(sum of token losses) / (unmasked tokens) of the whole global batch; a collective call of every rank.

    Args:
        parallel: of `parallelize`.
        micro_batches: this rank's; as many on every rank, on every stage's rank of a pipeline the same. Any shapes.
        ignore_index: marks targets that do not count.

    Returns:
        (loss, unmasked tokens), scalars, the same on every rank; the loss is 0 without any unmasked token.

    Raises:
        ValueError: no micro-batch.
    """
    if not micro_batches:
        raise ValueError("there is no micro-batch")
    pipeline, model = parallel.pipeline, parallel.model
    count = count_targets(parallel, micro_batches, ignore_index)
    kind = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    total = torch.zeros((), dtype=kind, device=count.device)
    for batch in micro_batches:
        inputs = (batch.tokens, batch.positions, batch.documents)
        hidden = parallel.forward(*inputs) if pipeline is None else forward_only(pipeline, parallel, *inputs)
        if hidden is not None:
            last = model if pipeline is None else pipeline.last
            assert last is not None
            total += sum_of_losses(hidden, last, batch, ignore_index)
    if pipeline is not None:
        for stage in pipeline.stages.values():
            reshard(stage)
    return sum_of_ranks(parallel, total) / count.clamp(min=1), count
