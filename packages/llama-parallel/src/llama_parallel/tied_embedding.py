"""Tied embeddings over a pipeline: first and last stage each hold the matrix, and its gradient is the sum of both.

Once a step, after the data-parallel sums, both send each other their part, V · E / (dp_shard · cp · tp) elements.
a + b is b + a to the bit, so the two copies, drawn alike, stay alike.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from llama_core import Llama

from .shards import HEAD


def tied_end(model: Llama) -> nn.Parameter | None:
    """This end's copy of a matrix that the pipeline's other end holds as well, or None."""
    embedding, head = model.model.embed_tokens, model.lm_head
    if not model.config.tie_word_embeddings or (embedding is None) == (head is None):
        return None
    end = head if head is not None else embedding
    assert end is not None
    return cast(nn.Parameter, end.weight)


def counted_elsewhere(model: nn.Module) -> frozenset[str]:
    """Names of parameters that are the first stage's to count: the last stage's copy of a tied matrix."""
    last = isinstance(model, Llama) and model.lm_head is not None and tied_end(model) is not None
    return frozenset({HEAD}) if last else frozenset()


@torch.no_grad()
def sum_ends(model: Llama, group: ProcessGroup) -> None:
    """Add the other end's gradient, none of which may be a sum of both already; called by all ranks, of use to two.

    Args:
        model: this rank's part.
        group: the pipeline's ranks.
    """
    end = tied_end(model)
    if end is None:
        return
    if end.grad is None:
        end.grad = torch.zeros_like(end)
    local = end.grad.to_local() if isinstance(end.grad, DTensor) else end.grad
    other = torch.empty_like(local)
    peer = 0 if model.lm_head is not None else group.size() - 1
    operations = [
        dist.P2POp(dist.isend, local.contiguous(), group=group, group_peer=peer),
        dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    local += other
