"""Cross-entropy of rows of logits, and its gradient written over them.

For each row with logits x, target y, m = max x, Z = Σ exp(x − m):

    loss = log Z − (x_y − m) + z · (m + log Z)²             (z-loss: PaLM, https://arxiv.org/abs/2204.02311, section 5)
    dx_j = p_j · (1 + 2 z (m + log Z)) − [j = y]            p_j = exp(x_j − m) / Z

Two reads and one write of the row; the second read mostly finds it in the GPU's L2 cache. No autograd here: the caller
gives the logits up. It is the middle of `linear_cross_entropy`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
from torch import Tensor

from llama_kernels.compat import cdiv, device_guard, next_power_of_2, runs_triton, tl, triton


@triton.jit
def _cross_entropy_kernel(
    logits_ptr, targets_ptr, losses_ptr, scales_ptr, row_stride, vocabulary, ignore_index, z_loss,
    WRITE_GRADIENT: tl.constexpr, VECTORS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One row: its loss, and its logits overwritten by their gradient.

    A tile is VECTORS × WIDTH with WIDTH neighbours in one thread; maximum and sum are kept per vector, so the loop over
    the row has no exchange between threads.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride  # int64: tokens · vocabulary passes 2³¹ (#11)
    lane = tl.arange(0, VECTORS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        tl.store(losses_ptr + row, 0.0)  # every row's loss is written (#2)
        if WRITE_GRADIENT:
            zero = tl.zeros((VECTORS, WIDTH), logits_ptr.dtype.element_ty)
            for start in range(0, vocabulary, VECTORS * WIDTH):
                tl.store(logits_ptr + start + lane, zero, mask=start + lane < vocabulary)
    else:
        known = (target >= 0) & (target < vocabulary)
        at_target = tl.load(logits_ptr + target, mask=known, other=0.0).to(tl.float32)
        high = tl.full((VECTORS,), float("-inf"), tl.float32)
        total = tl.zeros((VECTORS,), tl.float32)
        for start in range(0, vocabulary, VECTORS * WIDTH):
            x = tl.load(logits_ptr + start + lane, mask=start + lane < vocabulary, other=float("-inf")).to(tl.float32)
            new_high = tl.maximum(high, tl.max(x, axis=1))
            base = tl.where(new_high == float("-inf"), 0.0, new_high)  # −inf − −inf is NaN (#30)
            total = total * tl.exp(high - base) + tl.sum(tl.exp(x - base[:, None]), axis=1)
            high = new_high
        m = tl.max(high, axis=0)
        z = tl.sum(total * tl.exp(high - m), axis=0)
        log_z = tl.log(z)
        lse = m + log_z
        loss = log_z - (at_target - m) + z_loss * lse * lse  # not lse − x_y: a common offset must cancel (#8)
        tl.store(losses_ptr + row, tl.where(known, loss, float("nan")))  # a label out of range poisons (#7)
        if WRITE_GRADIENT:
            scale = tl.where(known, 1.0, float("nan"))
            if scales_ptr is not None:
                scale *= tl.load(scales_ptr + row)
            slope = (1.0 + 2.0 * z_loss * lse) / z
            tiles = tl.cdiv(vocabulary, VECTORS * WIDTH)
            for tile in range(tiles):
                column = (tiles - 1 - tile) * (VECTORS * WIDTH) + lane  # backwards: the row's end is still in cache
                x = tl.load(logits_ptr + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
                dx = tl.exp(x - m) * slope - tl.where(column == target, 1.0, 0.0)  # float32, stored once (#3)
                tl.store(logits_ptr + column, (dx * scale).to(logits_ptr.dtype.element_ty), mask=column < vocabulary)


def cross_entropy_(
    logits: Tensor, targets: Tensor, losses: Tensor, scales: Tensor | None, ignore_index: int, z_loss: float, grad: bool
) -> None:
    """Fill `losses`, and overwrite `logits` by the gradient of Σ scale · loss where `grad`.

    Args:
        logits: (T, V) with dense rows.
        targets: (T,) int64; rows with `ignore_index` get loss 0 and gradient 0, any other value outside [0, V) NaN.
        losses: (T,), float32 or float64.
        scales: (T,) like losses, or None for 1.
        ignore_index, z_loss: see `linear_cross_entropy`.
        grad: without it logits are left alone.
    """
    if runs_triton(logits):
        vectors = min(next_power_of_2(cdiv(logits.shape[1], 8)), 1024)
        with device_guard(logits):
            _cross_entropy_kernel[(logits.shape[0],)](
                logits, targets, losses, scales, logits.stride(0), logits.shape[1], ignore_index, z_loss,
                WRITE_GRADIENT=grad, VECTORS=vectors, WIDTH=8, num_warps=min(max(vectors // 64, 1), 16),
            )  # fmt: skip
        return
    vocabulary = logits.shape[1]
    counted = (targets != ignore_index).unsqueeze(1)
    known = ((targets >= 0) & (targets < vocabulary)).unsqueeze(1)
    labels = torch.where(counted & known, targets.unsqueeze(1), 0)
    x = logits.to(losses.dtype)
    x = x - x.amax(1, keepdim=True)
    m = logits.amax(1, keepdim=True).to(losses.dtype)
    log_z = x.exp().sum(1, keepdim=True).log()
    lse = m + log_z
    loss = log_z - x.gather(1, labels) + z_loss * lse.square()
    losses.copy_(torch.where(counted, torch.where(known, loss, torch.nan), 0.0).squeeze(1))
    if grad:
        dx = x.sub_(log_z).exp_().mul_(1 + 2 * z_loss * lse)
        dx.scatter_add_(1, labels, torch.full_like(lse, -1.0))
        if scales is not None:
            dx.mul_(scales.unsqueeze(1))
        logits.copy_(torch.where(counted, torch.where(known, dx, torch.nan), 0.0))
