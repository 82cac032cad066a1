"""The operations a faster library may replace, and their plain definitions.

`Ops` is a value: a model is built with one, and nothing is switched from afar. The defaults below are the
definitions; `llama_kernels.ops(device)` returns an object with the same fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# Shape legend: B batch, S sequence, H query heads, K key/value heads, D head width, E hidden, F feed-forward,
# V vocabulary


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang & Sennrich 2019, eq. 4).

    Args:
        x: (..., E), any float dtype.
        weight: (E,).
        eps: added to the mean square.

    Returns:
        (..., E) in x's dtype. The statistics are float32 (float64 for float64): in half precision the square of
        300 is already infinite.
    """
    if x.dtype == weight.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)  # the lines below in one call, with fewer passes over memory
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight.to(wide.dtype) * scaled).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add to the residual stream and normalise: total = x + residual; returns (rms_norm(total), total)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions (Su et al. 2021, eq. 34), Hugging Face's half layout.

    Channel j of a head is paired with channel j + D/2 and the pair is turned by the angle of its position.

    Args:
        q: (B, S, H, D).
        k: (B, S, K, D).
        cos, sin: (B or 1, S, D/2), float32.

    Returns:
        Rotated q and k, in their dtypes; the product is taken in float32 (float64 for float64).
    """
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x_BSHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = torch.promote_types(x_BSHD.dtype, torch.float32)
    cos, sin = cos.unsqueeze(2).to(wide), sin.unsqueeze(2).to(wide)  # one angle for all heads
    first, second = x_BSHD.to(wide).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BSHD.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up (Shazeer 2020, https://arxiv.org/abs/2002.05202, eq. 6); (..., F) each."""
    return F.silu(gate) * up


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss: float = 0.0,
) -> Tensor:
    """Cross-entropy of softmax(hidden · weightᵀ) against targets, in float32 (float64 for float64).

    Args:
        hidden: (..., E).
        weight: (V, E), the output head.
        targets: (...), int64; `ignore_index` rows count for nothing.
        reduction: "mean" over the counted rows, "sum", or "none" (zeros at ignored rows).
        z_loss: weight of log²Z added per row, Z the softmax's denominator (PaLM, section 5).

    Returns:
        A scalar, or (...) for "none". With every row ignored it is 0 and gradients are zero.

    Raises:
        ValueError: shapes that do not fit, targets that are not int64, an unknown reduction, or, on the CPU, a
            target outside [0, V) (a GPU would have to wait for the answer; there it is an assertion of the device).
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean', 'sum' or 'none'")
    if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)} "
            "do not fit: (..., E), (V, E), (...) are wanted"
        )
    if targets.dtype != torch.int64:
        raise ValueError(f"targets are {targets.dtype}; torch.int64 is wanted")
    logits = F.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = targets != ignore_index
    if targets.device.type == "cpu" and targets.numel():
        low, high = (int(x) for x in torch.where(counted, targets, 0).aminmax())
        if low < 0 or high >= len(weight):
            raise ValueError(
                f"a target is outside [0, {len(weight)}): smallest {low}, largest {high} "
                f"(rows with {ignore_index} are ignored)"
            )
    rows = logits.reshape(-1, len(weight))
    losses = F.cross_entropy(rows, targets.reshape(-1), ignore_index=ignore_index, reduction="none")
    losses = losses.view(targets.shape)
    if z_loss:
        log_z = torch.logsumexp(logits, dim=-1)
        losses = losses + z_loss * torch.where(counted, log_z.square(), 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum().clamp(min=1) if reduction == "mean" else losses.sum()


class LinearCrossEntropy(Protocol):
    """Signature of `linear_cross_entropy`."""

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        z_loss: float = 0.0,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Ops:
    """The set of operations a model is built with; see each default for its definition."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = add_rms_norm
    rope: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = rope
    swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu
    linear_cross_entropy: LinearCrossEntropy = linear_cross_entropy
    swiglu_linear: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """(gate, up, weight) → swiglu(gate, up) · weightᵀ, in training, where keeping swiglu's result can be saved. None:
    swiglu and then the layer's product."""
