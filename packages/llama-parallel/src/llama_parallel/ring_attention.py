"""Ring attention: every rank keeps its queries, and keys and values go round (Liu et al. 2023, arXiv:2310.01889).

Rank r of n holds pieces r and 2n - 1 - r of a sequence, its "low" and its "high" half (sequence_shards.py). In step s
it has the keys of rank j = r - s, while those for the next step are already on their way:

    s = 0      all its queries see all its keys, causally
    j < r      all its queries see all keys of j's low half and none of its high half
    j > r      its high half sees all keys of j, and its low half none

so that every step but the first, on every rank, is the same amount of work without a mask, and nothing in the future is
computed. What steps find is joined by the log-sum-exp, in float32.

Backward needs no steps' results: with out and log-sum-exp of the whole row, contributions of keys just add up
(`llama_kernels.attention_backward`). dK and dV travel behind their K and V and come home after n sends.

    sent by each rank and layer, in elements, with B·S/n tokens of a rank, K heads of width D:
    forward     (n - 1) · 2 · B·S/n·K·D    K and V, not repeated to the number of query heads, in the compute dtype
    backward    the same again, and n · 2 · B·S/n·K·D    dK and dV, in float32

Both passes are operators of their own, opaque to autograd, torch.compile and activation checkpointing: "selective"
keeps what forward returns, as its name says attention, and repeats no transfer; "full" repeats forward, on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from llama_kernels import attention_backward, attention_forward

from .collectives import Axis, finish, start_shift
from .documents import Bounds, crossing_bounds, document_bounds

# Shape legend: B batch, S tokens of a sequence on this rank, H query heads, K key/value heads, D head width

_ALL = slice(None)


class _Step(NamedTuple):
    """Which of this rank's queries see which of the keys that it has now, and how documents cross between them."""

    rows: slice
    keys: slice
    causal: bool
    cu_q: Tensor | None
    cu_k: Tensor | None


def _step(number: int, axis: Axis, length: int, bounds: Sequence[Tensor]) -> _Step:
    rows, keys = _seen(number, axis, length)
    cu_q, cu_k = bounds[2 * number : 2 * number + 2] if bounds else (None, None)
    return _Step(rows, keys, number == 0, cu_q, cu_k)


def _seen(number: int, axis: Axis, length: int) -> tuple[slice, slice]:
    if number == 0:
        return _ALL, _ALL
    if number <= axis.rank:  # the keys of an earlier rank
        return _ALL, slice(length // 2)
    return slice(length // 2, None), _ALL


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: list[Tensor], group: str, size: int, rank: int, backend: str | None
) -> tuple[Tensor, Tensor]:
    """(B, S, H, D) and the log-sum-exp (B, H, S); `bounds` holds cu_q and cu_k of each step, or nothing."""
    axis = Axis(group, size, rank)
    kv = torch.stack((k, v))
    for number in range(size):
        coming = start_shift(kv, axis) if number + 1 < size else None
        step = _step(number, axis, q.shape[1], bounds)
        part, part_lse = _attend(q, kv[0], kv[1], step, backend)
        if number == 0:
            out, lse = part.to(torch.promote_types(part.dtype, torch.float32)), part_lse
        else:
            join_(out[:, step.rows], lse[:, :, step.rows], part, part_lse)
        if coming is not None:
            kv = finish(coming)
    return out.to(q.dtype), lse


def ring_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: list[Tensor], group: str,
    size: int, rank: int, backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv), given what forward returned."""
    axis, wide = Axis(group, size, rank), torch.promote_types(q.dtype, torch.float32)
    kv = torch.stack((k, v))
    for number in range(size):
        coming = start_shift(kv, axis) if number + 1 < size else None
        step = _step(number, axis, q.shape[1], bounds)
        part, dk, dv = _attend_backward(dout, q, kv[0], kv[1], out, lse, step, backend)
        if number == 0:
            dq, dkv = part.to(wide), torch.stack((dk, dv)).to(wide)
        else:
            dq[:, step.rows] += part
            dkv = finish(dkv)  # the rank before us sent it when it was done with these keys, while we were computing
            dkv[0][:, step.keys] += dk
            dkv[1][:, step.keys] += dv
        dkv = start_shift(dkv, axis)
        if coming is not None:
            kv = finish(coming)
    dq = dq.to(q.dtype)
    dk, dv = finish(dkv)
    # copies: an operator's results may not be parts of one tensor
    return dq, dk.to(k.dtype, copy=True), dv.to(v.dtype, copy=True)


_forward = torch.library.custom_op("llama_parallel::ring_attention_forward", ring_forward, mutates_args=())
_backward = torch.library.custom_op("llama_parallel::ring_attention_backward", ring_backward, mutates_args=())
FUNCTIONS = {
    torch.ops.llama_parallel.ring_attention_forward.default: ring_forward,
    torch.ops.llama_parallel.ring_attention_backward.default: ring_backward,
}
"""What the operators run: a TorchDispatchMode that calls these instead sees the transfers inside."""


@_forward.register_fake
def _(q, k, v, bounds, group, size, rank, backend):  # type: ignore[no-untyped-def]
    kind = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=kind)


@_backward.register_fake
def _(dout, q, k, v, out, lse, bounds, group, size, rank, backend):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, bounds, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, *bounds)


def _differentiate(ctx, dout, dlse):  # type: ignore[no-untyped-def]
    q, k, v, out, lse, *bounds = ctx.saved_tensors
    dq, dk, dv = _backward(dout, q, k, v, out, lse, bounds, *ctx.options)
    return dq, dk, dv, [None] * len(bounds), None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def join_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """`llama_kernels.merge_attention` into out and lse, in place: less than half as many bytes of memory are touched.

    Args:
        out, lse: (B, S, H, D) and (B, H, S), float32 (float64).
        part, part_lse: of the same shapes; part of any type.
    """
    joined = torch.logaddexp(lse, part_lse)
    finite = joined.masked_fill(joined == float("-inf"), 0.0)  # no key in either: exp(-inf - 0) = 0, no NaN
    kept, added = (torch.exp(x - finite).transpose(1, 2).unsqueeze(-1) for x in (lse, part_lse))
    out.mul_(kept).addcmul_(part, added)
    lse.copy_(joined)


def _attend(q: Tensor, k: Tensor, v: Tensor, step: _Step, backend: str | None) -> tuple[Tensor, Tensor]:
    """A step's output (B, Sq, H, D) and log-sum-exp (B, H, Sq)."""
    q, k, v = q[:, step.rows], k[:, step.keys], v[:, step.keys]
    if step.cu_q is None:
        return attention_forward(q, k, v, causal=step.causal, backend=backend)
    packed = (x.flatten(0, 1) for x in (q, k, v))
    out, lse = attention_forward(
        *packed, causal=step.causal, cu_seqlens_q=step.cu_q, cu_seqlens_k=step.cu_k, max_seqlen_q=q.shape[1],
        max_seqlen_k=k.shape[1], backend=backend,
    )  # fmt: skip
    rows = q.shape[:2]
    return out.unflatten(0, rows), lse.unflatten(1, rows).transpose(0, 1).contiguous()


