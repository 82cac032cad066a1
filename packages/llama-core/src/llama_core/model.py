"""The Llama model. Reads top to bottom as the forward pass; holds no collective and no cache.

Module names are Hugging Face's, so their state dicts need no key map. A pipeline stage holds `None` in place of
the parts it lacks, and skips them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .attention import Attend, causal_attend
from .config import LlamaConfig
from .init import init_weights
from .linear import Linear, is_plain
from .ops import Ops
from .packing import Packable
from .rope import RotaryEmbedding

# Shape legend: B batch, S sequence, H query heads, K key/value heads, D head width, E hidden, F feed-forward,
# V vocabulary


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Nothing, as in `Linear`."""


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale; with a residual, the fused add and norm."""

    def __init__(self, config: LlamaConfig, ops: Ops) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size))
        self.eps = config.rms_norm_eps
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


class Attention(Packable):
    """Grouped-query attention with rotary positions (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245)."""

    packs: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: LlamaConfig, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.head_dim = config.head_width
        queries, keys = config.num_attention_heads * config.head_width, config.kv_heads * config.head_width
        self.q_proj = Linear(config.hidden_size, queries, bias=config.attention_bias)
        self.k_proj = Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.v_proj = Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.o_proj = Linear(queries, config.hidden_size, bias=config.attention_bias)

    def forward(self, x_BSE: Tensor, cos: Tensor, sin: Tensor, attend: Attend, layer: int) -> Tensor:
        # -1: the heads that are here, which under tensor parallelism are a part of all
        q_BSHD, k_BSKD, v_BSKD = (x.unflatten(-1, (-1, self.head_dim)) for x in self.project(x_BSE))
        q_BSHD, k_BSKD = self.ops.rope(q_BSHD, k_BSKD, cos, sin)
        out_BSHD = attend(layer, q_BSHD, k_BSKD, v_BSKD)
        out: Tensor = self.o_proj(out_BSHD.flatten(-2))
        return out


class MLP(Packable):
    """Feed-forward with a gated SiLU (SwiGLU)."""

    packs: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")

    def __init__(self, config: LlamaConfig, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.project(x)
        if self.ops.swiglu_linear is not None and torch.is_grad_enabled() and is_plain(self.down_proj):
            return self.ops.swiglu_linear(gate, up, self.down_proj.weight)
        out: Tensor = self.down_proj(self.ops.swiglu(gate, up))
        return out


class DecoderLayer(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig, ops: Ops) -> None:
        super().__init__()
        self.self_attn = Attention(config, ops)
        self.mlp = MLP(config, ops)
        self.input_layernorm = RMSNorm(config, ops)
        self.post_attention_layernorm = RMSNorm(config, ops)
        self.recompute: Callable[..., Tensor] | None = None  # see recompute.py

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, layer: int) -> Tensor:
        if self.recompute is not None and torch.is_grad_enabled():
            out: Tensor = self.recompute(self.block, x, cos, sin, attend, layer)
            return out
        return self.block(x, cos, sin, attend, layer)

    def block(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, layer: int) -> Tensor:
        out: Tensor = self.self_attn(self.input_layernorm(x), cos, sin, attend, layer)
        normed, x = self.post_attention_layernorm.add(out, x)
        out = x + self.mlp(normed)
        return out


class LlamaModel(nn.Module):
    """Tokens to hidden states: embedding, layers, final norm."""

    def __init__(self, config: LlamaConfig, ops: Ops) -> None:
        super().__init__()
        self.embed_tokens: Embedding | None = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, ops) for _ in range(config.num_hidden_layers))
        self.norm: RMSNorm | None = RMSNorm(config, ops)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(self, x: Tensor, positions: Tensor | None, attend: Attend) -> Tensor:
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        cos, sin = self.rotary_emb(positions)
        for index, layer in enumerate(self.layers):
            if layer is not None:
                x = layer(x, cos, sin, attend, index)
        return x if self.norm is None else self.norm(x)


class Llama(nn.Module):
    """A Llama language model.

    Built outside `torch.device("meta")`, its weights are `init_weights(model, seed=0)`; on meta they are shapes only:
    `to_empty` and then `init_weights` or a loader fills them.

    Args:
        config: the shape.
        ops: the operations, plain torch by default; `llama_kernels.ops(device)` for fast ones.
        attend: attention where a call of the model names none; causal by default.
    """

    def __init__(self, config: LlamaConfig, ops: Ops | None = None, attend: Attend = causal_attend) -> None:
        super().__init__()
        self.config = config
        self.ops = Ops() if ops is None else ops
        self.attend = attend
        self.model = LlamaModel(config, self.ops)
        self.lm_head: Linear | None = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()
        if self.lm_head.weight.device.type != "meta":
            init_weights(self, seed=0)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, attend: Attend | None = None) -> Tensor:
        """Tokens to hidden states after the final norm.

        Args:
            tokens: (B, S), integers in [0, V); on later pipeline stages the hidden states (B, S, E).
            positions: (B or 1, S), integers; 0 … S-1 by default.
            attend: this call's attention; the model's own by default.

        Returns:
            (B, S, E). `logits` turns them into scores; `ops.linear_cross_entropy` into a loss without the scores.

        Raises:
            ValueError: tokens or positions of another shape.
        """
        if self.model.embed_tokens is not None and tokens.dim() != 2:
            raise ValueError(f"tokens have shape {tuple(tokens.shape)}; (batch, sequence) is wanted")
        rows, length = tokens.shape[:2]
        first = self.model.embed_tokens is not None  # later, tensor-parallel ranks may each see a share of the sequence
        if first and positions is not None and positions.shape not in ((rows, length), (1, length)):
            raise ValueError(
                f"positions have shape {tuple(positions.shape)}; ({rows}, {length}) or (1, {length}) is wanted"
            )
        out: Tensor = self.model(tokens, positions, self.attend if attend is None else attend)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., E) → (..., V), in the model's dtype."""
        if self.lm_head is None:
            raise ValueError("this pipeline stage has no output head; logits exist on the last stage")
        out: Tensor = self.lm_head(hidden)
        return out

    def tie_weights(self) -> None:
        """Where the configuration ties them, make head and embedding one parameter."""
        if self.config.tie_word_embeddings and self.lm_head is not None and self.model.embed_tokens is not None:
            self.lm_head.weight = self.model.embed_tokens.weight

    def num_parameters(self) -> int:
        """Elements of all parameters that are here, a tied one counted once."""
        return sum(p.numel() for p in self.parameters())

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Llama:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tie_weights()  # moving from meta makes two parameters out of a shared one
        return self
