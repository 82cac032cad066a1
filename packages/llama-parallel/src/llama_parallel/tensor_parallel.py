"""Tensor parallelism for Llama, applied from outside: module for module, Hugging Face's names unchanged.

At rest each parameter is a DTensor on the tp dimension: rows of q, k, v, gate, up, embedding and head, columns of o and
down, norms and the biases of o and down whole on every rank. In motion everything is a plain local tensor. Between
products the tokens are shared (sequence parallelism, though a rank's stretch may end within a row, see `TOKENS`):
norms, residual stream and model's result are (B, S / tp, E).

    tokens → embedding → reduce-scatter → norm → all-gather → q, k, v → attention over own heads → o → reduce-scatter
    → norm → all-gather → gate, up → down → reduce-scatter → … → norm → all-gather → head → loss over own vocabulary
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from llama_core import Llama
from llama_core.linear import Linear
from llama_core.model import MLP, Attention, DecoderLayer, Embedding, RMSNorm

from .collectives import TOKENS, Axis, all_reduce, all_reduce_gradient, gather, reduce_scatter
from .column_products import column_products
from .deferred_products import DeferredProducts
from .row_products import row_product
from .vocab_loss import VocabParallelCrossEntropy

_FEATURES = -1
_WHOLE = None


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh, sequence_parallel: bool = True, early: bool = False) -> None:
    """Share every layer of `model` over the dimension tp, in place; `model.ops` gets the vocabulary-parallel loss.

    Works on a model on the meta device and on one with weights, of which each rank keeps its part without asking the
    others. A pipeline stage's missing parts stay missing.

    Args:
        model: not yet compiled, packed, or sharded.
        mesh: of `build_mesh`.
        sequence_parallel: share the sequence between products. Otherwise norms and the residual stream are computed
            alike on all ranks, an all-reduce stands in for each pair of all-gather and reduce-scatter, and a sequence
            may have any length, one token as well.
        early: with sequence parallelism, hide forward's communication too, behind parts of products; not for selective
            checkpointing and compilation (see `column_products`).

    Raises:
        ValueError: heads, key/value heads, feed-forward width or vocabulary do not fit the number of ranks.
    """
    shape, tp = model.config, Tp(mesh, sequence_parallel, early)
    size = tp.axis.size
    if shape.num_attention_heads % size or shape.intermediate_size % size:
        raise ValueError(
            f"{shape.num_attention_heads} attention heads and intermediate_size {shape.intermediate_size} "
            f"must both divide over tp {size}"
        )
    if shape.kv_heads % size and size % shape.kv_heads:
        raise ValueError(f"tp {size} is neither a divisor nor a multiple of {shape.kv_heads} key/value heads")
    if (size - 1) * -(-shape.vocab_size // size) >= shape.vocab_size:
        raise ValueError(f"vocab_size {shape.vocab_size} leaves a rank of tp {size} without a row")
    base = model.model
    if base.embed_tokens is not None:
        base.embed_tokens = VocabParallelEmbedding(base.embed_tokens, tp)
    for layer in base.layers:
        if isinstance(layer, DecoderLayer):
            layer.self_attn = TensorParallelAttention(layer.self_attn, tp, shape.kv_heads)
            layer.mlp = TensorParallelMLP(layer.mlp, tp)
            layer.input_layernorm = TensorParallelNorm(layer.input_layernorm, tp)
            layer.post_attention_layernorm = TensorParallelNorm(layer.post_attention_layernorm, tp)
    if base.norm is not None:
        base.norm = TensorParallelNorm(base.norm, tp)
    if model.lm_head is not None:
        model.lm_head = VocabParallelHead(model.lm_head, tp)
        model.tie_weights()
    loss = VocabParallelCrossEntropy(tp.axis, shape.vocab_size, sequence_parallel)
    model.ops = replace(model.ops, linear_cross_entropy=loss)


class Tp:
    """The tensor-parallel dimension: for parameters a mesh, for tensors in motion an axis."""

    def __init__(self, mesh: DeviceMesh, sequence_parallel: bool, early: bool) -> None:
        self.mesh = mesh["tp"]
        self.axis = Axis.of(mesh, "tp")
        self.sequence_parallel = sequence_parallel
        self.early = early and sequence_parallel and self.axis.size > 1

    def place(self, parameter: Tensor | None, dim: int | None) -> nn.Parameter | None:
        """The parameter at rest: sharded along `dim`, or whole on each rank."""
        if parameter is None:
            return None
        placement = Replicate() if dim is _WHOLE else Shard(dim)
        shared = distribute_tensor(parameter.detach(), self.mesh, [placement], src_data_rank=None)
        return nn.Parameter(shared, requires_grad=parameter.requires_grad)

    def place_linear(self, layer: nn.Linear, weight_dim: int | None, bias_dim: int | None) -> None:
        """Both parameters of a layer that has them registered, the bias perhaps as None."""
        layer.weight = cast(nn.Parameter, self.place(layer.weight, weight_dim))
        layer.bias = self.place(layer.bias, bias_dim)  # type: ignore[assignment]

    def used_on_shards(self, parameter: Tensor) -> Tensor:
        """A parameter that all ranks hold and use on their own tokens, in motion: its gradient is summed."""
        local = in_motion(parameter)
        return all_reduce_gradient(local, self.axis) if self.sequence_parallel else local

    def sum_out(self, partial: Tensor) -> Tensor:
        """Out of a product whose inner dimension is shared: the sum over ranks, (B, S, E) → (B, S / tp, E)."""
        if self.sequence_parallel:
            return reduce_scatter(partial, self.axis, TOKENS)
        return all_reduce(partial, self.axis)


def in_motion(parameter: Tensor) -> Tensor:
    """This rank's part of a DTensor as a plain tensor."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _check_product(layer: Linear) -> None:
    if layer.product is not F.linear:
        raise ValueError("tensor-parallel layers compute their own products: set_linear_product has no effect on them")


