"""The key `fp8`: matrix products of the decoder's layers in 8 bits, forward and backward (llama_kernels.fp8_matmuls).

Attention, norms, the residual stream, embedding and head stay in the run's dtype, and so do weights and gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from llama_core import LlamaConfig, set_linear_product

from .config import TrainConfig

if TYPE_CHECKING:
    from llama_kernels import Fp8Weights


def check_fp8(config: TrainConfig, shape: LlamaConfig) -> None:
    """Raise ValueError where `fp8` is asked for and this model, layout or machine does not go with it.

    Args:
        config: resolved.
        shape: the model's.
    """
    if not config.fp8:
        return
    widths = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads × head_dim": shape.num_attention_heads * shape.head_width,
        "num_key_value_heads × head_dim": shape.kv_heads * shape.head_width,
    }
    for name, width in widths.items():
        if width % 16:
            raise ValueError(f"fp8 is true, and the model's {name} is {width}: it must be a multiple of 16")
    if config.parallel.tp > 1:
        raise ValueError(f"fp8 is true, and parallel.tp is {config.parallel.tp}: fp8 goes with dp, cp and pp alone")
    if config.parallel.pp > 1 and config.parallel.schedule == "zero_bubble":
        raise ValueError(
            "fp8 is true, and parallel.schedule is 'zero_bubble', which makes its own products: choose 1f1b"
        )
    if config.dtype == "float64" or (config.device == "cuda" and config.dtype != "bfloat16"):
        wanted = "bfloat16" if config.device == "cuda" else "bfloat16 or float32"
        raise ValueError(f"fp8 is true, and dtype is {config.dtype!r}: it must be {wanted}")
    if config.device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        raise ValueError(
            f"fp8 is true, and {torch.cuda.get_device_name()} has compute capability "
            f"{'.'.join(map(str, torch.cuda.get_device_capability()))}: 8.9 or more is needed"
        )


def use_fp8(layers: nn.Module, remember: bool) -> None:
    """Have every linear layer below `layers` multiply in fp8, in place.

    Args:
        layers: the decoder's layers, the head not among them.
        remember: round weights once per change instead of once per use: an optimizer step with several micro-batches
            saves the others' casts, for 2 bytes a weight that stay. For weights that are changed by operations on them
            alone, which FSDP's are not.
    """
    product = Fp8Product(remember)
    set_linear_product(layers, product, product.shared)


class Fp8Product:
    """The product of linear layers, as `llama_core.set_linear_product` wants it."""

    def __init__(self, remember: bool) -> None:
        self._remember = remember
        self._rounded: dict[tuple[int, ...], tuple[list[tuple[int, int]], Fp8Weights]] = {}

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x (..., in), weight (out, in) → (..., out)."""
        (y,) = self.shared(x, [weight])
        return y if bias is None else y + bias

    def shared(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Of layers that read the same x."""
        from llama_kernels import fp8_matmuls  # here: a run without fp8 may need none of it

        return fp8_matmuls(x, weights, self._of(weights) if self._remember else None)

    def _of(self, weights: Sequence[Tensor]) -> Fp8Weights:
        from llama_kernels import round_fp8

        key = tuple(id(weight) for weight in weights)
        now = [(weight._version, weight.data_ptr()) for weight in weights]  # torch counts changes in place
        before, rounded = self._rounded.get(key, (None, None))
        if rounded is None or before != now:
            self._rounded.pop(key, None)
            del rounded  # not both at once
            rounded = round_fp8(weights)
            self._rounded[key] = now, rounded
        return rounded
