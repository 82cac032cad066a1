"""Writing new keys and values into their places in a paged cache, both in one launch."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
from torch import Tensor

from llama_kernels.compat import device_guard, next_power_of_2, runs_triton, tl, triton


@triton.jit(do_not_specialize=["slots"])
def _write_kernel(k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, k_token, k_head, v_token, v_head, k_page, k_row,
                  k_cache_head, v_page, v_row, v_cache_head, slots, PAGE: tl.constexpr, KD: tl.constexpr,
                  D: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
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
    tl.store(k_cache_ptr + page * k_page + row * k_row + head * k_cache_head + d, k, mask=c < KD)
    tl.store(v_cache_ptr + page * v_page + row * v_row + head * v_cache_head + d, v, mask=c < KD)


@torch.library.custom_op("llama_kernels::write_kv", mutates_args=("k_cache", "v_cache"))
def _write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    if k.numel() == 0 or k_cache.numel() == 0:
        return
    pages, page, heads, width = k_cache.shape
    if runs_triton(k):
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        with device_guard(k):
            _write_kernel[(k.shape[0],)](
                k, v, k_cache, v_cache, slots, *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3],
                *v_cache.stride()[:3], pages * page, PAGE=page, KD=heads * width, D=width,
                BLOCK=next_power_of_2(heads * width), num_warps=4,
            )  # fmt: skip
        return
    kept = (slots >= 0) & (slots < pages * page)
    where = slots[kept].long()
    k_cache[where // page, where % page] = k[kept]
    v_cache[where // page, where % page] = v[kept]


@_write_kv.register_fake
def _(k, v, k_cache, v_cache, slots) -> None:
    return None


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Copy the keys and values of new tokens into the cache, in place.

    Args:
        k, v: (T, K, D), any strides.
        k_cache, v_cache: (pages, page size, K, D), any strides with dense D, in the type of k.
        slots: (T,) int32 or int64, page number x page size + row in the page. A slot below 0 or behind the cache marks
            a padding token and is skipped. Two tokens must not share a slot.

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
    for name, x in (("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dtype != k.dtype or x.device != k.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, but k is {k.dtype} on {k.device}")
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise ValueError(f"the cache must be dense in D; its strides are {k_cache.stride()} and {v_cache.stride()}")
    if slots.shape != k.shape[:1] or slots.dtype not in (torch.int32, torch.int64) or slots.device != k.device:
        raise ValueError(
            f"slots is {slots.dtype} {tuple(slots.shape)} on {slots.device}; "
            f"expected int32 or int64 ({k.shape[0]},) on {k.device}"
        )
    _write_kv(k, v, k_cache, v_cache, slots.contiguous())
