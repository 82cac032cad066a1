"""Weights of fewer bits: the linear layers of a model, rounded in place or read rounded, multiplied by llama_kernels.

int8 and fp8 have one scale for each output, int4 a scale and a zero point for each 128 inputs (`rounding.py`). Layers
that read the same input (q, k, v; gate, up) become one product. The embedding and the output head stay as they are:
their rounding shows most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

import llama_kernels
from llama_core import Llama
from llama_core.checkpoint import Checkpoint
from llama_core.packing import Packable
from llama_core.rounded_tensor import RoundedTensor, read_all

from .rounding import GROUP, QUANTIZATIONS, Rounded, kind_of, read_rounded, round_weight

MULTIPLY: dict[str, Callable[..., Tensor]] = {
    "int8": llama_kernels.int8_linear,
    "int4": llama_kernels.int4_linear,
    "fp8": llama_kernels.fp8_linear,
}


class QuantizedLinear(nn.Module):
    """A linear layer with rounded weights.

    Args:
        parts: weights that read the same input, all of one kind; their outputs come side by side.
        biases: (N,) of each, or None.
    """

    bias: Tensor | None

    def __init__(self, parts: Sequence[Rounded], biases: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.kind = parts[0].kind
        self.sizes = tuple(len(part.codes) for part in parts)
        self._multiply = MULTIPLY[self.kind]
        each = [part.operands() for part in parts]
        self._names = ("weight", "scale", "minimum")[: len(each[0])]
        for name, operands in zip(self._names, zip(*each, strict=True), strict=True):
            self.register_buffer(name, torch.cat(operands))
        there = [bias.detach() for bias in biases if bias is not None]
        self.register_buffer("bias", torch.cat(there) if there else None)

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """The rounded weight and its scales: what its product takes after x."""
        return tuple(getattr(self, name) for name in self._names)

    def forward(self, x: Tensor) -> Tensor:
        out = self._multiply(x, *self.operands)
        return out if self.bias is None else out + self.bias


@torch.no_grad()
def quantize_model(model: Llama, kind: str) -> None:
    """Round the linear layers of every decoder layer, in place; one layer's weights are held twice meanwhile.

    Raises:
        ValueError: another kind than those of QUANTIZATIONS, or a shape that it does not fit; nothing has changed.
    """
    if kind not in QUANTIZATIONS:
        raise ValueError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, got {kind!r}")
    groups = [(holder, names) for _, holder, names in _products(model) if getattr(holder, names[0]) is not None]
    for holder, names in groups:
        for name in names:
            inputs = getattr(holder, name).in_features
            if kind == "int4" and inputs % GROUP:
                raise ValueError(f"int4 rounds {GROUP} inputs together; {name} has {inputs}")
    for holder, names in groups:
        linears = [getattr(holder, name) for name in names]
        parts = [round_weight(linear.weight, kind) for linear in linears]
        _set(holder, names, QuantizedLinear(parts, [linear.bias for linear in linears]))


@torch.no_grad()
def place_rounded(model: Llama, checkpoint: Checkpoint, device: torch.device) -> str | None:
    """Give a model without memory the weights that its checkpoint holds rounded, as they are.

    Products whose weights the kernels do not know as they are stay dense, to be filled with decoded weights.

    Returns:
        The kind, of the last if there are several; None if there are none.
    """
    dtype, kind = next(model.parameters()).dtype, None
    for prefix, holder, names in _products(model):
        stored = [checkpoint.tensors.get(f"{prefix}.{name}.weight") for name in names]
        kinds = {kind_of(each) for each in stored}
        if len(kinds) != 1 or None in kinds:
            continue
        (kind,) = kinds
        parts = [read_rounded(each, device) for each in stored if isinstance(each, RoundedTensor)]
        biases = [checkpoint.tensors.get(f"{prefix}.{name}.bias") for name in names]
        there = [None if bias is None else read_all(bias, device=device).to(dtype) for bias in biases]
        _set(holder, names, QuantizedLinear(parts, there))
    return kind


def _products(model: Llama) -> Iterator[tuple[str, Packable, tuple[str, ...]]]:
    """The products of every decoder layer: prefix of their names, module that holds them, and its layers in each."""
    for prefix, holder in model.named_modules():
        if isinstance(holder, Packable):
            alone = "o_proj" if hasattr(holder, "o_proj") else "down_proj"
            yield prefix, holder, holder.packs
            yield prefix, holder, (alone,)


def _set(holder: Packable, names: Sequence[str], product: QuantizedLinear) -> None:
    if len(names) == 1:
        setattr(holder, names[0], product)
        return
    holder.joined, holder.joined_sizes = product, product.sizes
    for name in names:
        setattr(holder, name, None)
