"""Writing new keys and values into their places in a paged cache, both in one launch; rounded to fp8 if it is."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
from torch import Tensor

from llama_kernels.compat import device_guard, next_power_of_2, runs_triton, tl, triton
from llama_kernels.fp8_linear import E4M3_MAX
from llama_kernels.operators import operator


@triton.jit
def _e4m3(x, scale):
    """The byte of x / scale in e4m3: to nearest, ties to even, cut off at ±448; NaN stays.

    By integers, because not every GPU converts, and Triton's interpreter loses carries.
    """
    y = x.to(tl.float32) / scale
    size = tl.where(y == y, tl.minimum(tl.abs(y), 448.0), 0.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # 3 bits of mantissa; bias 127 → 7
    small = (((size + 24576.0) - 24576.0) * 512.0).to(tl.int32)  # multiples of 2⁻⁹: a unit in the last place of 24576
    byte = tl.where(size < 0.015625, small, normal)
    byte = tl.where(y == y, byte, 0x7F)
    return (byte | ((y.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit(do_not_specialize=["slots"])
def _write_kernel(k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, k_token, k_head, v_token, v_head, k_page, k_row,
                  k_cache_head, v_page, v_row, v_cache_head, slots, k_scale_ptr, v_scale_ptr, PAGE: tl.constexpr,
                  KD: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """One token: its K x D keys and values."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot < 0 or slot >= slots:
        return
    c = tl.arange(0, BLOCK)
    head, d = c // D, c % D
    page, row = slot // PAGE, slot % PAGE
    k = tl.load(k_ptr + token * k_token + head * k_head + d, mask=c < KD)
    v = tl.load(v_ptr + token * v_token + head * v_head + d, mask=c < KD)
    if SCALED:
        k = _e4m3(k, tl.load(k_scale_ptr + head, mask=c < KD, other=1.0))
        v = _e4m3(v, tl.load(v_scale_ptr + head, mask=c < KD, other=1.0))
    tl.store(k_cache_ptr + page * k_page + row * k_row + head * k_cache_head + d, k, mask=c < KD)
    tl.store(v_cache_ptr + page * v_page + row * v_row + head * v_cache_head + d, v, mask=c < KD)


@operator("llama_kernels::write_kv", mutates_args=("k_cache", "v_cache"))
def _write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    if k.numel() == 0 or k_cache.numel() == 0:
        return
    pages, page, heads, width = k_cache.shape
    if runs_triton(k):
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        if k_scale is not None:
            k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        with device_guard(k):
            _write_kernel[(k.shape[0],)](
                k, v, k_cache, v_cache, slots, *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3],
                *v_cache.stride()[:3], pages * page, k if k_scale is None else k_scale,
                v if v_scale is None else v_scale, PAGE=page, KD=heads * width, D=width,
                BLOCK=next_power_of_2(heads * width), SCALED=k_scale is not None, num_warps=4,
            )  # fmt: skip
        return
    kept = (slots >= 0) & (slots < pages * page)
    where = slots[kept].long()
    for new, cache, scale in ((k[kept], k_cache, k_scale), (v[kept], v_cache, v_scale)):
        if scale is None:
            cache[where // page, where % page] = new
        else:  # as bytes: torch indexes no fp8
            cache.view(torch.uint8)[where // page, where % page] = to_fp8(new, scale).view(torch.uint8)


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """(..., K, D) / scale (K,) in e4m3, cut off at the largest number that it holds."""
    return (x.float() / scale.unsqueeze(1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def from_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """(..., K, D) in e4m3 times scale (K,)."""
    return (x.float() * scale.unsqueeze(1)).to(dtype)


@_write_kv.register_fake
def _(k, v, k_cache, v_cache, slots, k_scale=None, v_scale=None) -> None:
    return None


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Copy the keys and values of new tokens into the cache, in place.

    Args:
        k, v: (T, K, D), any strides.
        k_cache, v_cache: (pages, page size, K, D), any strides with dense D, in the type of k, or float8_e4m3fn.
        slots: (T,) int32 or int64, page number x page size + row in the page. A slot below 0 or behind the cache marks
            a padding token and is skipped. Two tokens must not share a slot.
        k_scale, v_scale: (K,) float32, with a float8_e4m3fn cache: it holds x / scale, cut off at ±448.

    Raises:
        ValueError: on shapes, types or devices that do not fit.
    """
    if k.shape != v.shape or k.dim() != 3 or k_cache.shape != v_cache.shape or k_cache.dim() != 4:
        raise ValueError(
            f"k {tuple(k.shape)}, v {tuple(v.shape)}, k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)} "
            "must be twice (T, K, D) and twice (pages, page size, K, D)"
        )
    if k.shape[1:] != k_cache.shape[2:]:
        raise ValueError(f"k has heads {tuple(k.shape[1:])} (K, D) and the cache {tuple(k_cache.shape[2:])}")
    check_scales(k_cache, v_cache, k_scale, v_scale)
    for name, x in (("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        scaled = k_scale is not None and name != "v"
        if (x.dtype != k.dtype and not scaled) or x.device != k.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, but k is {k.dtype} on {k.device}")
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise ValueError(f"the cache must be dense in D; its strides are {k_cache.stride()} and {v_cache.stride()}")
    if slots.shape != k.shape[:1] or slots.dtype not in (torch.int32, torch.int64) or slots.device != k.device:
        raise ValueError(
            f"slots is {slots.dtype} {tuple(slots.shape)} on {slots.device}; "
            f"expected int32 or int64 ({k.shape[0]},) on {k.device}"
        )
    _write_kv(k, v, k_cache, v_cache, slots.contiguous(), k_scale, v_scale)


def check_scales(k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Raise ValueError unless there are scales exactly where the cache (pages, page size, K, D) is of fp8."""
    for name, cache, scale in (("k", k_cache, k_scale), ("v", v_cache, v_scale)):
        if (scale is not None) != (cache.dtype == torch.float8_e4m3fn):
            given = "without" if scale is None else "with"
            raise ValueError(
                f"{name}_cache is {cache.dtype} {given} {name}_scale; float8_e4m3fn has scales, others none"
            )
        if scale is None:
            continue
        fits = scale.shape == cache.shape[2:3] and scale.dtype == torch.float32 and scale.is_contiguous()
        if not fits or scale.device != cache.device:
            raise ValueError(
                f"{name}_scale is {scale.dtype} {tuple(scale.shape)} on {scale.device}; expected dense float32 "
                f"({cache.shape[2]},) on {cache.device}"
            )
