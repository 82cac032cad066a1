"""Weights of fewer bits: the linear layers of a loaded model, rounded in place and multiplied by llama_kernels.

int8 and fp8 have one scale for each output, int4 a scale and a minimum for each 128 inputs. Layers that read the same
input (q, k, v; gate, up) become one product. The embedding and the output head stay as they are: their rounding shows
most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import llama_kernels
from llama_core import Llama
from llama_core.packing import Packable

QUANTIZATIONS = ("int8", "int4", "fp8")


class QuantizedLinear(nn.Module):
    """A linear layer with rounded weights.

    Args:
        linears: layers of the same input, whose outputs come side by side; they are read, not kept.
        kind: one of QUANTIZATIONS.

    Raises:
        ValueError: int4 with a number of inputs that 128 does not divide.
    """

    bias: Tensor | None

    def __init__(self, linears: Sequence[nn.Linear], kind: str) -> None:
        super().__init__()
        self.sizes = tuple(linear.out_features for linear in linears)
        rounded, self._multiply = _FUNCTIONS[kind]
        names = ("weight", "scale", "minimum")
        parts = [rounded(linear.weight) for linear in linears]
        for name, each in zip(names, zip(*parts, strict=True), strict=False):
            self.register_buffer(name, torch.cat(each))
        self._names = names[: len(parts[0])]
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.register_buffer("bias", torch.cat(biases) if biases else None)

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """The rounded weight and its scales: what its product takes after x."""
        return tuple(getattr(self, name) for name in self._names)

    def forward(self, x: Tensor) -> Tensor:
        out = self._multiply(x, *self.operands)
        return out if self.bias is None else out + self.bias


_FUNCTIONS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], Callable[..., Tensor]]] = {
    "int8": (llama_kernels.quantize_int8, llama_kernels.int8_linear),
    "int4": (llama_kernels.quantize_int4, llama_kernels.int4_linear),
    "fp8": (llama_kernels.quantize_fp8, llama_kernels.fp8_linear),
}


@torch.no_grad()
def quantize_model(model: Llama, kind: str) -> None:
    """Round the linear layers of every decoder layer, in place; one layer's weights are held twice meanwhile.

    Raises:
        ValueError: another kind than those of QUANTIZATIONS, or a shape that it does not fit; nothing has changed.
    """
    if kind not in QUANTIZATIONS:
        raise ValueError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, got {kind!r}")
    holders = [module for module in model.model.layers.modules() if isinstance(module, Packable)]
    linears = [
        (name, child) for each in holders for name, child in each.named_children() if isinstance(child, nn.Linear)
    ]
    for name, child in linears:
        if kind == "int4" and child.in_features % 128:
            raise ValueError(f"int4 rounds 128 inputs together; {name} has {child.in_features}")
    for holder in holders:
        joined = QuantizedLinear([getattr(holder, name) for name in holder.packs], kind)
        holder.joined, holder.joined_sizes = joined, joined.sizes
        for name in holder.packs:
            setattr(holder, name, None)
        for name, alone in list(holder.named_children()):  # o_proj, down_proj
            if isinstance(alone, nn.Linear):
                setattr(holder, name, QuantizedLinear([alone], kind))
