"""Scores of whole sequences on every rank, for samples during training and for evaluation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .parallel import Parallel


def full_logits(parallel: Parallel, tokens: Tensor) -> Tensor:
    """Tokens to logits, whatever the layout; `partial(full_logits, parallel)` is what `generate_naive` takes.

    A collective call: every rank must make it, with the same tokens on all ranks of a tp group. Where sequence
    parallelism needs a length that divides, pads are added at the end, which no real token sees, and their logits
    dropped.

    Args:
        parallel: a model with an output head.
        tokens: (B, S), integers.

    Returns:
        (B, S, V).

    Raises:
        ValueError: cp > 1, where a rank has no whole sequence.
    """
    if parallel.mesh["cp"].size() > 1:
        raise ValueError(f"cp = {parallel.mesh['cp'].size()}: whole sequences on every rank need cp = 1")
    length = tokens.shape[1]
    share = parallel.mesh["tp"].size() if parallel.plan.sequence_parallel else 1
    padded = F.pad(tokens, (0, -length % share))
    logits = parallel.model.logits(parallel.model(padded))
    return logits[:, :length]
