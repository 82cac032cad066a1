"""Keys and values of past tokens, in memory laid out once: one block per layer, one row per sequence.

A row starts at slot 0 whatever its neighbours' lengths, so there is no padding on the left: slot and position are the
same number. Before each pass of the model `append` says how many tokens come; it returns the positions to pass and
the attention of that pass, and holds no other hidden state:

    step = cache.append(tokens.shape[1])
    hidden = model(tokens, step.positions, step)

Shape legend: B rows, S new tokens, T slots in use, H query heads, K key/value heads, G = H/K, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llama_core import LlamaConfig, sdpa


class StaticKVCache:
    """A preallocated key/value cache.

    Args:
        config: of the model; gives layers, heads and widths.
        rows: sequences, B.
        size: slots of each row, in tokens.
        dtype, device: of the model's activations.

    Attributes:
        lengths: tokens that each row holds.
        size: slots of each row.
    """

    def __init__(
        self, config: LlamaConfig, rows: int, size: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        if rows < 1 or size < 1:
            raise ValueError(f"a cache needs at least 1 row and 1 slot, got rows={rows}, size={size}")
        shape = (rows, config.kv_heads, size, config.head_width)
        layers = range(config.num_hidden_layers)
        # Zeros, not whatever memory holds: a masked slot is multiplied by 0, and 0 · NaN would still be NaN.
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self.lengths = [0] * rows
        self.size = size

    def append(self, width: int, counts: Sequence[int] | None = None) -> CacheStep:
        """Make room for the next tokens of every row.

        Args:
            width: S, tokens of each row in the coming pass.
            counts: for rows of different lengths, how many of the S are real, from the left; the rest is padding on
                the right, written and later overwritten, never looked at. All are real by default.

        Returns:
            The positions and the attention of that pass.

        Raises:
            ValueError: the tokens would pass the cache's size; nothing has changed then.
        """
        starts = list(self.lengths)
        counts = [width] * len(starts) if counts is None else list(counts)
        if len(counts) != len(starts) or width < 1 or not all(0 <= count <= width for count in counts):
            raise ValueError(f"counts must be {len(starts)} numbers from 0 to the width {width}, got {counts}")
        end = max(starts) + width
        if end > self.size:
            raise ValueError(
                f"{width} tokens after the {max(starts)} in the cache need {end} slots; it has {self.size}"
            )
        self.lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        return CacheStep.plan(self, starts, width)

    def truncate(self, length: int) -> None:
        """Forget every row's tokens from `length` on."""
        self.lengths = [min(held, length) for held in self.lengths]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in ascending order, and drop the others. Moves values inside the same memory."""
        assert list(rows) == sorted(set(rows)), rows
        used = max(self.lengths)
        for store in (self.keys, self.values):
            for layer, block_BKTD in enumerate(store):
                for new, old in enumerate(rows):  # new ≤ old, so no row is overwritten before it has moved
                    if new != old:
                        block_BKTD[new, :, :used] = block_BKTD[old, :, :used]
                store[layer] = block_BKTD[: len(rows)]
        self.lengths = [self.lengths[row] for row in rows]

    def grow(self, size: int) -> None:
        """Have at least `size` slots in each row. Copies, so ask for more than the next step needs."""
        if size <= self.size:
            return
        used = max(self.lengths)
        for store in (self.keys, self.values):
            for layer, old_BKTD in enumerate(store):
                rows, heads, _, head_dim = old_BKTD.shape
                store[layer] = old_BKTD.new_zeros(rows, heads, size, head_dim)
                store[layer][:, :, :used] = old_BKTD[:, :, :used]
        self.size = size


@dataclass(frozen=True)
class CacheStep:
    """One pass of the model against a cache: its positions, and its attention (an `Attend`)."""

    cache: StaticKVCache
    positions: Tensor
    """(B or 1, S) int64, to pass to the model."""
    end: int
    """T: slots that any row looks at."""
    start: int | None
    """The first new slot where it is the same in all rows, else None."""
    bias: Tensor | None
    """(B or 1, 1, G·S, T), added to the scores: 0 where a query may look, -inf elsewhere. None: see `__call__`."""

    @classmethod
    def plan(cls, cache: StaticKVCache, starts: list[int], width: int) -> CacheStep:
        device, dtype = cache.keys[0].device, cache.keys[0].dtype
        end = max(starts) + width
        if min(starts) == max(starts):
            start, starts = starts[0], starts[:1]
        else:
            start = None
        first_B1 = torch.tensor(starts, device=device).unsqueeze(-1)
        positions_BS = first_B1 + torch.arange(width, device=device)
        # No bias for a lone query at the end of every row, nor for a prompt from its beginning (plainly causal).
        if start is not None and (width == 1 or start == 0):
            return cls(cache, positions_BS, end, start, None)
        hidden_BST = torch.arange(end, device=device) > positions_BS.unsqueeze(-1)
        bias_BST = torch.zeros(hidden_BST.shape, dtype=dtype, device=device).masked_fill_(hidden_BST, float("-inf"))
        return cls(cache, positions_BS, end, start, bias_BST.unsqueeze(1))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store this pass's keys and values, and attend over all that the row holds; as `llama_core.Attend`."""
        keys_BKTD, values_BKTD = self.cache.keys[layer], self.cache.values[layer]
        self._store(keys_BKTD, k)
        self._store(values_BKTD, v)
        if self.start == 0:
            return sdpa(q, k, v, causal=True)
        # Fold each group of query heads into the query axis: heads share keys without repeating them.
        batch, width, heads, head_dim = q.shape
        kv_heads = k.shape[2]
        q_BKGSD = q.view(batch, width, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        groups = q_BKGSD.shape[2]
        out_BKGSD = F.scaled_dot_product_attention(
            q_BKGSD.reshape(batch, kv_heads, -1, head_dim),
            keys_BKTD[:, :, : self.end],
            values_BKTD[:, :, : self.end],
            attn_mask=self._folded_bias(groups),
        ).view(batch, kv_heads, groups, width, head_dim)
        return out_BKGSD.permute(0, 3, 1, 2, 4).reshape(batch, width, heads, head_dim)

    def _store(self, block_BKTD: Tensor, new_BSKD: Tensor) -> None:
        if self.start is not None:
            block_BKTD[:, :, self.start : self.end] = new_BSKD.transpose(1, 2)
        else:
            row_B1 = torch.arange(len(new_BSKD), device=new_BSKD.device).unsqueeze(-1)
            block_BKTD[row_B1, :, self.positions] = new_BSKD

    def _folded_bias(self, groups: int) -> Tensor | None:
        if self.bias is None or self.bias.shape[2] == 1:
            return self.bias
        return self.bias.repeat(1, 1, groups, 1)
