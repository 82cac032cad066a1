"""The attention seam, and its plain implementations.

The model computes queries, keys and values with rotary positions applied and calls `attend(layer, q, k, v)`.
Whether that is plain causal attention, packed documents, a KV cache or a ring of GPUs, the model never learns.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# Shape legend: B batch, S queries, T keys, H query heads, K key/value heads, G = H/K, D head width


class Attend(Protocol):
    """What the model asks of attention."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, S, H, D), k and v (B, S, K, D), rotary positions applied → (B, S, H, D).

        `layer` is the index of the calling layer in the whole model: a cache keeps one store per layer.
        Query head h reads key/value head h // (H / K).
        """
        ...


def causal_attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every token sees itself and what stands before it; through torch's scaled_dot_product_attention."""
    return sdpa(q, k, v, causal=True)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """`scaled_dot_product_attention` in this library's layout.

    Args:
        q: (B, S, H, D). k, v: (B, T, K, D); heads are shared within a group, not repeated.
        mask: (B or 1, 1, S, T), True where a query may look.
        causal: a lower triangle instead of a mask; needs S = T.

    Returns:
        (B, S, H, D).

    Raises:
        ValueError: `causal` with S ≠ T.
    """
    if causal and q.shape[1] != k.shape[1]:  # torch would anchor the triangle at the top left
        raise ValueError(f"causal attention over {q.shape[1]} queries and {k.shape[1]} keys needs a mask")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
    return out.transpose(1, 2)


def plain_attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as the formula says it: softmax(q kᵀ / √D) v (Vaswani et al. 2017, eq. 1).

    The oracle of every other implementation: it holds all S² scores.
    """
    batch, length, heads, width = q.shape
    if k.shape[1] != length:
        raise ValueError(f"causal attention wants as many keys as queries; there are {k.shape[1]} and {length}")
    q_BKGSD = q.view(batch, length, k.shape[2], -1, width).permute(0, 2, 3, 1, 4)
    k_BK1TD, v_BK1TD = (x.transpose(1, 2).unsqueeze(2) for x in (k, v))
    scores = q_BKGSD @ k_BK1TD.transpose(-1, -2) / math.sqrt(width)
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(future, float("-inf"))
    out = scores.softmax(-1).to(v.dtype) @ v_BK1TD
    return out.permute(0, 3, 1, 2, 4).reshape(batch, length, heads, width)


class PaddedAttend:
    """Causal attention over a padded batch: nothing but a pad itself looks at a pad.

    Use it with `positions_from_mask`, so that a row's positions start at its first real token.

    Args:
        attention_mask: (B, S), nonzero at real tokens, zero at pads, on either side.
    """

    def __init__(self, attention_mask: Tensor) -> None:
        if attention_mask.dim() != 2:
            raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}; (batch, sequence) is wanted")
        real = attention_mask != 0
        length = real.shape[1]
        before = torch.ones(length, length, dtype=torch.bool, device=real.device).tril()
        itself = torch.eye(length, dtype=torch.bool, device=real.device)  # a row without any key would be NaN
        self.mask = (before & real[:, None, None, :]) | itself

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, mask=self.mask)


class PackedAttend:
    """Causal attention that stays inside documents packed into one row.

    Args:
        document_ids: (B, S), the same number within a document and another one in its neighbours; use
            `positions_from_documents` beside it.
    """

    def __init__(self, document_ids: Tensor) -> None:
        document = _starts(document_ids).cumsum(-1)  # a number used again later in the row is another document
        length = document.shape[1]
        before = torch.ones(length, length, dtype=torch.bool, device=document.device).tril()
        self.mask = (before & (document[:, :, None] == document[:, None, :])).unsqueeze(1)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, mask=self.mask)


def positions_from_mask(attention_mask: Tensor) -> Tensor:
    """(B, S) mask → (B, S) int64 positions counting real tokens from 0; pads get the position 0 or the last one."""
    return ((attention_mask != 0).long().cumsum(-1) - 1).clamp(min=0)


def positions_from_documents(document_ids: Tensor) -> Tensor:
    """(B, S) document numbers → (B, S) int64 positions that start at 0 in every document."""
    starts = _starts(document_ids)
    index = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    return index - torch.where(starts, index, 0).cummax(-1).values


def _starts(document_ids: Tensor) -> Tensor:
    """(B, S) document numbers → (B, S), True at the first token of every document."""
    if document_ids.dim() != 2:
        raise ValueError(f"document_ids has shape {tuple(document_ids.shape)}; (batch, sequence) is wanted")
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return starts
