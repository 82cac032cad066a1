"""Keys and values of past tokens in blocks, and the attention of one pass of the model over them.

A pass takes the new tokens of several sequences side by side in one row of T, whatever their numbers: prompts, parts of
prompts and single tokens. `PagedStep` hands the attention to llama_kernels' paged kernels; `PlainStep` computes it
with torch, sequence by sequence, and is the same thing anywhere.

Shape legend: T new tokens of all sequences, N sequences, S new and C cached-and-new tokens of one, H query heads,
K key/value heads, G = H/K, D head width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import llama_kernels
from llama_core import LlamaConfig, sdpa
from llama_kernels.write_kv import from_fp8, to_fp8


class PagedKVCache:
    """The memory: (2, layers, blocks, block size, K, D).

    Args:
        config: of the model; gives layers, heads and widths.
        num_blocks, block_size: as in the `BlockPool`.
        dtype, device: of the model's activations; or the dtype is float8_e4m3fn.
        scales: (2, layers, K) float32, with float8_e4m3fn: what keys and values are divided by (`fp8_cache.py`).
    """

    def __init__(
        self,
        config: LlamaConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        scales: Tensor | None = None,
    ) -> None:
        assert (scales is not None) == (dtype == torch.float8_e4m3fn)
        shape = (2, config.num_hidden_layers, num_blocks, block_size, config.kv_heads, config.head_width)
        # Not filled: a CPU gives memory where it is first written, and no attention here reads what is not.
        self.memory = torch.empty(shape, dtype=dtype, device=device)
        self.keys: list[Tensor] = list(self.memory[0])
        self.values: list[Tensor] = list(self.memory[1])
        self.scales = scales
        self.block_size = block_size

    def scales_of(self, layer: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Of a layer's keys and values, (K,) each."""
        return (None, None) if self.scales is None else (self.scales[0, layer], self.scales[1, layer])

    @torch.inference_mode()
    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to), all of them read before any is written."""
        if pairs:
            source, target = zip(*pairs, strict=True)
            memory = self.memory.view(torch.uint8) if self.scales is not None else self.memory  # torch indexes no fp8
            memory[:, :, list(target)] = memory[:, :, list(source)]


def block_bytes(config: LlamaConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block in all layers."""
    return 2 * config.num_hidden_layers * block_size * config.kv_heads * config.head_width * dtype.itemsize


@dataclass(frozen=True)
class Span:
    """New tokens of one sequence in a pass."""

    blocks: Sequence[int]
    start: int
    """Tokens in the cache before."""
    count: int


@dataclass(frozen=True)
class PagedStep:
    """The attention of one pass by llama_kernels (an `Attend`): written to the cache, then read through the tables."""

    cache: PagedKVCache
    slots: Tensor
    """(T,) int32, where each token goes; below 0 for padding."""
    tables: Tensor
    """(N, blocks) int32."""
    lengths: Tensor
    """(N,) int32, C of each sequence; 0 for padding."""
    bounds: Tensor | None
    """(N + 1,) int32, rows of each sequence; None where each has one."""
    longest_new: int
    longest: int

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        k_scale, v_scale = self.cache.scales_of(layer)
        llama_kernels.write_kv(k[0], v[0], keys, values, self.slots, k_scale=k_scale, v_scale=v_scale)
        return llama_kernels.paged_attention(
            q[0], keys, values, self.tables, self.lengths, self.bounds,
            max_seqlen_q=self.longest_new, max_seqlen_k=self.longest, k_scale=k_scale, v_scale=v_scale,
        ).unsqueeze(0)  # fmt: skip