class TensorParallelNorm(RMSNorm):
    """Norm of this rank's tokens."""

    def __init__(self, whole: RMSNorm, tp: Tp) -> None:
        nn.Module.__init__(self)  # the weight is taken over, not made anew
        self.weight = cast(nn.Parameter, tp.place(whole.weight, _WHOLE))
        self.eps, self.ops, self.tp = whole.eps, whole.ops, tp

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.tp.used_on_shards(self.weight), self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.ops.add_rms_norm(x, residual, self.tp.used_on_shards(self.weight), self.eps)


class RowParallelLinear(Linear):
    """(B, S, part of in) → (B, S / tp, out): each rank holds some columns of the weight."""

    def __init__(self, whole: Linear, tp: Tp) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.register_parameter("weight", cast(nn.Parameter, whole.weight))
        self.register_parameter("bias", cast("nn.Parameter | None", whole.bias))
        self.tp = tp
        tp.place_linear(self, weight_dim=1, bias_dim=_WHOLE)
        self.product = whole.product
        self.deferred: DeferredProducts | None = None

    def forward(self, input: Tensor) -> Tensor:
        weight = in_motion(self.weight)
        if self.tp.early and (self.product is F.linear or self.deferred is not None):
            out = row_product(input, weight, self.tp.axis, self.deferred)
        else:
            out = self.tp.sum_out(self.product(input, weight, None))
        return out if self.bias is None else out + self.tp.used_on_shards(self.bias)  # once, not once per rank


