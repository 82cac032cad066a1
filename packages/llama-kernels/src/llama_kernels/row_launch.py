"""Launches of the kernels for one row: which kernel for which weight, and how it is cut."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from llama_kernels.compat import cdiv, device_guard, multiprocessors, next_power_of_2
from llama_kernels.dot4 import has_dp4a
from llama_kernels.one_row import launch_options
from llama_kernels.row_products import float_row_kernel, int4_row_kernel, int8_row_kernel

MAX_WIDTH = 16384  # x is held in registers


class Tile(NamedTuple):
    """How a kernel is cut: outputs at once, loads under way, programs on a multiprocessor, warps of each."""

    rows: int
    stages: int
    programs: int
    warps: int


def choose_tile(kind: str, width: int, outputs: int, gated: bool) -> Tile:
    """By measurement on an H200, each product in its place in a layer of Llama-3-8B; benchmarks/decode_kernels.py."""
    wide = width > 8192
    if kind == "float":
        if wide:
            return Tile(2, 3, 1, 16)
        return Tile(2, 2, 4, 4) if gated else Tile(2, 4, 2, 4) if outputs > 4096 else Tile(2, 4, 4, 4)
    if kind == "byte":
        return Tile(2, 3, 2, 8) if wide else Tile(4, 3, 4, 4) if outputs > 4096 else Tile(2, 4, 6, 4)
    return Tile(4, 2, 2, 8) if wide else Tile(4, 4, 4, 2) if gated else Tile(2, 4, 8, 2)


def launch_row(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    minimum: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """`fused_linear` for x (1, K) on checked arguments that Triton can run; `tile` overrides the choice (tuning)."""
    width, outputs = x.shape[1], weight.shape[0] // 2 if gated else weight.shape[0]
    y = x.new_empty(1, outputs)
    if not outputs:
        return y
    norm, res = (x if part is None else part for part in (norm_weight, residual))  # a pointer that is not followed
    kind = "int4" if minimum is not None else "float" if scale is None else "byte"
    tile = tile or choose_tile(kind, width, outputs, gated)
    grid = (min(cdiv(outputs, tile.rows), tile.programs * multiprocessors(x)),)
    flags = {
        "NORM": norm_weight is not None, "GATED": gated, "ADD": residual is not None, "BLOCK_N": tile.rows,
        "STAGES": tile.stages, "num_warps": tile.warps, **launch_options(x),
    }  # fmt: skip
    with device_guard(x):
        if kind == "int4":
            groups = width // 128
            int4_row_kernel[grid](
                x, weight, scale, minimum, norm, res, y, outputs, eps, GROUPS=groups,
                BLOCK_G=next_power_of_2(groups), ASM=has_dp4a(x), **flags,
            )  # fmt: skip
        elif kind == "byte" and in_words(x, weight):
            words = weight.view(torch.int32)
            int8_row_kernel[grid](
                x, words, scale, norm, res, y, outputs, words.stride(0), eps, GROUPS=width // 128,
                BLOCK_G=next_power_of_2(width // 128), ASM=has_dp4a(x), **flags,
            )  # fmt: skip
        else:
            float_row_kernel[grid](
                x, weight, x if scale is None else scale, norm, res, y, outputs, weight.stride(0), eps, K=width,
                BLOCK_K=next_power_of_2(width), SCALED=scale is not None, **flags,
            )  # fmt: skip
    return y


def in_words(x: Tensor, weight: Tensor) -> bool:
    """Whether rows of int8 can go through the integer products as aligned words; float32 x keeps its bits instead."""
    aligned = bool(weight.stride(0) % 4 == 0 and weight.storage_offset() % 4 == 0 and x.shape[1] % 128 == 0)
    return weight.dtype == torch.int8 and x.dtype != torch.float32 and aligned
