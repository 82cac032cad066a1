"""Scores of whole sequences on every rank, for samples during training and for evaluation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .parallel import Parallel
from .pipeline_forward import pipeline_logits
from .sequence_shards import shard_sequence, share_unit, unshard_sequence


def full_logits(parallel: Parallel, tokens: Tensor) -> Tensor:
    """Tokens to logits, whatever the layout; `partial(full_logits, parallel)` is what `generate_naive` takes.

    A collective call: every rank must make it, with the same tokens on all ranks of tp, cp and pp. Where shares of a
    sequence need a length that divides, pads are added at the end, which no real token sees, and their logits dropped.

    Args:
        parallel: of `parallelize`. With pp there are no gradients.
        tokens: (B, S), integers.

    Returns:
        (B, S, V).
    """
    mesh, context, length = parallel.mesh, parallel.plan.context, tokens.shape[1]
    unit = share_unit(mesh["cp"].size(), context)
    if parallel.plan.sequence_parallel:
        unit *= mesh["tp"].size()
    padded = F.pad(tokens, (0, -length % unit))
    shard = shard_sequence(padded, mesh, context)
    if parallel.pipeline is None:
        logits = parallel.model.logits(parallel.forward(shard))
    else:
        logits = pipeline_logits(parallel.pipeline, parallel, shard)
    return unshard_sequence(logits, mesh, context)[:, :length]
