"""Keys and values in fp8 (e4m3): half the memory of bfloat16, so twice the tokens, and half the bytes read a step.

e4m3 keeps 3 bits of a number's mantissa over a range of 2^15 with full precision (Micikevicius et al. 2022,
https://arxiv.org/abs/2209.05433). A scale for each layer and head puts its numbers into that range. It is measured
once, on tokens drawn at random, and leaves `ROOM` above what was seen; what is larger still is cut off.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llama_core import Llama, causal_attend
from llama_kernels.fp8_linear import E4M3_MAX

TOKENS = 256
"""That are looked at."""
ROOM = 8.0
"""Times the largest number seen. It costs no precision: 448 / 8 is still 3,584 times the smallest normal number."""


class _Record:
    """Causal attention that notes the largest key and value of each head."""

    def __init__(self) -> None:
        self.largest: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert layer == len(self.largest)
        self.largest.append(torch.stack([x.float().abs().amax(dim=(0, 1, 3)) for x in (k, v)]))
        return causal_attend(layer, q, k, v)


@torch.inference_mode()
def measured_scales(model: Llama) -> Tensor:
    """(2, layers, K) float32: the number by which keys and values of each head are divided to be stored as e4m3.

    The same for the same weights, on every rank of those that share them.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    length = min(TOKENS, model.config.max_position_embeddings)
    tokens = torch.randint(0, model.config.vocab_size, (1, length), generator=generator)
    record = _Record()
    model(tokens.to(device), attend=record)
    largest = torch.stack(record.largest, dim=1)
    return (largest * (ROOM / E4M3_MAX)).clamp(min=1e-8)
