"""Rotary position embedding of queries and keys in one launch.

Su et al. 2021, https://arxiv.org/abs/2104.09864, eq. 34.

Hugging Face's half layout: with D the head width, channel j is paired with j + D/2,

    out[j] = x[j] · cos − x[j + D/2] · sin        out[j + D/2] = x[j + D/2] · cos + x[j] · sin

A rotation's gradient is the rotation by the opposite angle, so backward is the same kernel with −sin.
Shapes: B batch, S sequence, H query heads, K key/value heads, D head width.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
from torch import Tensor

from llama_kernels import reference
from llama_kernels.compat import device_guard, next_power_of_2, runs_triton, tl, triton
from llama_kernels.operators import operator


@triton.jit
def _turn(
    x_ptr, out_ptr, cos, sin, batch, position, heads, seq, channel, first_head,
    x_stride_b, x_stride_s, x_stride_h, x_stride_d,
    HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Turn HEADS heads of one token; channel (1, padded HALF) and cos, sin of that shape."""
    head = (first_head + tl.arange(0, HEADS))[:, None]
    inside = (head < heads) & (channel < HALF)
    x_ptr += batch * x_stride_b + position * x_stride_s + head.to(tl.int64) * x_stride_h + channel * x_stride_d
    first = tl.load(x_ptr, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + HALF * x_stride_d, mask=inside, other=0.0).to(tl.float32)
    out_ptr += ((batch * seq + position) * heads + head) * (2 * HALF) + channel
    tl.store(out_ptr, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + HALF, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, seq,
    q_stride_b, q_stride_s, q_stride_h, q_stride_d, k_stride_b, k_stride_s, k_stride_h, k_stride_d,
    cos_stride_b, cos_stride_s, cos_stride_d, sin_stride_b, sin_stride_s, sin_stride_d,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
    HALF: tl.constexpr, PADDED: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)  # int64: a million tokens of 32 heads pass 2³¹ (#12)
    batch, position = token // seq, token % seq
    channel = tl.arange(0, PADDED)[None, :]
    real = channel < HALF
    cos_ptr += batch * cos_stride_b + position * cos_stride_s  # batched angles have a batch stride (#21)
    sin_ptr += batch * sin_stride_b + position * sin_stride_s
    cos = tl.load(cos_ptr + channel * cos_stride_d, mask=real, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + channel * sin_stride_d, mask=real, other=0.0).to(tl.float32)
    if INVERSE:
        sin = -sin
    for first_head in tl.static_range(0, Q_HEADS, Q_BLOCK):
        _turn(q_ptr, q_out_ptr, cos, sin, batch, position, Q_HEADS, seq, channel, first_head,
              q_stride_b, q_stride_s, q_stride_h, q_stride_d, HALF, Q_BLOCK)  # fmt: skip
    for first_head in tl.static_range(0, K_HEADS, K_BLOCK):
        _turn(k_ptr, k_out_ptr, cos, sin, batch, position, K_HEADS, seq, channel, first_head,
              k_stride_b, k_stride_s, k_stride_h, k_stride_d, HALF, K_BLOCK)  # fmt: skip


def _launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    batch, seq, q_heads, width = q.shape
    k_heads = k.shape[2]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if not q.numel() and not k.numel():
        return q_out, k_out
    if cos.shape[0] == 1:  # one row of angles for the whole batch: stride 0
        cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
    padded = next_power_of_2(width // 2)
    most = max(1, 1024 // padded)  # heads in one tile
    with device_guard(q):
        _rope_kernel[(batch * seq,)](
            q, k, cos, sin, q_out, k_out, seq, *q.stride(), *k.stride(), *cos.stride(), *sin.stride(),
            Q_HEADS=q_heads, K_HEADS=k_heads, Q_BLOCK=min(next_power_of_2(q_heads), most),
            K_BLOCK=min(next_power_of_2(k_heads), most), HALF=width // 2, PADDED=padded, INVERSE=inverse, num_warps=4,
        )  # fmt: skip
    return q_out, k_out


@operator("llama_kernels::rope")
def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    return _launch(q, k, cos, sin, inverse)


@_rope.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _save(ctx, inputs, output) -> None:
    _, _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, dq, dk):
    cos, sin = ctx.saved_tensors
    return *_rope(dq, dk, cos, sin, not ctx.inverse), None, None, None


_rope.register_autograd(_backward, setup_context=_save)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions, q and k in one launch.

    Args:
        q: (B, S, H, D), any strides.
        k: (B, S, K, D), any strides.
        cos, sin: (B or 1, S, D/2); no gradient flows to them.

    Returns:
        Rotated q and k, contiguous, in their dtypes; the product is taken in float32.

    Raises:
        ValueError: shapes that do not fit.
    """
    angles = ({(1, *q.shape[1:2], q.shape[-1] // 2), (*q.shape[:2], q.shape[-1] // 2)}) if q.dim() == 4 else set()
    if (
        k.dim() != 4
        or tuple(cos.shape) not in angles
        or sin.shape != cos.shape
        or q.shape[:2] != k.shape[:2]
        or q.shape[-1] != k.shape[-1]
        or q.shape[-1] % 2
    ):
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit: "
            "(B, S, H, D), (B, S, K, D) and twice (B or 1, S, D/2) with even D are wanted"
        )
    if not runs_triton(q):
        return reference.rope(q, k, cos, sin)
    out: tuple[Tensor, Tensor] = _rope(q, k, cos, sin, False)
    return out