def _attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, step: _Step, backend: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """What a step's keys contribute to dq, dk and dv, given the whole rows' output and log-sum-exp."""
    dout, q, out, lse = dout[:, step.rows], q[:, step.rows], out[:, step.rows], lse[:, :, step.rows]
    k, v = k[:, step.keys], v[:, step.keys]
    if step.cu_q is None:
        return attention_backward(dout, q, k, v, out, lse, causal=step.causal, backend=backend)
    packed = [x.flatten(0, 1) for x in (dout, q, k, v, out)]
    packed.append(lse.transpose(0, 1).flatten(1, 2))
    grads = attention_backward(
        *packed, causal=step.causal, cu_seqlens_q=step.cu_q, cu_seqlens_k=step.cu_k, max_seqlen_q=q.shape[1],
        max_seqlen_k=k.shape[1], backend=backend,
    )  # fmt: skip
    dq, dk, dv = (grad.unflatten(0, (len(q), -1)) for grad in grads)
    return dq, dk, dv


class RingAttend:
    """Causal attention over sequences that the ranks of `axis` share in a zigzag.

    Args:
        axis: the ring.
        documents: each rank's (B, S) of the whole rows' rising document numbers (`number_documents`); `None` means one
            document for each row.
        backend: of `llama_kernels.attention`; `None` means the fastest that can serve.

    Raises:
        ValueError: the backend "sdpa", which has no log-sum-exp.
    """

    def __init__(self, axis: Axis, documents: Sequence[Tensor] | None = None, backend: str | None = None) -> None:
        if backend == "sdpa":
            raise ValueError("attention backend 'sdpa' returns no log-sum-exp, by which ring attention joins its steps")
        self.axis, self.backend = axis, backend
        self.bounds: list[Tensor] = [] if documents is None else _bounds_of_steps(documents, axis)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, S, H, D), k and v (B, S, K, D), all of this rank's tokens → (B, S, H, D); a collective call.

        Raises:
            ValueError: an odd number of tokens, which has no halves.
        """
        if q.shape[1] % 2 or q.shape[1] != k.shape[1]:
            raise ValueError(f"{q.shape[1]} queries and {k.shape[1]} keys: ring attention wants as many, in two halves")
        axis = self.axis
        out, _ = _forward(q, k, v, self.bounds, axis.group, axis.size, axis.rank, self.backend)
        return cast(Tensor, out)


def _bounds_of_steps(shards: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """cu_q and cu_k of every step, one after the other."""
    own = shards[axis.rank]
    steps: list[Bounds] = [document_bounds(own)]
    for step in range(1, axis.size):
        rows, keys = _seen(step, axis, own.shape[1])
        steps.append(crossing_bounds(own[:, rows], shards[axis.rank - step][:, keys]))
    return [bounds for pair in steps for bounds in pair]
