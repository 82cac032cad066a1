"""Attention written out in plain torch: the oracle of every faster path, and the backend called "plain".

    S = q k^T / sqrt(D) + mask        lse = log sum_j exp S_j        P = exp(S - lse)        out = P v
    dv = P^T dout        dP = dout v^T        dS = P * (dP - rowsum(dout * out))
    dq = dS k / sqrt(D)        dk = dS^T q / sqrt(D)

(FlashAttention-2, arXiv:2307.08691, section 2.2 and appendix B, without the tiles.) A row that sees no key has
out = 0, lse = -inf and no gradient. Memory is quadratic in the sequence. Shape legend: attention_call.py.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from llama_kernels.attention_call import AttentionCall, check_document_bounds, check_tensors, describe


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    q_offset: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp, differentiable by autograd (the output only; lse is detached).

    Arguments and shapes are those of `llama_kernels.attention`. Computes in float32, in float64 for float64 inputs.
    """
    check_tensors(q, k, v, cu_seqlens_q, cu_seqlens_k)
    call = describe(q, k, cu_seqlens_q, cu_seqlens_k, causal, q_offset, None, None)
    return plain_forward(q, k, v, call, cu_seqlens_q, cu_seqlens_k)


def visible(seq_q: int, seq_k: int, call: AttentionCall, device: torch.device) -> Tensor:
    """(Sq, Sk) bool: which keys a query sees in a sequence of these lengths."""
    if not call.causal:
        return torch.ones(seq_q, seq_k, dtype=torch.bool, device=device)
    offset = seq_k - seq_q if call.q_offset is None else call.q_offset
    return torch.arange(seq_k, device=device) <= torch.arange(seq_q, device=device)[:, None] + offset


def documents(call: AttentionCall, cu_q: Tensor | None, cu_k: Tensor | None) -> list[tuple[slice, slice]]:
    """Token ranges (queries, keys) of each document. Reads the bounds to the host."""
    assert cu_q is not None
    assert cu_k is not None
    bounds_q = check_document_bounds("cu_seqlens_q", cu_q, call.seq_q)
    bounds_k = check_document_bounds("cu_seqlens_k", cu_k, call.seq_k)
    return [(slice(*rows), slice(*keys)) for rows, keys in zip(pairwise(bounds_q), pairwise(bounds_k))]


def plain_forward(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, cu_q: Tensor | None, cu_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(out like q, lse). Packed calls go document by document; rows outside every document are empty rows."""
    if not call.packed:
        return _dense_forward(q, k, v, call)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full(call.lse_shape, float("-inf"), dtype=call.lse_dtype, device=q.device)
    for rows, keys in documents(call, cu_q, cu_k):
        part, part_lse = _dense_forward(q[None, rows], k[None, keys], v[None, keys], call)
        out[rows] = part[0]
        lse[:, rows] = part_lse[0]
    return out, lse


def _scores(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
    """(B, K, G, Sq, Sk) scaled, masked scores in the accumulation type."""
    q_BSKGD = q.to(call.lse_dtype).unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("bskgd,btkd->bkgst", q_BSKGD * call.scale, k.to(call.lse_dtype))
    mask = visible(q.shape[1], k.shape[1], call, q.device)
    return scores.masked_fill(~mask, float("-inf"))


def _dense_forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    if k.shape[1] == 0:
        empty = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=call.lse_dtype, device=q.device)
        return torch.zeros_like(q, memory_format=torch.contiguous_format), empty
    scores = _scores(q, k, call)
    top = scores.amax(-1, keepdim=True).detach()
    top = top.masked_fill(top == float("-inf"), 0.0)  # -inf - -inf would be NaN in a row without keys
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    probs = weights / total.masked_fill(total == 0, 1.0)
    out = torch.einsum("bkgst,btkd->bskgd", probs, v.to(call.lse_dtype)).flatten(2, 3)
    lse = (top + torch.log(total)).squeeze(-1).flatten(1, 2)
    return out.to(q.dtype).contiguous(), lse.detach().contiguous()


def plain_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: AttentionCall,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv). `out` and `lse` may be those of a longer row than `k` holds (ring attention)."""
    if not call.packed:
        return _dense_backward(dout, q, k, v, out, lse, call)
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for rows, keys in documents(call, cu_q, cu_k):
        parts = _dense_backward(
            dout[None, rows], q[None, rows], k[None, keys], v[None, keys], out[None, rows], lse[None, :, rows], call
        )
        dq[rows], dk[keys], dv[keys] = (part[0] for part in parts)
    return dq, dk, dv


def _dense_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor]:
    kind, heads = call.lse_dtype, (k.shape[2], q.shape[2] // k.shape[2])
    dout_BSKGD, out_BSKGD, q_BSKGD = (x.to(kind).unflatten(2, heads) for x in (dout, out, q))
    delta_BKGS = (dout_BSKGD * out_BSKGD).sum(-1).permute(0, 2, 3, 1)
    lse_BKGS = lse.to(kind).unflatten(1, heads)
    lse_BKGS = lse_BKGS.masked_fill(lse_BKGS == float("-inf"), float("inf"))  # empty rows: P = exp(-inf) = 0
    probs = torch.exp(_scores(q, k, call) - lse_BKGS[..., None])
    dprobs = torch.einsum("bskgd,btkd->bkgst", dout_BSKGD, v.to(kind))
    dscores = probs * (dprobs - delta_BKGS[..., None]) * call.scale
    dq = torch.einsum("bkgst,btkd->bskgd", dscores, k.to(kind)).flatten(2, 3)
    dk = torch.einsum("bkgst,bskgd->btkd", dscores, q_BSKGD)
    dv = torch.einsum("bkgst,bskgd->btkd", probs, dout_BSKGD)
    return dq.to(q.dtype).contiguous(), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous()
