"""Attention with one signature over every backend, as a pair of operators that autograd, compile and CUDA graphs know.

The choice of a backend happens inside the operators, from shapes alone, so that tracing sees one opaque call and
forward and backward always agree. Shape legend: attention_call.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llama_kernels import torch_attention
from llama_kernels.attention_backends import choose
from llama_kernels.attention_call import check_document_bounds, check_tensors, dense_rows, describe


@torch.library.custom_op("llama_kernels::attention_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    causal: bool,
    q_offset: int | None,
    max_q: int | None,
    max_k: int | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    call = describe(q, k, cu_q, cu_k, causal, q_offset, max_q, max_k)
    chosen = choose(call, backend)
    if cu_q is not None and cu_k is not None and not cu_q.is_cuda:
        check_document_bounds("cu_seqlens_q", cu_q, call.seq_q)
        check_document_bounds("cu_seqlens_k", cu_k, call.seq_k)
    if q.numel() == 0 or k.numel() == 0:  # nothing to launch: a grid of no programs is an error
        return q.new_zeros(q.shape), q.new_full(call.lse_shape, float("-inf"), dtype=call.lse_dtype)
    out, lse = chosen.forward(dense_rows(q), dense_rows(k), dense_rows(v), call, cu_q, cu_k)
    return out.contiguous(), lse.contiguous()


@_forward.register_fake
def _(q, k, v, cu_q, cu_k, causal, q_offset, max_q, max_k, backend):  # type: ignore[no-untyped-def]
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = (q.shape[1], q.shape[0]) if cu_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty(q.shape), q.new_empty(rows, dtype=kind)


@torch.library.custom_op("llama_kernels::attention_backward", mutates_args=())
def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    causal: bool,
    q_offset: int | None,
    max_q: int | None,
    max_k: int | None,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    call = describe(q, k, cu_q, cu_k, causal, q_offset, max_q, max_k)
    chosen = choose(call, backend)
    if q.numel() == 0 or k.numel() == 0:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    # Kernels read dout as dense rows; sum() and expand() send strides of 0 (kernels.md, rows 14 and 20).
    dout, out, lse = dout.contiguous(), out.contiguous(), lse.contiguous()
    dq, dk, dv = chosen.backward(dout, dense_rows(q), dense_rows(k), dense_rows(v), out, lse, call, cu_q, cu_k)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_backward.register_fake
def _(dout, q, k, v, out, lse, cu_q, cu_k, causal, q_offset, max_q, max_k, backend):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, cu_q, cu_k, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k)


def _differentiate(ctx, dout, dlse):  # type: ignore[no-untyped-def]
    q, k, v, out, lse, cu_q, cu_k = ctx.saved_tensors
    dq, dk, dv = _backward(dout, q, k, v, out, lse, cu_q, cu_k, *ctx.options)
    return dq, dk, dv, None, None, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    q_offset: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """softmax(q k^T / sqrt(D) + mask) v, without the matrix of scores (FlashAttention-2, arXiv:2307.08691).

    Args:
        q: (B, S, H, D), or packed documents (T, H, D). float16, bfloat16, float32 or float64; D up to 256.
        k, v: (B, Sk, K, D) or (Tk, K, D), H a multiple of K. Query head h reads key head h // (H / K).
        causal: query i sees key j when j <= i + q_offset.
        q_offset: None anchors the mask bottom-right, Sk - Sq, in each document its own. An integer holds for all.
        cu_seqlens_q, cu_seqlens_k: (documents + 1,) int32 on the device of q. Document n is the rows
            cu[n] .. cu[n + 1]. Rows behind the last document see no key and are seen by no query.
        max_seqlen_q, max_seqlen_k: upper bounds on the length of every document and of the rows behind the last one.
            Some backends launch less work when they are given; none reads the bounds on the host to find them.
        return_lse: also return the log-sum-exp.
        backend: None takes the fastest that can serve. A name takes that one: "flash4", "flash2", "flash_torch",
            "flash_cpu" (or "flash": the first of these that can), "cudnn", "triton", "plain", or "sdpa", which is
            torch's scaled_dot_product_attention and has no log-sum-exp.

    Returns:
        out, shaped and typed like q and dense. A row that sees no key is zero and has no gradient.
        With return_lse (out, lse): natural logarithm, float32 (float64 for float64 inputs), (B, H, S) or (H, T), -inf
        for a row without keys. lse carries no gradient.

    Raises:
        ValueError: on shapes that do not fit, or if the named backend cannot serve the call, with its reason.
    """
    check_tensors(q, k, v, cu_seqlens_q, cu_seqlens_k)
    if backend == "sdpa":
        call = describe(q, k, cu_seqlens_q, cu_seqlens_k, causal, q_offset, max_seqlen_q, max_seqlen_k)
        if return_lse or call.packed or not call.top_left:
            why = "log-sum-exp" if return_lse else "packed documents" if call.packed else f"q_offset={call.q_offset}"
            raise ValueError(f"attention backend 'sdpa' cannot serve this call: it has no {why}")
        return torch_attention.sdpa(q, k, v, causal=call.causal)
    out, lse = _forward(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, q_offset, max_seqlen_q, max_seqlen_k, backend)
    return (out, lse.detach()) if return_lse else out


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    q_offset: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) outside autograd, a step of ring attention: as `attention`; join steps with merge_attention."""
    check_tensors(q, k, v, cu_seqlens_q, cu_seqlens_k)
    with torch.no_grad():
        out, lse = _forward(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, q_offset, max_seqlen_q, max_seqlen_k, backend)
    return out, lse


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    q_offset: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the keys k, v contribute to (dq, dk, dv), given the whole row's `out` and `lse`: a step of ring attention.

    With P = exp(S - lse) from the whole row's log-sum-exp, the contributions of disjoint sets of keys simply add up;
    add them in float32. Shapes as in `attention`; out and dout like q in its type, lse (B, H, S) or (H, T).

    Raises:
        ValueError: as `attention`; also if out, dout or lse do not fit q.
    """
    check_tensors(q, k, v, cu_seqlens_q, cu_seqlens_k)
    call = describe(q, k, cu_seqlens_q, cu_seqlens_k, causal, q_offset, max_seqlen_q, max_seqlen_k)
    for name, x in (("out", out), ("dout", dout)):
        if x.shape != q.shape or x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}; expected {q.dtype} {tuple(q.shape)} like q")
    if lse.shape != call.lse_shape or lse.dtype != call.lse_dtype:
        raise ValueError(f"lse is {lse.dtype} {tuple(lse.shape)}; expected {call.lse_dtype} {call.lse_shape}")
    with torch.no_grad():
        dq, dk, dv = _backward(
            dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, causal, q_offset, max_seqlen_q, max_seqlen_k, backend
        )
    return dq, dk, dv
