"""The attention kernels that come with torch, under our conventions.

Each function takes (B, S, H, D) or packed (T, H, D), needs no repeated key heads, and returns the log-sum-exp as
float32 (B, H, S) or (H, T). The operators are private to torch; their argument order was read from the schemas of
torch 2.11 and 2.15 and is pinned by tests. Backward functions accept the output and log-sum-exp of a longer row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from llama_kernels.attention_call import AttentionCall
from llama_kernels.flash_attention import with_tails, without_keys
from llama_kernels.reference_attention import documents, visible

aten = torch.ops.aten


# ------------------------------------------------------------------------------------------------ cuDNN, dense calls


def cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, cu_q: Tensor | None, cu_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    result = aten._scaled_dot_product_cudnn_attention(*heads_first, None, True, 0.0, call.causal, scale=call.scale)
    return result[0].transpose(1, 2).contiguous(), result[1].view(call.lse_shape)  # it comes as (B, H, S, 1)


def cudnn_backward(
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
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # dropout is zero: never read
    heads_first = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        *heads_first, lse.unsqueeze(-1), seed, seed, None, None, None, call.seq_q, call.seq_k, 0.0, call.causal,
        scale=call.scale,
    )  # fmt: skip
    dq, dk, dv = (x.transpose(1, 2).contiguous() for x in grads)
    return dq, dk, dv


# --------------------------------------------------------------------- FlashAttention-2 as built into torch, on CUDA


def flash_torch_forward(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, cu_q: Tensor | None, cu_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    if cu_q is not None and cu_k is not None:
        cu_q, cu_k = with_tails(cu_q, cu_k, call)
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, call.max_q, call.max_k, 0.0, call.causal, False, scale=call.scale
    )
    return out, without_keys(lse.view(call.lse_shape), call)


def flash_torch_backward(
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
    if cu_q is not None and cu_k is not None:
        cu_q, cu_k = with_tails(cu_q, cu_k, call)
    # The generator's state and the unused tensor as torch.nn.attention.varlen passes them: dropout is zero.
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    lse = without_keys(lse, call)
    dq, dk, dv = aten._flash_attention_backward(
        dout, q, k, v, out, lse, cu_q, cu_k, call.max_q, call.max_k, 0.0, call.causal, state, unused, scale=call.scale
    )
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


# ------------------------------------------------------------------------------------------- flash attention on a CPU


def flash_cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, cu_q: Tensor | None, cu_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    if not call.packed:
        return _cpu_forward(q, k, v, call)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full(call.lse_shape, -math.inf, device=q.device)
    for rows, keys in documents(call, cu_q, cu_k):
        if keys.stop > keys.start:
            part, part_lse = _cpu_forward(q[None, rows], k[None, keys], v[None, keys], call)
            out[rows], lse[:, rows] = part[0], part_lse[0]
    return out, lse


def _cpu_rows(q: Tensor, k: Tensor, call: AttentionCall) -> tuple[slice, dict[str, Any]]:
    """The rows that see a key, and the operator's arguments for their mask.

    Its own causal mask is the top-left one; any other is written out, (Sq, Sk), once for all heads.
    """
    offset = k.shape[1] - q.shape[1] if call.q_offset is None else call.q_offset
    if not call.causal:
        return slice(None), {"is_causal": False}
    if offset <= 0:
        return slice(min(-offset, q.shape[1]), None), {"is_causal": True}
    seen = visible(q.shape[1], k.shape[1], call, q.device)
    bias = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, -math.inf)
    return slice(None), {"is_causal": False, "attn_mask": bias}


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    rows, mask = _cpu_rows(q, k, call)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, device=q.device)
    if q[:, rows].shape[1]:
        heads_first = (q[:, rows].transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        part, lse[:, :, rows] = aten._scaled_dot_product_flash_attention_for_cpu(
            *heads_first, 0.0, **mask, scale=call.scale
        )
        out[:, rows] = part.transpose(1, 2)
    return out, lse


def flash_cpu_backward(
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
    if not call.packed:
        return _cpu_backward(dout, q, k, v, out, lse, call)
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for rows, keys in documents(call, cu_q, cu_k):
        if keys.stop > keys.start:
            parts = _cpu_backward(
                dout[None, rows], q[None, rows], k[None, keys], v[None, keys], out[None, rows], lse[None, :, rows], call
            )
            dq[rows], dk[keys], dv[keys] = (part[0] for part in parts)
    return dq, dk, dv


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor]:
    rows, mask = _cpu_rows(q, k, call)
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if q[:, rows].shape[1]:
        heads_first = [x.transpose(1, 2) for x in (dout[:, rows], q[:, rows], k, v, out[:, rows])]
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads_first, lse[:, :, rows].contiguous(), 0.0, **mask, scale=call.scale
        )
        dq[:, rows], dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk.contiguous(), dv.contiguous()


# ----------------------------------------------------------------- torch's own choice, without a log-sum-exp


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention: its own choice of kernel, its own autograd, top-left mask."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)
