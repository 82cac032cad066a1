"""What happens to q, k and v between their product and attention, in one launch: q and k are turned by their positions
(Su et al. 2021, eq. 34; see rope.py), and k and v go to their places in a paged cache."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
from torch import Tensor

from llama_kernels import reference
from llama_kernels.compat import device_guard, next_power_of_2, runs_triton, tl, triton
from llama_kernels.one_row import launch_options, let_next_start, wait_for_previous
from llama_kernels.operators import operator
from llama_kernels.write_kv import write_kv


@triton.jit(do_not_specialize=["slots"])
def _kernel(qkv_ptr, cos_ptr, sin_ptr, slot_ptr, q_ptr, k_cache_ptr, v_cache_ptr, token_stride, angle_stride, k_page,
            k_row, k_head, v_page, v_row, v_head, slots, H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr,
            PADDED: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One head of one token: a query, a key or a value."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j = tl.arange(0, PADDED)
    real = j < HALF
    at = qkv_ptr + token * token_stride + head * (2 * HALF) + j
    first = tl.load(at, mask=real, other=0.0)
    second = tl.load(at + HALF, mask=real, other=0.0)
    if head < H + K:
        cos = tl.load(cos_ptr + token * angle_stride + j, mask=real, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + token * angle_stride + j, mask=real, other=0.0).to(tl.float32)
        x, y = first.to(tl.float32), second.to(tl.float32)
        first = (x * cos - y * sin).to(first.dtype)
        second = (y * cos + x * sin).to(second.dtype)
    if head < H:
        to = q_ptr + (token * H + head) * (2 * HALF) + j
        tl.store(to, first, mask=real)
        tl.store(to + HALF, second, mask=real)
    else:
        slot = tl.load(slot_ptr + token).to(tl.int64)
        real = j < tl.where((slot >= 0) & (slot < slots), HALF, 0)
        page, row = slot // PAGE, slot % PAGE
        if head < H + K:
            to = k_cache_ptr + page * k_page + row * k_row + (head - H) * k_head + j
        else:
            to = v_cache_ptr + page * v_page + row * v_row + (head - H - K) * v_head + j
        tl.store(to, first, mask=real)
        tl.store(to + HALF, second, mask=real)


@operator("llama_kernels::rope_write_kv", mutates_args=("k_cache", "v_cache"))
def _rope_write_kv(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, heads: int
) -> Tensor:
    (tokens, _), (pages, page, kv_heads, width) = qkv.shape, k_cache.shape
    if not runs_triton(qkv):
        q, k, v = qkv.split([heads * width, kv_heads * width, kv_heads * width], dim=1)
        q, k = reference.rope(
            q.unflatten(1, (-1, width))[None], k.unflatten(1, (-1, width))[None], cos[None], sin[None]
        )
        write_kv(k[0], v.unflatten(1, (-1, width)), k_cache, v_cache, slots)
        return q[0]
    q = qkv.new_empty(tokens, heads, width)
    if tokens and k_cache.numel():
        with device_guard(qkv):
            _kernel[(tokens, heads + 2 * kv_heads)](
                qkv, cos, sin, slots, q, k_cache, v_cache, qkv.stride(0), cos.stride(0), *k_cache.stride()[:3],
                *v_cache.stride()[:3], pages * page, H=heads, K=kv_heads, HALF=width // 2,
                PADDED=next_power_of_2(width // 2), PAGE=page, num_warps=1, **launch_options(qkv),
            )  # fmt: skip
    return q


@_rope_write_kv.register_fake
def _(qkv, cos, sin, k_cache, v_cache, slots, heads):
    return qkv.new_empty(qkv.shape[0], heads, k_cache.shape[3])


def rope_write_kv(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, heads: int
) -> Tensor:
    """Queries turned by their positions; keys, turned too, and values written into the cache, in place.

    Args:
        qkv: (T, (H + 2 K) · D), dense in the last dimension: the heads of q, of k and of v side by side.
        cos, sin: (T, D / 2), dense.
        k_cache, v_cache: (pages, page size, K, D), any strides with dense D, in qkv's type.
        slots: (T,) int32 or int64, as in `write_kv`; below 0 or behind the cache nothing is written.
        heads: H.

    Returns:
        (T, H, D).

    Raises:
        ValueError: shapes, types or devices that do not fit.
    """
    if k_cache.shape != v_cache.shape or k_cache.dim() != 4 or k_cache.shape[3] % 2 or qkv.dim() != 2:
        raise ValueError(
            f"qkv {tuple(qkv.shape)}, k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)} must be "
            "(T, (H + 2 K) · D) and twice (pages, page size, K, D) with even D"
        )
    tokens, (kv_heads, width) = qkv.shape[0], k_cache.shape[2:]
    if qkv.shape[1] != (heads + 2 * kv_heads) * width or qkv.stride(1) != 1:
        raise ValueError(f"qkv {tuple(qkv.shape)} must be (T, {(heads + 2 * kv_heads) * width}), dense")
    if cos.shape != (tokens, width // 2) or sin.shape != cos.shape or cos.stride() != sin.stride():
        raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must be ({tokens}, {width // 2})")
    if slots.shape != (tokens,) or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slots is {slots.dtype} {tuple(slots.shape)}; expected int32 or int64 ({tokens},)")
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dtype != qkv.dtype or x.device != qkv.device or x.stride(3) != 1:
            raise ValueError(f"{name} is {x.dtype} on {x.device}; expected {qkv.dtype} on {qkv.device}, dense D")
    q: Tensor = _rope_write_kv(qkv, cos, sin, k_cache, v_cache, slots.contiguous(), heads)
    return q
