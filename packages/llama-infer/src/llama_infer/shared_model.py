"""A model of which each rank holds a share: a smaller `Llama`, and sums over the ranks where shares meet.

Heads, feed-forward width and vocabulary are split (Megatron-LM, Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053).
A share is an ordinary model of fewer heads and a narrower feed-forward, so projections are joined, weights rounded and
products exchanged as ever. Each rank reads its own rows and columns of the checkpoint only.

Nothing need divide: 9 heads over 3 key/value heads run on 2 ranks as 6 and 3. Where ranks outnumber the key/value
heads, several hold the same one, and share its query heads.

    tokens → embedding → sum → norm → q, k, v → attention over own heads → o → sum → norm → gate, up → down → sum → …
    → norm → head → logits over own vocabulary, gathered

Without sequence parallelism: a decode step has a token for each sequence, which no ranks can share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama_core import Llama, LlamaConfig
from llama_core.checkpoint import Checkpoint
from llama_core.model import DecoderLayer
from llama_core.rounded_tensor import RoundedTensor
from llama_core.stored_tensor import PartOf, StoredTensor
from llama_parallel.collectives import Axis, finish, start_all_gather, start_all_reduce

GRANULE = 128
"""The feed-forward width is cut at multiples of this where it can be: what int4 rounds together, and good for tiles."""


@dataclass(frozen=True)
class Share:
    """What one of several ranks holds."""

    queries: range
    kv: range
    inner: range
    vocabulary: range


def share_of(config: LlamaConfig, size: int, rank: int) -> Share:
    """The share of a rank.

    Raises:
        ValueError: more ranks than there are query heads or rows to share.
    """
    heads, kv_heads = config.num_attention_heads, config.kv_heads
    group = heads // kv_heads
    if size <= kv_heads:
        kv = _cut(kv_heads, size, rank)
        queries = range(kv.start * group, kv.stop * group)
    else:
        kv = range(rank * kv_heads // size, rank * kv_heads // size + 1)
        beside = [other for other in range(size) if other * kv_heads // size == kv.start]
        part = _cut(group, len(beside), beside.index(rank))
        queries = range(kv.start * group + part.start, kv.start * group + part.stop)
        most = -(-size // kv_heads)
        if most > group:
            raise ValueError(
                f"tensor_parallel_size {size} leaves ranks without a head: the model has {heads} query heads over "
                f"{kv_heads} key/value heads, so it may be at most {heads}"
            )
    width = config.intermediate_size
    unit = GRANULE if width % GRANULE == 0 and width // GRANULE >= size else 1
    rows = -(-config.vocab_size // size)
    if width < size or (size - 1) * rows >= config.vocab_size:
        raise ValueError(f"tensor_parallel_size {size} is more than vocab_size or intermediate_size can be shared by")
    inner = _cut(width // unit, size, rank)
    vocabulary = range(rank * rows, min((rank + 1) * rows, config.vocab_size))
    return Share(queries, kv, range(inner.start * unit, inner.stop * unit), vocabulary)


def _cut(count: int, size: int, rank: int) -> range:
    """The rank's part of `count` things, as even as can be."""
    return range(rank * count // size, (rank + 1) * count // size)


def share_checkpoint(checkpoint: Checkpoint, share: Share) -> Checkpoint:
    """The checkpoint of the share: a configuration of its own size, and its part of each tensor."""
    config = checkpoint.config
    small = config.replace(
        num_attention_heads=len(share.queries),
        num_key_value_heads=len(share.kv),
        head_dim=config.head_width,
        intermediate_size=len(share.inner),
        vocab_size=len(share.vocabulary),
    )
    width = config.head_width
    queries = range(share.queries.start * width, share.queries.stop * width)
    kv = range(share.kv.start * width, share.kv.stop * width)
    cuts = {
        "embed_tokens": (0, share.vocabulary),
        "lm_head": (0, share.vocabulary),
        "q_proj": (0, queries),
        "k_proj": (0, kv),
        "v_proj": (0, kv),
        "o_proj": (1, queries),
        "gate_proj": (0, share.inner),
        "up_proj": (0, share.inner),
        "down_proj": (1, share.inner),
    }
    tensors = {name: _part(name, stored, cuts) for name, stored in checkpoint.tensors.items()}
    return replace(checkpoint, config=small, tensors=tensors)


def _part(name: str, stored: StoredTensor, cuts: Mapping[str, tuple[int, range]]) -> StoredTensor:
    module, _, kind = name.rpartition(".")
    dim, cut = cuts.get(module.rpartition(".")[2], (None, range(0)))
    if dim is None or (dim == 1 and kind == "bias"):  # norms; the bias of a sum is added once, see below
        return stored
    if isinstance(stored, RoundedTensor):
        return stored.part(dim, cut.start, cut.stop)
    return PartOf(stored, dim, cut.start, cut.stop)


@torch.no_grad()
def join_shares(model: Llama, whole: LlamaConfig, share: Share, axis: Axis) -> None:
    """Have a loaded share meet the others' where it must, in place; then `model` is used as the whole.

    Its configuration stays that of the share, whose cache is as small, but for the vocabulary: logits are all of them.
    """
    for layer in model.model.layers:
        assert isinstance(layer, DecoderLayer)
        for holder, name in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
            linear = getattr(holder, name)
            if axis.rank and linear.bias is not None:
                linear.bias.zero_()
            setattr(holder, name, SummedProduct(linear, axis))
    assert model.model.embed_tokens is not None
    assert model.lm_head is not None
    model.model.embed_tokens = SharedEmbedding(model.model.embed_tokens, share.vocabulary, whole.vocab_size, axis)  # type: ignore[assignment]
    model.lm_head = GatheredHead(model.lm_head, whole.vocab_size, axis)  # type: ignore[assignment]
    model.config = model.config.replace(vocab_size=whole.vocab_size)


class SummedProduct(nn.Module):
    """(…, own part of in) → (…, out): the sum over ranks of their products."""

    def __init__(self, product: nn.Module, axis: Axis) -> None:
        super().__init__()
        self.product, self.axis = product, axis

    def forward(self, x: Tensor) -> Tensor:
        return _sum(self.product(x), self.axis)


class SharedEmbedding(nn.Module):
    """(B, S) tokens → (B, S, E): each rank looks up its part of the vocabulary."""

    def __init__(self, own: nn.Embedding, rows: range, vocab_size: int, axis: Axis) -> None:
        super().__init__()
        self.weight, self.rows, self.vocab_size, self.axis = own.weight, rows, vocab_size, axis

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens - self.rows.start
        mine = (own >= 0) & (own < len(self.rows))
        found = F.embedding(torch.where(mine, own, 0), self.weight)
        return _sum(torch.where(mine.unsqueeze(-1), found, 0), self.axis)


class GatheredHead(nn.Module):
    """(…, E) → (…, V) on every rank: each computes the logits of its part of the vocabulary."""

    def __init__(self, own: nn.Linear, vocab_size: int, axis: Axis) -> None:
        super().__init__()
        self.own, self.vocab_size, self.axis = own, vocab_size, axis

    @property
    def weight(self) -> Tensor:
        return self.own.weight

    @weight.setter
    def weight(self, value: nn.Parameter) -> None:  # of `Llama.tie_weights`
        self.own.weight = value

    def forward(self, x: Tensor) -> Tensor:
        part = self.own(x)
        most = -(-self.vocab_size // self.axis.size)  # the last rank may hold fewer
        parts = finish(start_all_gather(F.pad(part, (0, most - part.shape[-1])).unsqueeze(0), self.axis))
        return parts.movedim(0, -2).flatten(-2)[..., : self.vocab_size]


def _sum(x: Tensor, axis: Axis) -> Tensor:
    return x if axis.size == 1 else finish(start_all_reduce(x, axis))
