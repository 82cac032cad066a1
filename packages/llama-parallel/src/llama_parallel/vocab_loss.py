"""Cross-entropy over a vocabulary that ranks share: logits are never gathered, nor all held at once.

With z the logits of one row, rank r knows the z_v of its own part of the vocabulary only. Its log-sum-exp and, if the
target is its, z_target are what the others need: two numbers per row. From them every rank has

    loss = log Z - z_target,   log Z = logsumexp over ranks of their log-sum-exps,
    ∂loss/∂z_v = exp(z_v - log Z) - [v = target]

(Shoeybi et al. 2019, section 3; one all-gather of both numbers instead of three all-reduces), and goes on alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from .collectives import TOKENS, Axis, all_gather, all_reduce_gradient, finish, start_all_gather

# Shape legend: B batch, S sequence, N rows (B · S), E hidden, V vocabulary, W this rank's part of it
_LOGITS = 1 << 28
"""Logits held at once on a rank: 1 GB of float32."""


class VocabParallelCrossEntropy:
    """`linear_cross_entropy` of llama_core.Ops for a head whose rows are shared over `axis`.

    Args:
        axis: the tensor-parallel ranks.
        vocab_size: V, of the whole head.
        sequence_parallel: whether hidden states come as shards of the sequence.
        chunk_rows: rows whose logits are held at once; by default as many as make 1 GB.
    """

    def __init__(self, axis: Axis, vocab_size: int, sequence_parallel: bool, chunk_rows: int | None = None) -> None:
        self.axis = axis
        self.vocab_size = vocab_size
        self.sequence_parallel = sequence_parallel
        self.chunk_rows = chunk_rows

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        z_loss: float = 0.0,
    ) -> Tensor:
        """Cross-entropy in float32 (float64 for float64); every rank gets the same.

        Args:
            hidden: (B, S / ranks, E), this rank's stretch of all tokens (`collectives.TOKENS`); (B, S, E) without
                sequence parallelism.
            weight: (V, E) as a DTensor in shards of rows, or this rank's rows (W, E).
            targets: (B, S), int64, the same on all ranks; `ignore_index` rows count for nothing.
            reduction: "mean" over the counted rows, "sum", or "none" (costs a fourth product).
            z_loss: weight of log²Z added per row.

        Returns:
            A scalar, or (B, S) for "none". A target outside [0, V) makes it NaN on a GPU.

        Raises:
            ValueError: shapes that do not fit, an unknown reduction, or, on a CPU, a target outside [0, V).
        """
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction is {reduction!r}; it must be 'mean', 'sum' or 'none'")
        if targets.dtype != torch.int64:
            raise ValueError(f"targets are {targets.dtype}; torch.int64 is wanted")
        share = self.axis.size if self.sequence_parallel else 1
        if hidden.dim() != 3 or targets.shape != (hidden.shape[0], hidden.shape[1] * share):
            raise ValueError(
                f"hidden {tuple(hidden.shape)} and targets {tuple(targets.shape)} do not fit: "
                f"(B, S / {share}, E) and (B, S) are wanted"
            )
        wrong = (targets != ignore_index) & ((targets < 0) | (targets >= self.vocab_size))
        if targets.device.type == "cpu" and wrong.any():
            raise ValueError(
                f"target {int(targets[wrong][0])} is outside [0, {self.vocab_size}) "
                f"(rows with {ignore_index} are ignored)"
            )
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        first = self.axis.rank * -(-self.vocab_size // self.axis.size)
        whole = all_gather(hidden, self.axis, TOKENS) if share > 1 else all_reduce_gradient(hidden, self.axis)
        counted = (targets != ignore_index).flatten()
        own = torch.where(counted, targets.flatten() - first, -1)  # the column of this rank's part, if within [0, W)
        count = counted.sum().clamp(min=1) if reduction == "mean" else counted.new_ones((), dtype=torch.int64)
        chunk = self.chunk_rows or max(1, _LOGITS // max(1, len(local)))
        losses: Tensor = _VocabLoss.apply(
            whole.flatten(0, 1), local, own, counted, wrong.flatten(), count, self.axis, z_loss, reduction != "none",
            torch.is_grad_enabled(), chunk,
        )  # fmt: skip
        return losses if reduction != "none" else losses.view(targets.shape)


class _VocabLoss(torch.autograd.Function):
    """hidden (N, E), weight (W, E) → the loss summed and divided by `count`, or (N,) losses.

    Summed, gradients are computed beside the loss, chunk by chunk, and only scaled on the way back: three products
    and one pass over the logits. The gradient of `hidden` is this rank's share of a sum over ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, own: Tensor, counted: Tensor, wrong: Tensor, count: Tensor,
        axis: Axis, z_loss: float, summed: bool, learning: bool, chunk: int,
    ) -> Tensor:  # fmt: skip
        ctx.z_loss, ctx.summed, ctx.chunk = z_loss, summed, chunk
        wide = torch.promote_types(hidden.dtype, torch.float32)
        learning = learning and summed and any(ctx.needs_input_grad[:2])
        losses, log_zs = [], []
        grad_hidden = torch.empty_like(hidden) if learning else None
        of_weight = _Sum(weight, wide)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            part = _Part(F.linear(hidden[rows], weight), own[rows])
            log_z, of_target = part.share(axis)
            log_z = log_z.masked_fill(wrong[rows], float("nan"))
            loss = log_z - of_target + z_loss * log_z.square()
            losses.append(torch.where(counted[rows], loss, 0.0))
            log_zs.append(log_z)
            if grad_hidden is not None:
                grad = part.gradient(log_z, counted[rows].to(wide) / count, z_loss)
                torch.mm(grad, weight, out=grad_hidden[rows])
                of_weight.add(grad.mT @ hidden[rows])
        all_losses = torch.cat(losses)
        if summed:
            if grad_hidden is not None:
                ctx.save_for_backward(grad_hidden, of_weight.result())
            return all_losses.sum() / count
        ctx.save_for_backward(hidden, weight, own, counted, torch.cat(log_zs))
        return all_losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rest = (None,) * 9
        if ctx.summed:
            grad_hidden, grad_weight = ctx.saved_tensors
            return (grad_hidden * grad.to(grad_hidden.dtype), grad_weight * grad.to(grad_weight.dtype), *rest)
        hidden, weight, own, counted, log_z = ctx.saved_tensors
        grad_hidden, of_weight = torch.empty_like(hidden), _Sum(weight, log_z.dtype)
        for start in range(0, len(hidden), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            scale = torch.where(counted[rows], grad[rows], 0.0)
            of_logits = _Part(F.linear(hidden[rows], weight), own[rows]).gradient(log_z[rows], scale, ctx.z_loss)
            torch.mm(of_logits, weight, out=grad_hidden[rows])
            of_weight.add(of_logits.mT @ hidden[rows])
        return (grad_hidden, of_weight.result(), *rest)


class _Part:
    """The logits of some rows that this rank has, as what the loss and its gradient need of them.

    Logits are large and memory is slow, so passes over them are few: one for their softmax, one for the largest, whose
    probability tells the log-sum-exp (it is at least 1/W, of which a logarithm is exact), one for the gradient.

    Args:
        logits: (n, W).
        own: (n,), the column of each row's target, if within [0, W).
    """

    def __init__(self, logits: Tensor, own: Tensor) -> None:
        self.dtype, wide = logits.dtype, torch.promote_types(logits.dtype, torch.float32)
        self.mine = (own >= 0) & (own < logits.shape[1])
        self.column = torch.where(self.mine, own, 0).unsqueeze(1)
        self.softmax = torch.softmax(logits, 1, dtype=wide)
        largest, index = logits.max(1, keepdim=True)
        self.log_sum = (largest.to(wide) - self.softmax.gather(1, index).log()).squeeze(1)
        self.of_target = logits.gather(1, self.column).squeeze(1).to(wide)

    def share(self, axis: Axis) -> tuple[Tensor, Tensor]:
        """log Z and the target's logit in the whole vocabulary, (n,) each, on all ranks."""
        both = torch.stack((self.log_sum, torch.where(self.mine, self.of_target, 0.0)))
        if axis.size == 1:
            return both[0], both[1]
        of_ranks = finish(start_all_gather(both, axis)).unflatten(0, (axis.size, 2))
        return of_ranks[:, 0].logsumexp(0), of_ranks[:, 1].sum(0)

    def gradient(self, log_z: Tensor, scale: Tensor, z_loss: float) -> Tensor:
        """(n, W), in the type of the logits: scale · ((1 + 2 z_loss log Z) softmax of all ranks - onehot).

        NaN where log Z is NaN; ignored rows are exactly 0 unless a logit is not finite.
        """
        factor = (scale * (1 + 2 * z_loss * log_z) * (self.log_sum - log_z).exp()).unsqueeze(1)
        grad = torch.empty_like(self.softmax, dtype=self.dtype)
        # the target's element before it is rounded: softmax - 1 of a target that is nearly certain is small
        of_target = self.softmax.gather(1, self.column) * factor - torch.where(self.mine, scale, 0.0).unsqueeze(1)
        torch.mul(self.softmax, factor, out=grad)
        return grad.scatter_(1, self.column, of_target.to(self.dtype))


class _Sum:
    """Of the chunks' gradients of the weight; in float32 (float64) as soon as there is more than one."""

    def __init__(self, weight: Tensor, wide: torch.dtype) -> None:
        self.weight, self.wide = weight, wide
        self.total: Tensor | None = None

    def add(self, part: Tensor) -> None:
        if self.total is None:
            self.total = part
        else:
            self.total = self.total.to(self.wide).add_(part)

    def result(self) -> Tensor:
        return torch.zeros_like(self.weight) if self.total is None else self.total.to(self.weight.dtype)
