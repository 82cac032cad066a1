"""One optimizer step: the gradient of the mean loss over every unmasked token of all its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llama_core import Llama

from .batches import Batch
from .forward import forward
from .optimizer import Optimizer


@dataclass(frozen=True)
class StepResult:
    """Loss and gradient norm, scalars on the model's device that nothing has waited for, and counted tokens."""

    loss: Tensor
    grad_norm: Tensor
    targets: int
    norms: Mapping[str, Tensor] = field(default_factory=dict)
    """Of each gradient that this process holds, before clipping: they tell where a NaN came from."""


def training_step(
    model: Llama,
    optimizer: Optimizer,
    micro_batches: Sequence[Batch],
    learning_rate: float,
    max_grad_norm: float,
    z_loss: float = 0.0,
) -> StepResult:
    """Forward, loss, backward for each micro-batch; then clip and update.

    Where no token at all has a target, the weights and the optimizer stay as they are and the result has
    `targets == 0`: even a gradient of zero would decay weights and age the moments. They also stay where the loss or
    the gradient's norm is not finite.
    """
    loss, targets = accumulate_gradients(model, micro_batches, optimizer.collect, z_loss)
    if targets == 0:
        optimizer.zero_grad()
        return StepResult(loss, torch.zeros_like(loss), 0)
    grad_norm = optimizer.clip(max_grad_norm)
    optimizer.step(learning_rate, skip=not_finite(loss, grad_norm))
    return StepResult(loss, grad_norm, targets, optimizer.norms)


def not_finite(loss: Tensor, grad_norm: Tensor) -> Tensor:
    """1 where either is infinite or NaN, else 0: a float32 scalar on their device, which nothing waits for."""
    return 1.0 - (loss.isfinite() & grad_norm.isfinite()).float()


def accumulate_gradients(
    model: Llama,
    micro_batches: Sequence[Batch],
    collect: Callable[[], None] = lambda: None,
    z_loss: float = 0.0,
) -> tuple[Tensor, int]:
    """Add to the parameters' gradients those of (sum of token losses) / (unmasked tokens of all micro-batches).

    The divisor is that of the whole step: the mean of the micro-batches' means would weigh a token by how few
    neighbours it has.

    Args:
        model: any Llama with an output head.
        micro_batches: of any sizes.
        collect: called after each backward pass.
        z_loss: weight of the mean of log²Z, Z the softmax's denominator (PaLM, section 5): it keeps logits from
            drifting. It is part of the loss that is returned.

    Returns:
        (the loss, without gradient; the number of unmasked tokens). With none the loss is 0 and gradients are zero.
    """
    assert model.lm_head is not None
    head = model.lm_head.weight
    targets = sum(batch.count for batch in micro_batches)
    total = torch.zeros((), dtype=torch.promote_types(head.dtype, torch.float32), device=head.device)
    for batch in micro_batches:
        batch = batch.to(head.device)
        hidden = forward(model, batch)
        loss_sum = model.ops.linear_cross_entropy(hidden, head, batch.targets, reduction="sum", z_loss=z_loss)
        loss = loss_sum / max(targets, 1)
        loss.backward()
        collect()
        total += loss.detach()
    return total, targets