AttendRows = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q (N, S, H, D), k and v (N, C, K, D), causal from the last token back → (N, S, H, D)."""


def sdpa_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By torch's scaled_dot_product_attention."""
    rows, width, _, head_dim = q.shape
    length, kv_heads = k.shape[1], k.shape[2]
    if width == length:
        return sdpa(q, k, v, causal=True)
    # Fold each group of query heads into the query axis: heads share keys without repeating them.
    q_NKGSD = q.view(rows, width, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
    groups = q_NKGSD.shape[2]
    bias = None
    if width > 1:
        hidden_SC = torch.ones(width, length, dtype=torch.bool, device=q.device).triu_(length - width + 1)
        bias = torch.zeros(hidden_SC.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden_SC, float("-inf"))
        bias = bias.repeat(groups, 1)
    out = F.scaled_dot_product_attention(
        q_NKGSD.reshape(rows, kv_heads, -1, head_dim), k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias
    )
    return out.view(rows, kv_heads, groups, width, head_dim).permute(0, 3, 1, 2, 4).reshape(q.shape)


def rows_by_backend(backend: str) -> AttendRows:
    """By a backend of `llama_kernels.attention`."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return llama_kernels.attention_forward(q, k, v, causal=True, backend=backend)[0]

    return attend


@dataclass(frozen=True)
class _Part:
    """Sequences alike, computed in one call: rows of the pass, and where their keys lie."""

    rows: slice
    sequences: int
    count: int
    length: int
    first: int | None
    """Slot of the first key, where keys lie side by side and sequences at equal distances; else `gather` counts."""
    distance: int
    gather: Tensor | None


class PlainStep:
    """The attention of one pass by torch (an `Attend`)."""

    def __init__(self, cache: PagedKVCache, spans: Sequence[Span], attend_rows: AttendRows = sdpa_rows) -> None:
        self.cache = cache
        self.attend_rows = attend_rows
        device = cache.memory.device
        size = cache.block_size
        slots = [
            span.blocks[at // size] * size + at % size
            for span in spans
            for at in range(span.start, span.start + span.count)
        ]
        self.slots = torch.tensor(slots, device=device)
        self.parts: list[_Part] = []
        row = 0
        for span in spans:
            self._add(span, row)
            row += span.count

    def _add(self, span: Span, row: int) -> None:
        size, length = self.cache.block_size, span.start + span.count
        blocks = span.blocks[: -(-length // size)]
        aside = blocks[-1] - blocks[0] == len(blocks) - 1 and all(b == a + 1 for a, b in itertools.pairwise(blocks))
        first = blocks[0] * size if aside else None
        rows = slice(row, row + span.count)
        if self.parts:
            last = self.parts[-1]
            alike = (last.count, last.length) == (span.count, length)
            if alike and first is not None and last.first is not None:
                distance = first - last.first if last.sequences == 1 else last.distance
                if distance > 0 and first == last.first + last.sequences * distance:
                    rows = slice(last.rows.start, rows.stop)
                    self.parts[-1] = _Part(rows, last.sequences + 1, span.count, length, last.first, distance, None)
                    return
        gather = None
        if first is None:
            offsets = torch.arange(size)
            gather = (torch.tensor(blocks).unsqueeze(1) * size + offsets).flatten()[:length]
            gather = gather.to(self.cache.memory.device)
        self.parts.append(_Part(rows, 1, span.count, length, first, 0, gather))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer].flatten(0, 1), self.cache.values[layer].flatten(0, 1)
        scales = self.cache.scales_of(layer)
        for flat, new, scale in ((keys, k[0], scales[0]), (values, v[0], scales[1])):
            if scale is None:
                flat.index_copy_(0, self.slots, new)
            else:
                flat.view(torch.uint8).index_copy_(0, self.slots, to_fp8(new, scale).view(torch.uint8))
        outs = []
        for part in self.parts:
            rows = (part.sequences, part.count)
            if part.count == part.length and scales[0] is None:  # nothing in the cache before: not read back
                new_k, new_v = k[0, part.rows].unflatten(0, rows), v[0, part.rows].unflatten(0, rows)
            else:
                new_k, new_v = (_read(x, part, s, q.dtype) for x, s in ((keys, scales[0]), (values, scales[1])))
            outs.append(self.attend_rows(q[0, part.rows].unflatten(0, rows), new_k, new_v).flatten(0, 1))
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).unsqueeze(0)


def _read(flat: Tensor, part: _Part, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(slots, K, D) → the part's (N, C, K, D); a view where its keys lie side by side, and are not of fp8."""
    if scale is not None:
        return from_fp8(_read(flat.view(torch.uint8), part, None, dtype).view(flat.dtype), scale, dtype)
    if part.first is None:
        assert part.gather is not None
        return flat[part.gather].unsqueeze(0)
    shape = (part.sequences, part.length, *flat.shape[1:])
    strides = (part.distance * flat.stride(0), *flat.stride())
    return flat.as_strided(shape, strides, flat.storage_offset() + part.first * flat.stride(0))
