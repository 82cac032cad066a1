"""AdamW's update of all parameters in one pass and one launch.

Loshchilov & Hutter 2019 (https://arxiv.org/abs/1711.05101, algorithm 2), with c₁ = 1 − β₁ᵗ, c₂ = 1 − β₂ᵗ:

    g ← scale · g       m ← β₁ m + (1 − β₁) g       v ← β₂ v + (1 − β₂) g²
    w ← w − lr · decay · w − lr · (m / c₁) / (√(v / c₂) + ε)

All arithmetic is float32 and everything is rounded once, when it is stored. The pass also scales the gradient, for
clipping, and writes the weight once more in 16 bits, where the model computes in those, so neither is a pass of its
own. torch's fused AdamW moved 2.5 of the 4.2 TB/s of a plain copy on an H200, this arithmetic all of them.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from collections.abc import Sequence

import torch
from torch import Tensor

from llama_kernels.compat import device_guard, tl, triton
from llama_kernels.tensor_lists import BLOCK, load, place, pointer, store, tabulate, tl_dtype

_CHUNK = 4 * BLOCK


@triton.jit
def _adamw_tile(
    w_ptr, g_ptr, m_ptr, v_ptr, rounded_ptr, at, count, c1, c2, scale, lr, beta1, one_less_beta1, beta2,
    one_less_beta2, eps, decay, WHOLE: tl.constexpr,
):  # fmt: skip
    w, g = load(w_ptr, at, count, WHOLE), load(g_ptr, at, count, WHOLE) * scale
    m, v = load(m_ptr, at, count, WHOLE), load(v_ptr, at, count, WHOLE)
    m = beta1 * m + one_less_beta1 * g
    v = beta2 * v + one_less_beta2 * g * g
    w -= lr * decay * w
    w -= lr * (m / c1) / (tl.sqrt(v / c2) + eps)
    store(w_ptr, at, w, count, WHOLE)
    store(m_ptr, at, m, count, WHOLE)
    store(v_ptr, at, v, count, WHOLE)
    if rounded_ptr is not None:
        store(rounded_ptr, at, w, count, WHOLE)


@triton.jit
def _adamw_kernel(
    table_ptr, owner_ptr, c1_ptr, c2_ptr, scale_ptr, skip_ptr, lr, beta1, one_less_beta1, beta2, one_less_beta2, eps,
    decay, LISTS: tl.constexpr, W: tl.constexpr, G: tl.constexpr, M: tl.constexpr, ROUNDED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row_ptr, owner, count, first = place(table_ptr, owner_ptr, LISTS, CHUNK)
    w_ptr, g_ptr = pointer(row_ptr, 0, W), pointer(row_ptr, 1, G)
    m_ptr, v_ptr = pointer(row_ptr, 2, M), pointer(row_ptr, 3, M)
    rounded_ptr = None
    if LISTS == 5:
        rounded_ptr = pointer(row_ptr, 4, ROUNDED)
    c1, c2 = tl.load(c1_ptr + owner), tl.load(c2_ptr + owner)
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    end = tl.minimum(first + CHUNK, count)
    if skip_ptr is not None:
        end = tl.where(tl.load(skip_ptr) == 0.0, end, first)
    for start in tl.range(first, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        if start + BLOCK <= count:
            _adamw_tile(
                w_ptr, g_ptr, m_ptr, v_ptr, rounded_ptr, at, count, c1, c2, scale, lr, beta1, one_less_beta1, beta2,
                one_less_beta2, eps, decay, True,
            )  # fmt: skip
        else:
            _adamw_tile(
                w_ptr, g_ptr, m_ptr, v_ptr, rounded_ptr, at, count, c1, c2, scale, lr, beta1, one_less_beta1, beta2,
                one_less_beta2, eps, decay, False,
            )  # fmt: skip


def adamw_(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    corrections: tuple[Tensor, Tensor],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    scale: Tensor | None = None,
    skip: Tensor | None = None,
    rounded: Sequence[Tensor] | None = None,
) -> None:
    """One step of AdamW, in place. Each list is of one dtype, float32 or 16 bits; the two of moments of the same.

    Args:
        weights, exp_avgs, exp_avg_sqs: dense, the n-th of each of one shape.
        grads: of these shapes; they stay as they are.
        corrections: (len(weights),) float32 each, on the device: 1 − β₁ᵗ and 1 − β₂ᵗ for step number t, counted from 1.
        learning_rate, betas, eps, weight_decay: as torch.optim.AdamW's.
        scale: float32 scalar on the device that gradients are multiplied with.
        skip: scalar on the device; where it is not 0, nothing changes.
        rounded: receive the new weights, in their own dtype.

    Raises:
        ValueError: as `tensor_lists.tabulate`, or moments of two dtypes.
    """
    lists = [weights, grads, exp_avgs, exp_avg_sqs, *([] if rounded is None else [rounded])]
    table = tabulate(lists, _CHUNK)
    if exp_avgs[0].dtype != exp_avg_sqs[0].dtype:
        raise ValueError(f"moments are {exp_avgs[0].dtype} and {exp_avg_sqs[0].dtype}; they must be alike")
    if not table.programs:
        return
    (beta1, beta2), wide = betas, torch.float32
    c1, c2 = (correction.to(wide).contiguous() for correction in corrections)
    with device_guard(weights[0]):
        _adamw_kernel[(table.programs,)](
            table.rows, table.owner, c1, c2, scale, skip, learning_rate, beta1, 1 - beta1, beta2, 1 - beta2, eps,
            weight_decay, LISTS=len(lists), W=tl_dtype(weights), G=tl_dtype(grads), M=tl_dtype(exp_avgs),
            ROUNDED=tl_dtype(lists[-1]), CHUNK=_CHUNK, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
