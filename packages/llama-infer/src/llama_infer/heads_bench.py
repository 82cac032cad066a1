"""What heads cost: one, a loop over all, all at once; with as many key/value heads, grouped ones, a single one.

The attention of one layer is computed as its formula says, in three ways whose results are equal, and each way's
arithmetic, weights, cache and traffic are counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from llama_core import LlamaConfig, plain_attend

# Shape legend: S sequence, H query heads, K key/value heads, D head width, E hidden

ONE, LOOP, BATCHED = "one", "loop", "batched"
"""A single head, a loop over all heads, all heads in one product each."""


@dataclass(frozen=True)
class Weights:
    """One layer's attention."""

    q: Tensor
    """(H·D, E)."""
    k: Tensor
    """(K·D, E)."""
    v: Tensor
    """(K·D, E)."""
    o: Tensor
    """(E, H·D)."""
    width: int

    @property
    def heads(self) -> int:
        return len(self.q) // self.width

    @property
    def kv_heads(self) -> int:
        return len(self.k) // self.width


@dataclass(frozen=True)
class Row:
    """One way with one number of key/value heads."""

    way: str
    heads: int
    kv_heads: int
    flops: int
    weight_bytes: int
    cache_bytes: int
    """Keys and values of the sequence."""
    rank_cache_bytes: int
    """The same on one tensor-parallel rank, which holds at least one whole head."""
    sent_bytes: int
    """By each tensor-parallel rank: an all-reduce of the output in a ring (or the gather and scatter it is made of)."""
    seconds: float


def bench_heads(
    config: LlamaConfig, *, tokens: int, tp: int, dtype: torch.dtype, device: torch.device, repeats: int = 5
) -> list[Row]:
    """Measure and count.

    Args:
        config: whose layer; its key/value heads are the grouped rows.
        tokens: S.
        tp: tensor-parallel ranks of the traffic column.
        repeats: timed runs; the best counts.

    Raises:
        ValueError: tokens or repeats below 1, or a tp that the heads do not divide over.
    """
    for name, value in (("tokens", tokens), ("repeats", repeats), ("tp", tp)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    heads, width, hidden = config.num_attention_heads, config.head_width, config.hidden_size
    if heads % tp:
        raise ValueError(f"tp is {tp}; {heads} heads do not divide over it")
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        values = torch.randn(sizes, generator=generator) / math.sqrt(sizes[-1])
        return values.to(device=device, dtype=dtype)

    x = normal(tokens, hidden)
    q, o = normal(heads * width, hidden), normal(hidden, heads * width)
    k, v = normal(heads * width, hidden), normal(heads * width, hidden)
    rows: list[Row] = []
    for kv_heads in sorted({heads, config.kv_heads, 1}, reverse=True):
        weights = Weights(q, k[: kv_heads * width], v[: kv_heads * width], o, width)
        for way, run in WAYS.items():
            if way == ONE and rows:  # one head reads one key/value head, however many there are
                continue
            seconds = _best(partial(run, x, weights), repeats, device)
            rows.append(count(way, weights, tokens, tp, seconds))
    return rows


def count(way: str, weights: Weights, tokens: int, tp: int, seconds: float) -> Row:
    """What a way computes, holds and sends."""
    heads, kv_heads = (1, 1) if way == ONE else (weights.heads, weights.kv_heads)
    hidden, width, size = weights.q.shape[1], weights.width, weights.q.element_size()
    elements = 2 * (heads + kv_heads) * width * hidden  # q and o, k and v
    products = 2 * tokens * elements
    scores = heads * tokens * tokens * (4 * width + 5)  # q·k, shares·v, and softmax with its scale
    cache = 2 * tokens * width * size
    return Row(
        way=way,
        heads=heads,
        kv_heads=kv_heads,
        flops=products + scores,
        weight_bytes=elements * size,
        cache_bytes=kv_heads * cache,
        rank_cache_bytes=-(-kv_heads // tp) * cache,
        sent_bytes=0 if way == ONE else 2 * (tp - 1) * tokens * hidden * size // tp,
        seconds=seconds,
    )


def one_head(x: Tensor, weights: Weights, head: int = 0) -> Tensor:
    """x (S, E) → what one query head adds to the residual stream (S, E)."""
    kv_head = head // (weights.heads // weights.kv_heads)
    kv_rows = slice(kv_head * weights.width, (kv_head + 1) * weights.width)
    return _head(x, weights, head, x @ weights.k[kv_rows].T, x @ weights.v[kv_rows].T)


def loop(x: Tensor, weights: Weights) -> Tensor:
    """All heads, one after another; keys and values once for each group."""
    total = torch.zeros_like(x)
    group = weights.heads // weights.kv_heads
    for kv_head in range(weights.kv_heads):
        kv_rows = slice(kv_head * weights.width, (kv_head + 1) * weights.width)
        k, v = x @ weights.k[kv_rows].T, x @ weights.v[kv_rows].T
        for head in range(kv_head * group, (kv_head + 1) * group):
            total += _head(x, weights, head, k, v)
    return total


def batched(x: Tensor, weights: Weights) -> Tensor:
    """All heads in one product each."""
    q, k, v = ((x @ weight.T).unflatten(-1, (-1, weights.width)) for weight in (weights.q, weights.k, weights.v))
    return plain_attend(0, q[None], k[None], v[None])[0].flatten(-2) @ weights.o.T


WAYS: dict[str, Callable[[Tensor, Weights], Tensor]] = {ONE: one_head, LOOP: loop, BATCHED: batched}


def _head(x: Tensor, weights: Weights, head: int, k: Tensor, v: Tensor) -> Tensor:
    rows = slice(head * weights.width, (head + 1) * weights.width)
    scores = x @ weights.q[rows].T @ k.T / math.sqrt(weights.width)
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    shares = scores.float().masked_fill(future, -math.inf).softmax(-1).to(v.dtype)
    return shares @ v @ weights.o[:, rows].T


def _best(run: Callable[[], Tensor], repeats: int, device: torch.device) -> float:
    return min(_times(run, repeats, device))


def _times(run: Callable[[], Tensor], repeats: int, device: torch.device) -> Iterator[float]:
    run()  # starts threads, fills caches
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        yield time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
