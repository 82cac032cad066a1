"""Weights of fewer bits: the linear layers of a loaded model, rounded in place and multiplied by llama_kernels' kernels.

int8 and fp8 have one scale for each output, int4 a scale and a minimum for each 128 inputs. The embedding and the output
head stay as they are: every token passes them once, and their rounding shows most.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import llama_kernels
from llama_core import Llama

QUANTIZATIONS = ("int8", "int4", "fp8")


class QuantizedLinear(nn.Module):
    """A linear layer with rounded weights.

    Args:
        linear: the layer; it is read, not kept.
        kind: one of QUANTIZATIONS.

    Raises:
        ValueError: int4 with a number of inputs that 128 does not divide.
    """

    bias: Tensor | None

    def __init__(self, linear: nn.Linear, kind: str) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        rounded, self._multiply = _FUNCTIONS[kind]
        names = ("weight", "scale", "minimum")
        parts = rounded(linear.weight)
        for name, part in zip(names, parts, strict=False):
            self.register_buffer(name, part)
        self._names = names[: len(parts)]
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        out = self._multiply(x, *(getattr(self, name) for name in self._names))
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
        ValueError: another kind than those of QUANTIZATIONS, or a shape that the kind does not fit; nothing has changed.
    """
    if kind not in QUANTIZATIONS:
        raise ValueError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, got {kind!r}")
    found = [
        (module, name, child)
        for module in model.model.layers.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.Linear)
    ]
    if kind == "int4":
        for _, name, child in found:
            if child.in_features % 128:
                raise ValueError(f"int4 rounds 128 inputs together; {name} has {child.in_features}")
    for module, name, child in found:
        setattr(module, name, QuantizedLinear(child, kind))
