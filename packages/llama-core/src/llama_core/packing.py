"""One matrix product instead of three: q, k, v and gate, up joined for inference.

A decode step reads every weight once for a single token; fewer, larger products keep the memory busier.
The joined matrix owns the memory and the Hugging Face names stay, as views of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .linear import Linear, Multiplies


class Packable(Multiplies, nn.Module):
    """A module with linear layers that read the same input and can be joined along their outputs."""

    packs: ClassVar[tuple[str, ...]]
    """Names of the linear layers, in the order of the joined rows."""

    def __init__(self) -> None:
        super().__init__()
        self._packed: tuple[Tensor, Tensor | None] | None = None
        self._views: tuple[tuple[Tensor, Tensor | None], ...] = ()
        self.joined: nn.Module | None = None
        """In place of the layers: x (..., E) → their outputs side by side, by `joined_sizes`. For rounded weights."""
        self.joined_sizes: tuple[int, ...] = ()

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """x (..., E) → one output (..., rows) for each name in `packs`."""
        if self.joined is not None:
            return torch.split(self.joined(x), list(self.joined_sizes), dim=-1)
        layers: list[nn.Linear] = [getattr(self, name) for name in self.packs]
        if self._packed is None or not self._is_packed(layers):
            if self.shared_product is not None and all(self._shares(layer) for layer in layers):
                return self.shared_product(x, [layer.weight for layer in layers])
            return tuple(layer(x) for layer in layers)
        weight, bias = self._packed
        joined = self.product(x, weight, bias)
        return torch.split(joined, [layer.out_features for layer in layers], dim=-1)

    @property
    def joined_weight(self) -> Tensor | None:
        """The joined matrix (rows of all, E), where `pack` has made one, it still holds, and there are no biases."""
        layers: list[nn.Linear] = [getattr(self, name) for name in self.packs]
        if self._packed is None or self._packed[1] is not None or not self._is_packed(layers):
            return None
        return self._packed[0]

    @torch.no_grad()
    def pack(self) -> None:
        """Join the weights (and biases); the layers' parameters become views, without gradients.

        Raises:
            ValueError: a layer that is not an ordinary `nn.Linear` (quantised, or with an adapter around it).
        """
        layers: list[nn.Linear] = [getattr(self, name) for name in self.packs]
        for name, layer in zip(self.packs, layers, strict=True):
            ordinary = isinstance(layer, nn.Linear) and type(layer).forward in (nn.Linear.forward, Linear.forward)
            if not ordinary:
                raise ValueError(f"{name} is a {type(layer).__name__}; only ordinary linear layers can be joined")
        weight = torch.cat([layer.weight for layer in layers])
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        row = 0
        for layer in layers:
            rows = slice(row, row + layer.out_features)
            layer.weight = nn.Parameter(weight[rows], requires_grad=False)
            if bias is not None:
                layer.bias = nn.Parameter(bias[rows], requires_grad=False)
            row = rows.stop
        self._packed = weight, bias
        self._views = tuple((layer.weight, layer.bias) for layer in layers)

    def _shares(self, layer: nn.Module) -> bool:
        """Whether the layer is a weight alone, and multiplies as this module does."""
        return type(layer) is Linear and layer.product is self.product and layer.bias is None

    def _is_packed(self, layers: list[nn.Linear]) -> bool:
        """Whether the parameters are still the views: a layer may have been replaced or assigned to since."""
        return all(
            layer.weight is weight and layer.bias is bias
            for layer, (weight, bias) in zip(layers, self._views, strict=True)
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Packable:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._packed is not None:  # a move or cast has cut the views loose from the joined matrix
            self.pack()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._packed is not None:  # deepcopy has copied each view by itself
            self.pack()


def pack_projections(model: nn.Module) -> None:
    """Join q, k, v and gate, up of every layer of `model`, in place; for inference.

    State dict names and values stay as they are. Costs the memory of one layer's projections while it runs.
    """
    for module in model.modules():
        if isinstance(module, Packable):
            module.pack()