class TensorParallelAttention(Attention):
    """Attention over this rank's heads.

    Fewer key/value heads than ranks: all of k and v rests on every rank, each uses the one head that its query heads
    read, and the gradients of all ranks are summed.
    """

    def __init__(self, whole: Attention, tp: Tp, kv_heads: int) -> None:
        super(Attention, self).__init__()
        self.ops, self.head_dim, self.tp = whole.ops, whole.head_dim, tp
        self.repeated = kv_heads % tp.axis.size != 0
        self.first_kv_row = tp.axis.rank * kv_heads // tp.axis.size * self.head_dim
        self.deferred: DeferredProducts | None = None
        rows = _WHOLE if self.repeated else 0
        self.q_proj, self.k_proj, self.v_proj = whole.q_proj, whole.k_proj, whole.v_proj
        for layer, dim in ((self.q_proj, 0), (self.k_proj, rows), (self.v_proj, rows)):
            _check_product(layer)
            tp.place_linear(layer, weight_dim=dim, bias_dim=dim)
        self.o_proj = RowParallelLinear(whole.o_proj, tp)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        weights = [in_motion(self.q_proj.weight), self._of_kv(self.k_proj.weight), self._of_kv(self.v_proj.weight)]
        biases: list[Tensor | None] = [None] * len(layers)
        if self.q_proj.bias is not None:
            biases = [in_motion(self.q_proj.bias), self._of_kv(self.k_proj.bias), self._of_kv(self.v_proj.bias)]
        return column_products(
            x, weights, biases, self.tp.axis, self.tp.sequence_parallel, self.deferred, self.tp.early
        )

    def _of_kv(self, parameter: Tensor) -> Tensor:
        local = in_motion(parameter)
        if not self.repeated:
            return local
        return all_reduce_gradient(local, self.tp.axis).narrow(0, self.first_kv_row, self.head_dim)


class TensorParallelMLP(MLP):
    """Feed-forward over this rank's part of the inner width."""

    def __init__(self, whole: MLP, tp: Tp) -> None:
        super(MLP, self).__init__()
        self.ops, self.tp = whole.ops, tp
        self.deferred: DeferredProducts | None = None
        self.gate_proj, self.up_proj = whole.gate_proj, whole.up_proj
        for layer in (self.gate_proj, self.up_proj):
            _check_product(layer)
            tp.place_linear(layer, weight_dim=0, bias_dim=0)
        self.down_proj = RowParallelLinear(whole.down_proj, tp)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        layers = (self.gate_proj, self.up_proj)
        weights = [in_motion(layer.weight) for layer in layers]
        biases = [None if layer.bias is None else in_motion(layer.bias) for layer in layers]
        return column_products(
            x, weights, biases, self.tp.axis, self.tp.sequence_parallel, self.deferred, self.tp.early
        )


class VocabParallelEmbedding(Embedding):
    """(B, S) tokens → (B, S / tp, E): each rank looks up its part of the vocabulary."""

    def __init__(self, whole: Embedding, tp: Tp) -> None:
        nn.Module.__init__(self)
        for name in ("num_embeddings", "embedding_dim"):
            setattr(self, name, getattr(whole, name))
        self.padding_idx = None
        self.weight, self.tp = cast(nn.Parameter, tp.place(whole.weight, 0)), tp
        self.first = tp.axis.rank * -(-self.num_embeddings // tp.axis.size)

    def forward(self, input: Tensor) -> Tensor:
        wrong = (input < 0) | (input >= self.num_embeddings)
        if input.device.type == "cpu" and wrong.any():
            raise ValueError(f"token {int(input[wrong][0])} is outside [0, {self.num_embeddings})")
        weight, own = in_motion(self.weight), input - self.first
        mine = (own >= 0) & (own < len(weight))
        found = F.embedding(torch.where(mine, own, 0), weight)
        # A GPU does not wait to raise: there a token outside the vocabulary, which no rank finds, gives NaN.
        other = torch.zeros_like(own, dtype=weight.dtype).masked_fill(wrong, float("nan"))
        return self.tp.sum_out(torch.where(mine.unsqueeze(-1), found, other.unsqueeze(-1)))


class VocabParallelHead(Linear):
    """(B, S / tp, E) hidden states → (B, S, V) logits on every rank; for sampling. The loss does without."""

    def __init__(self, whole: Linear, tp: Tp) -> None:
        nn.Module.__init__(self)
        _check_product(whole)
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.register_parameter("weight", cast(nn.Parameter, whole.weight))
        self.register_parameter("bias", cast("nn.Parameter | None", whole.bias))
        self.tp = tp
        tp.place_linear(self, weight_dim=0, bias_dim=0)

    def forward(self, input: Tensor) -> Tensor:
        axis = self.tp.axis
        (part,) = column_products(input, [in_motion(self.weight)], [None], axis, self.tp.sequence_parallel)
        missing = -(-self.out_features // axis.size) - part.shape[-1]  # the last rank may hold fewer rows
        return gather(F.pad(part, (0, missing)), axis, _FEATURES)[..., : self.out_features]
