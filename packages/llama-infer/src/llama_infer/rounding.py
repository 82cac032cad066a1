"""One weight in fewer bits: rounded, in the layout of the kernels, and as compressed-tensors' files have it.

int8 and fp8 have a scale for each output. int4 has a scale and a zero point, both of them a group's of 128 inputs:

    w[n, k] ≈ scale[n, g] · (q[n, k] − zero[n, g]),  q and zero in 0 … 15,  g = k // 128
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import llama_kernels
from llama_core.compressed_tensors import quantization_settings
from llama_core.rounded_tensor import RoundedTensor, pack_words, read_all, unpack_words
from llama_core.stored_tensor import StoredTensor

QUANTIZATIONS = ("int8", "int4", "fp8")
GROUP = 128
SETTINGS = {
    "int8": quantization_settings("int", 8, None),
    "int4": quantization_settings("int", 4, GROUP),
    "fp8": quantization_settings("float", 8, None),
}
"""The `quantization_config` of each kind."""
SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Of a group's range, tried for int4: a few clipped weights may cost less than a coarse grid for all."""


@dataclass(frozen=True)
class Rounded:
    """A weight (N, K)."""

    kind: str
    codes: Tensor
    """(N, K) int8, float8_e4m3fn, or for int4 0 … 15 as int32."""
    scale: Tensor
    """(N, 1) float32; for int4 (N, K / 128) in the weight's dtype."""
    zero: Tensor | None = None
    """(N, K / 128) int32, of int4."""

    def operands(self) -> tuple[Tensor, ...]:
        """As the kernels take it: (weight, scale), or (packed, scale, minimum)."""
        if self.zero is None:
            return self.codes, self.scale.flatten().float()
        # Nibble i of word j of a group holds input 16 i + j (llama_kernels.int4_linear).
        by_word = self.codes.unflatten(1, (-1, 8, 16)).transpose(2, 3).flatten(1)
        packed = pack_words(by_word, 4).unflatten(1, (-1, 16))
        minimum = (-self.zero.float() * self.scale.float()).to(self.scale.dtype)
        return packed, self.scale, minimum

    def stored(self, name: str) -> dict[str, Tensor]:
        """As files have it, for the linear layer `name`."""
        if self.kind == "fp8":
            return {f"{name}.weight": self.codes, f"{name}.weight_scale": self.scale}
        codes, bits = (self.codes.to(torch.int32) + 128, 8) if self.zero is None else (self.codes, 4)
        tensors = {
            f"{name}.weight_packed": pack_words(codes, bits),
            f"{name}.weight_scale": self.scale,
            f"{name}.weight_shape": torch.tensor(self.codes.shape),
        }
        if self.zero is not None:
            padded = F.pad(self.zero, (0, 0, 0, -len(self.zero) % 8))
            tensors[f"{name}.weight_zero_point"] = pack_words(padded.T, 4).T.contiguous()
        return tensors


@torch.no_grad()
def round_weight(weight: Tensor, kind: str) -> Rounded:
    """Round a weight (N, K).

    Raises:
        ValueError: int4 with a number of inputs that 128 does not divide.
    """
    if kind == "int8":
        codes, scale = llama_kernels.quantize_int8(weight)
        return Rounded(kind, codes, scale.unsqueeze(1))
    if kind == "fp8":
        codes, scale = llama_kernels.quantize_fp8(weight)
        return Rounded(kind, codes, scale.unsqueeze(1))
    if weight.shape[1] % GROUP:
        raise ValueError(f"int4 rounds {GROUP} inputs together; a weight has {weight.shape[1]}")
    grouped = weight.detach().float().unflatten(1, (-1, GROUP))
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)  # 0 is always on the grid
    best: tuple[Tensor, Tensor, Tensor] | None = None
    least = torch.full_like(low, float("inf"))
    for shrink in SHRINK:
        # The scale is rounded first, so that the codes are the best for the one that will be used.
        tiny = 6e-8 if weight.dtype == torch.float16 else 1e-30
        scale = ((high - low) * (shrink / 15)).clamp(min=tiny).to(weight.dtype)
        wide = scale.float()
        zero = (-low * shrink / wide).round_().clamp_(0, 15)
        codes = ((grouped / wide.unsqueeze(2)).round_() + zero.unsqueeze(2)).clamp_(0, 15)
        error = (((codes - zero.unsqueeze(2)) * wide.unsqueeze(2)) - grouped).square_().sum(2)
        better, least = error < least, torch.minimum(error, least)
        if best is None:
            best = codes, scale, zero
        else:
            old_codes, old_scale, old_zero = best
            best = (
                torch.where(better.unsqueeze(2), codes, old_codes),
                torch.where(better, scale, old_scale),
                torch.where(better, zero, old_zero),
            )
    assert best is not None
    return Rounded(kind, best[0].flatten(1).to(torch.int32), best[1], best[2].to(torch.int32))


def kind_of(stored: StoredTensor | None) -> str | None:
    """The kind of a stored weight that the kernels multiply by as it is; None for any other."""
    if not isinstance(stored, RoundedTensor):
        return None
    whole = stored.scale.shape[1] == 1
    if stored.is_float:
        return "fp8" if whole and stored.values.dtype == torch.float8_e4m3fn else None
    if stored.bits == 8:
        return "int8" if whole and stored.zero_point is None else None
    return "int4" if stored.group == GROUP else None


def read_rounded(stored: RoundedTensor, device: torch.device) -> Rounded:
    """A weight of a `kind_of`, as it lies in its file."""
    kind = kind_of(stored)
    assert kind is not None
    codes, scale = read_all(stored.values, device=device), read_all(stored.scale, device=device)
    if kind != "int4":
        if stored.is_packed:
            codes = (unpack_words(codes, 8) - 128).to(torch.int8)
        return Rounded(kind, codes, scale.float())
    zero = torch.full(scale.shape, 8, dtype=torch.int32, device=device)
    if stored.zero_point is not None:
        zero = stored.read_zero_points(0, stored.shape[0]).to(device)
    return Rounded(kind, unpack_words(codes, 4), scale, zero)
