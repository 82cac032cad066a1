"""Joining attention over two sets of keys, given each part's output and log-sum-exp.

    lse = log(exp(lse_a) + exp(lse_b))        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

(Milakov & Gimelshein, arXiv:1805.02867; used by ring attention, arXiv:2310.01889, and by split-key decoding.)
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over the keys of both parts.

    Args:
        out_a, out_b: (B, S, H, D) with lse (B, H, S), or packed (T, H, D) with lse (H, T). Any floating types.
        lse_a, lse_b: natural logarithms. -inf marks a row that saw no key; such a part counts for nothing,
            and a row empty in both stays zero with -inf.

    Returns:
        (out, lse) in float32 (float64 if an input is), so that many parts can be merged one after another without
        rounding to a half type in between. Differentiable in all four arguments.

    Raises:
        ValueError: if the shapes do not belong together.
    """
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape:
        raise ValueError(
            f"parts differ: out {tuple(out_a.shape)} and {tuple(out_b.shape)}, "
            f"lse {tuple(lse_a.shape)} and {tuple(lse_b.shape)}"
        )
    if lse_a.transpose(-1, -2).shape != out_a.shape[:-1]:
        raise ValueError(f"lse {tuple(lse_a.shape)} must be {tuple(out_a.shape)} without D, heads before rows")
    kind = torch.float64 if torch.float64 in (out_a.dtype, out_b.dtype, lse_a.dtype, lse_b.dtype) else torch.float32
    lse_a, lse_b = lse_a.to(kind), lse_b.to(kind)
    top = torch.maximum(lse_a, lse_b).detach()
    top = top.masked_fill(top == float("-inf"), 0.0)  # both empty: exp(-inf - 0) = 0 and never -inf - -inf
    weight_a, weight_b = torch.exp(lse_a - top), torch.exp(lse_b - top)  # at most 1: no overflow
    total = weight_a + weight_b
    empty = total == 0
    total = total.masked_fill(empty, 1.0)  # before dividing and taking the logarithm: their gradients stay finite too
    rows_a, rows_b = ((w / total).transpose(-1, -2)[..., None] for w in (weight_a, weight_b))
    out = rows_a * out_a.to(kind) + rows_b * out_b.to(kind)
    return out, (top + torch.log(total)).masked_fill(empty, float("-inf"))
