"""The definitions, in plain torch: what runs where Triton does not, and the oracle of the kernels' tests.

Every function computes in float32, or in float64 when its input is float64; tests pass float64. The oracles of
attention are in `reference_attention.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight (Zhang & Sennrich 2019, eq. 4); x (..., E), weight (E,)."""
    x_wide = x.to(wide(x.dtype))
    rstd = torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    return (x_wide * rstd * weight.to(x_wide.dtype)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(total), total) with total = x + residual."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Pair channel j with j + D/2 and turn each pair by its position's angle (Su et al. 2021, eq. 34).

    q (B, S, H, D), k (B, S, K, D), cos and sin (B or 1, S, D/2).
    """
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x_BSHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    dtype = wide(x_BSHD.dtype)
    cos, sin = cos.unsqueeze(2).to(dtype), sin.unsqueeze(2).to(dtype)
    first, second = x_BSHD.to(dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BSHD.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up (Shazeer 2020, https://arxiv.org/abs/2002.05202, eq. 6); (..., F) each."""
    dtype = wide(gate.dtype)
    return (F.silu(gate.to(dtype)) * up.to(dtype)).to(gate.dtype)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss: float = 0.0,
) -> Tensor:
    """Cross-entropy of softmax(hidden · weightᵀ) with all logits at once: the definition, memory no object.

    hidden (..., E), weight (V, E), targets (...). Rows with `ignore_index` count for nothing; z_loss · log²Z is added
    per row (PaLM, https://arxiv.org/abs/2204.02311, section 5). float32, or float64 for float64.
    """
    dtype = wide(hidden.dtype)
    logits = hidden.to(dtype) @ weight.to(dtype).T
    counted = targets != ignore_index
    log_z = torch.logsumexp(logits, dim=-1)
    losses = log_z - logits.gather(-1, torch.where(counted, targets, 0).unsqueeze(-1)).squeeze(-1)
    losses = torch.where(counted, losses + z_loss * log_z.square(), 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum().clamp(min=1) if reduction == "mean" else losses.sum()


def byte_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x (M, K) times weight (N, K) int8 or fp8 with a scale (N,) per output."""
    dtype = wide(x.dtype)
    return ((x.to(dtype) @ weight.to(dtype).T) * scale.to(dtype)).to(x.dtype)


def int4_weight(packed: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """(N, K) in scale's wide dtype from packed (N, K/128, 16): nibble i of word j of a group is its input 16 i + j."""
    dtype = wide(scale.dtype)
    shifts = torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32).view(8, 1)
    q = (packed.unsqueeze(2) >> shifts) & 15  # (N, groups, 8, 16)
    return (q.flatten(2).to(dtype) * scale.to(dtype).unsqueeze(2) + minimum.to(dtype).unsqueeze(2)).flatten(1)


def kept_tokens(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Mask (B, V) of what temperature → top-k → top-p → min-p leave; settings (B,). Equals of a threshold stay."""
    x = logits.to(wide(logits.dtype))
    ordered = x.sort(dim=1, descending=True).values
    vocabulary = x.shape[1]
    k = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary).to(torch.int64)
    threshold = ordered.gather(1, (k - 1).unsqueeze(1))
    scaled = (ordered - ordered[:, :1]) / temperature.clamp(min=1e-30).to(x.dtype).unsqueeze(1)
    weights = torch.where(ordered >= threshold, scaled.exp(), 0.0)
    before = weights.cumsum(1) - weights  # weight of the tokens ahead of this one
    nucleus = before < top_p.to(x.dtype).unsqueeze(1) * weights.sum(1, keepdim=True)
    nucleus |= (top_p >= 1).unsqueeze(1)
    likely = scaled.exp() >= min_p.to(x.dtype).unsqueeze(1)
    stay = (ordered >= threshold) & nucleus & likely
    stay[:, 0] = True
    lowest = torch.where(stay, ordered, torch.inf).amin(1, keepdim=True)
    return (x >= lowest) & (x > -torch.inf)


def sample(
    logits: Tensor, seeds: Tensor, offsets: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """One token id per row (B,), the row's uniform number from torch's generator seeded by (seed, offset)."""
    x = logits.to(wide(logits.dtype))
    kept = kept_tokens(x, temperature, top_k, top_p, min_p)
    scaled = (x - x.amax(1, keepdim=True)) / temperature.clamp(min=1e-30).to(x.dtype).unsqueeze(1)
    cumulative = torch.where(kept, scaled.exp(), 0.0).cumsum(1, dtype=torch.float64)
    uniform = [
        torch.rand((), generator=torch.Generator().manual_seed(hash((seed, offset))), dtype=torch.float64)
        for seed, offset in zip(seeds.tolist(), offsets.tolist(), strict=True)
    ]
    point = torch.stack(uniform).to(x.device).unsqueeze(1) * cumulative[:, -1:] if uniform else cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, point, right=True).squeeze(1).clamp(max=x.shape[1] - 1)
    return torch.where(temperature > 0, drawn, x.argmax(1))
