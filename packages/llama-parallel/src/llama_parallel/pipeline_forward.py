"""Forward passes through a pipeline: evaluation and samples. Explicit sends and receives, for any shape."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .parallel import Parallel
from .pipeline import Pipeline
from .stages import reshard


def forward_only(
    pipeline: Pipeline,
    parallel: Parallel,
    tokens: Tensor,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor | None:
    """One batch through all stages without gradients, of whatever shape: nothing is kept for the next.

    Ranks of earlier stages return as soon as their part is sent, so that several calls in a row fill the pipeline.

    Args:
        pipeline: this rank's.
        parallel: its model and mesh.
        tokens: (B, S), the same on every rank of the pipeline; positions and documents as in `Parallel.forward`.

    Returns:
        Hidden states after the final norm on the ranks of the last stage, else None.
    """
    at, attend = parallel.inputs(tokens, positions, documents)
    size, hidden = pipeline.group.size(), None
    sent: list[Any] = []
    for index, model in pipeline.stages.items():
        if index == 0:
            x = tokens
        else:
            shape = pipeline.hidden_shape(parallel, tokens.shape)
            x = torch.empty(shape, dtype=pipeline.hidden_dtype(parallel), device=tokens.device)
            _wait(_start(dist.irecv, x, pipeline.group, (index - 1) % size))
        with torch.no_grad():
            hidden = model(x, at, attend)
        if index < pipeline.count - 1:
            sent += _start(dist.isend, hidden.contiguous(), pipeline.group, (index + 1) % size)
    _wait(sent)
    return hidden if pipeline.last is not None else None


def _start(operation: Any, tensor: Tensor, group: ProcessGroup, peer: int) -> list[Any]:
    """As a batch of one, which on NCCL takes the group's communicator; a single send would make one for each pair."""
    return dist.batch_isend_irecv([dist.P2POp(operation, tensor, group=group, group_peer=peer)])


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


@torch.no_grad()
def pipeline_logits(pipeline: Pipeline, parallel: Parallel, tokens: Tensor) -> Tensor:
    """Tokens (B, S) → the last stage's logits (B, S, V), sent to every rank of the pipeline."""
    hidden = forward_only(pipeline, parallel, tokens)
    if hidden is not None:
        assert pipeline.last is not None
        logits = pipeline.last.logits(hidden).contiguous()
    else:
        shape = (*tokens.shape, pipeline.model.config.vocab_size)
        logits = torch.empty(shape, dtype=pipeline.hidden_dtype(parallel), device=tokens.device)
    dist.broadcast(logits, group=pipeline.group, group_src=(pipeline.count - 1) % pipeline.group.size())
    for stage in pipeline.stages.values():  # the optimizer is about to change what FSDP has gathered
        reshard(stage)
    return logits
