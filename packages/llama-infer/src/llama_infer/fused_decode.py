"""A decode step of one sequence in seven launches for a layer: products with their norms, gates and sums inside.

The model's own forward pass takes thirteen, and at batch 1 the small ones cost as much as a fifth of the weights. The
oracle is that forward pass; what does not fit here (biases, adapters, other products, a cache of another dtype) takes
it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama_core import Llama
from llama_core.model import DecoderLayer
from llama_core.packing import Packable
from llama_kernels import fused_linear, paged_attention, rope_write_kv

from .paged_cache import PagedStep
from .quantize import QuantizedLinear

Operands = tuple[Tensor, ...]
"""(weight,), (rounded weight, scale), or (packed, scale, minimum): what `fused_linear` takes after x."""


@dataclass(frozen=True)
class _Layer:
    qkv: Operands
    out: Operands
    gate_up: Operands
    down: Operands
    attention_norm: Tensor
    mlp_norm: Tensor


class FusedDecode:
    """The hidden states of single tokens; see `fused_decode`."""

    def __init__(self, model: Llama, layers: list[_Layer]) -> None:
        self.model = model
        self.layers = layers
        self.eps = model.config.rms_norm_eps
        self.heads = model.config.num_attention_heads

    def __call__(self, ids_N: Tensor, positions_N: Tensor, step: PagedStep) -> Tensor:
        """Hidden states (N, E) after the final norm of N tokens, each the newest of its sequence; writes the cache."""
        body = self.model.model
        assert body.embed_tokens is not None
        assert body.norm is not None
        assert step.bounds is None
        x_NE = body.embed_tokens(ids_N)
        cos, sin = (angles.flatten(0, 1) for angles in body.rotary_emb(positions_N.unsqueeze(0)))
        for index, layer in enumerate(self.layers):
            keys, values = step.cache.keys[index], step.cache.values[index]
            qkv = fused_linear(x_NE, *layer.qkv, norm_weight=layer.attention_norm, eps=self.eps)
            q_NHD = rope_write_kv(qkv, cos, sin, keys, values, step.slots, self.heads)
            attended = paged_attention(q_NHD, keys, values, step.tables, step.lengths, max_seqlen_k=step.longest)
            x_NE = fused_linear(attended.flatten(1), *layer.out, residual=x_NE)
            act = fused_linear(x_NE, *layer.gate_up, norm_weight=layer.mlp_norm, eps=self.eps, gated=True)
            x_NE = fused_linear(act, *layer.down, residual=x_NE)
        normed: Tensor = body.norm(x_NE)
        return normed


def fused_decode(model: Llama, cache_dtype: torch.dtype) -> FusedDecode | None:
    """The model's decode step through fused kernels; None where it does not fit.

    Args:
        model: with joined projections (`pack_projections`) or rounded weights.
        cache_dtype: of keys and values.
    """
    layers = []
    for layer in model.model.layers:
        if type(layer) is not DecoderLayer or layer.input_layernorm.weight.dtype != cache_dtype:
            return None
        qkv, out = _joined(layer.self_attn), _alone(layer.self_attn.o_proj)
        gate_up, down = _joined(layer.mlp), _alone(layer.mlp.down_proj)
        if qkv is None or out is None or gate_up is None or down is None:
            return None
        norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        layers.append(_Layer(qkv, out, gate_up, down, *norms))
    return FusedDecode(model, layers)


def _joined(holder: Packable) -> Operands | None:
    if holder.joined is not None:
        return _alone(holder.joined)
    weight = holder.joined_weight if holder.product is F.linear else None
    return None if weight is None else (weight,)


def _alone(linear: nn.Module) -> Operands | None:
    if isinstance(linear, QuantizedLinear):
        return None if linear.bias is not None else linear.operands
    ordinary = isinstance(linear, nn.Linear) and getattr(linear, "product", F.linear) is F.linear
    return (linear.weight,) if ordinary and linear.bias is None else None
