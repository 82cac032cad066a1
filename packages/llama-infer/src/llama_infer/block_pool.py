"""Which blocks of the key/value cache belong to whom: block tables, sharing of equal beginnings, and what goes first.

A block holds the keys and values of `block_size` tokens in a row. Every block that has been computed keeps a key, the
SHA-256 of its tokens chained with the key of the block before, so that equal keys mean equal texts from the beginning
on; token ids are compared as well. A new sequence takes over or shares the longest beginning that is still there, to
the token. Blocks that nobody holds stay until their room is needed, the least recently used going first.

Numbers only: the memory itself is `paged_cache`'s.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

ROOT = b""
"""The key before the first block."""
LOOK_AT = 32
"""Blocks compared for one that begins like the next: the newest of those with the same beginning."""


@dataclass
class BlockTable:
    """The blocks of one sequence, in order."""

    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    """Keys of the blocks that are full and computed."""
    reserved: tuple[int, int] = (0, 0)
    """Blocks that nobody else should begin in, if there is room elsewhere."""


@dataclass(frozen=True)
class _Cached:
    key: bytes | None
    """None: not full."""
    parent: bytes
    tokens: tuple[int, ...]


class BlockPool:
    """Hands out blocks.

    Args:
        num_blocks: how many there are.
        block_size: tokens of each.
        prefix_caching: whether to share equal beginnings.
        contiguous: lay the blocks of a sequence side by side as far as room allows, copying a shared beginning rather
            than pointing at it: on a CPU, attention then reads them as one tensor.

    Attributes:
        copies: (from, to) pairs of blocks whose contents must be copied before anything is written; the reader clears
            it.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_caching: bool = True, contiguous: bool = False
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.contiguous = contiguous
        self.copies: list[tuple[int, int]] = []
        self._holders = [0] * num_blocks
        self._blank = dict.fromkeys(reversed(range(num_blocks)))  # a set that keeps its order; the last goes first
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached and held by nobody, least recently used first
        self._cached: dict[int, _Cached] = {}
        self._by_key: dict[bytes, int] = {}
        self._children: dict[bytes, dict[int, None]] = {}
        self._tables: list[BlockTable] = []

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._blank) + len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def begin(self, ids: Sequence[int], room: int) -> tuple[BlockTable, int]:
        """A table for a sequence that begins with `ids`.

        Args:
            ids: its tokens so far. The last one is never taken from the cache: its logits are wanted.
            room: tokens that it may come to hold; a hint of where to put it.

        Returns:
            The table, and how many tokens its blocks hold already.
        """
        table = BlockTable()
        self._tables.append(table)
        found, keys, part, part_tokens = self._longest(ids[:-1]) if self.prefix_caching else ([], [], None, 0)
        for block in found:
            self._hold(block)
        if self.contiguous and not self._grows_in_place(found, part):
            moved = self._moved(found, part, max(self.blocks_for(room), len(found) + 1))
            for block in found:
                self._let_go(block)
            if moved is None:
                return table, 0
            table.blocks, table.reserved = moved
        else:
            table.blocks = found
            if part is not None and (taken := self._take_part(part)) is not None:
                table.blocks = [*found, taken]
            if self.contiguous and table.blocks:
                table.reserved = table.blocks[0], table.blocks[0] + self.blocks_for(room)
        table.keys = keys
        held = len(found) * self.block_size + (part_tokens if len(table.blocks) > len(found) else 0)
        return table, held

    def extend(self, table: BlockTable, tokens: int, room: int = 0) -> bool:
        """Have the table cover so many tokens; False, and nothing has changed, where there are too few free blocks."""
        more = self.blocks_for(tokens) - len(table.blocks)
        if more > self.free:
            return False
        for _ in range(more):
            table.blocks.append(self._next(table, max(self.blocks_for(room), more)))
        return True

    def commit(self, table: BlockTable, ids: Sequence[int], computed: int) -> None:
        """The first `computed` tokens of `ids` stand in the table's blocks: let others find the full ones."""
        size = self.block_size
        for index in range(len(table.keys), computed // size):
            parent = table.keys[-1] if table.keys else ROOT
            tokens = tuple(ids[index * size : (index + 1) * size])
            key = hashlib.sha256(parent + struct.pack(f"<{size}q", *tokens)).digest()
            table.keys.append(key)
            block = table.blocks[index]
            if self.prefix_caching and key not in self._by_key and block not in self._cached:
                self._remember(block, _Cached(key, parent, tokens))

    def release(self, table: BlockTable, ids: Sequence[int], computed: int) -> None:
        """The sequence gives its blocks back; what is computed stays to be found."""
        self.commit(table, ids, computed)
        full, rest = divmod(computed, self.block_size)
        if self.prefix_caching and rest and full < len(table.blocks) and table.blocks[full] not in self._cached:
            parent = table.keys[full - 1] if full else ROOT
            self._remember(table.blocks[full], _Cached(None, parent, tuple(ids[full * self.block_size : computed])))
        for block in reversed(table.blocks):  # the end of a text goes before its beginning
            self._let_go(block)
        self._tables = [other for other in self._tables if other is not table]
        table.blocks, table.keys = [], []

    def check(self) -> None:
        """Assert that every block is accounted for: for tests."""
        counts = [0] * self.num_blocks
        for table in self._tables:
            for block in table.blocks:
                counts[block] += 1
        assert counts == self._holders
        idle = {block for block in self._cached if not counts[block]}
        assert idle == set(self._idle)
        assert set(self._blank) == {block for block in range(self.num_blocks) if not counts[block]} - idle

    # --- finding

    def _longest(self, ids: Sequence[int]) -> tuple[list[int], list[bytes], int | None, int]:
        """Full blocks that hold the beginning of `ids`, their keys, and a block that begins like what follows."""
        blocks: list[int] = []
        keys: list[bytes] = []
        parent, size = ROOT, self.block_size
        for start in range(0, len(ids) - size + 1, size):
            tokens = tuple(ids[start : start + size])
            key = hashlib.sha256(parent + struct.pack(f"<{size}q", *tokens)).digest()
            block = self._by_key.get(key)
            if block is None or self._cached[block].tokens != tokens:
                break
            blocks.append(block)
            keys.append(key)
            parent = key
        wanted, best, most = ids[len(blocks) * size : (len(blocks) + 1) * size], None, 0
        for block in islice(reversed(self._children.get(parent, {})), LOOK_AT):
            pairs = zip(self._cached[block].tokens, wanted, strict=False)
            same = next((i for i, (held, want) in enumerate(pairs) if held != want), None)
            same = min(len(wanted), len(self._cached[block].tokens)) if same is None else same
            if same > most:
                best, most = block, same
        return blocks, keys, best, most

    def _remember(self, block: int, cached: _Cached) -> None:
        self._cached[block] = cached
        self._children.setdefault(cached.parent, {})[block] = None
        if cached.key is not None:
            self._by_key[cached.key] = block

    def _forget(self, block: int) -> None:
        cached = self._cached.pop(block)
        del self._children[cached.parent][block]
        if not self._children[cached.parent]:
            del self._children[cached.parent]
        if cached.key is not None and self._by_key.get(cached.key) == block:
            del self._by_key[cached.key]

    # --- holding

    def _hold(self, block: int) -> None:
        if not self._holders[block]:
            self._idle.pop(block, None)
            self._blank.pop(block, None)
        self._holders[block] += 1

    def _let_go(self, block: int) -> None:
        self._holders[block] -= 1
        assert self._holders[block] >= 0
        if not self._holders[block]:
            (self._idle if block in self._cached else self._blank)[block] = None

    def _take(self, block: int) -> int:
        """A block that nobody holds, for new contents."""
        self._hold(block)
        if block in self._cached:
            self._forget(block)
        return block

    def _next(self, table: BlockTable, room: int) -> int:
        """The block to follow the table's last; there is a free one."""
        if self.contiguous:
            after = table.blocks[-1] + 1 if table.blocks else self._place(room)
            if not table.blocks:
                table.reserved = after, after + room
            if after < self.num_blocks and not self._holders[after]:
                return self._take(after)
        return self._take(next(reversed(self._blank)) if self._blank else next(iter(self._idle)))

    def _take_part(self, part: int) -> int | None:
        """A block with the contents of `part`, to write on: itself where nobody else wants it, or a copy."""
        if not self._holders[part] and (self.contiguous or self.free == 1):
            return self._take(part)
        if not self.free or (self.free == 1 and not self._holders[part]):
            return None
        self._hold(part)  # not to be chosen as its own copy
        copy = self._take(next(reversed(self._blank)) if self._blank else next(iter(self._idle)))
        self._let_go(part)
        self.copies.append((part, copy))
        return copy

    # --- side by side

    def _grows_in_place(self, found: list[int], part: int | None) -> bool:
        """Whether a table of these shared blocks would be one stretch, with free room behind it."""
        row = [*found, *([] if part is None else [part])]
        if not row:
            return True
        if any(b != a + 1 for a, b in pairwise(row)):
            return False
        behind = row[-1] + 1
        # The last block is held once by us if it is shared whole, not at all if it begins alike: more would grow too.
        alone = self._holders[row[-1]] == (1 if part is None else 0)
        return alone and behind < self.num_blocks and not self._holders[behind]

    def _moved(self, found: list[int], part: int | None, room: int) -> tuple[list[int], tuple[int, int]] | None:
        """Copies of shared blocks side by side, or None where there is no such room."""
        sources = [*found, *([] if part is None else [part])]
        if part is not None:
            self._hold(part)
        start = self._place(room)
        row = list(range(start, start + len(sources)))
        fits = row[-1] < self.num_blocks and not any(self._holders[block] for block in row)
        if fits:
            self.copies += zip(sources, [self._take(block) for block in row], strict=True)
        if part is not None:
            self._let_go(part)
        return (row, (start, start + room)) if fits else None

    def _place(self, room: int) -> int:
        """Where `room` blocks side by side are free: untouched ones if there are, or else where most are."""
        reserved = [table.reserved for table in self._tables]
        best, most = 0, -1
        for keep_idle, keep_reserved in ((True, True), (False, True), (False, False)):
            taken = [bool(holders) for holders in self._holders]
            if keep_idle:
                for block in self._idle:
                    taken[block] = True
            if keep_reserved:
                for low, high in reserved:
                    taken[low:high] = [True] * (min(high, self.num_blocks) - low)
            start = 0
            for block, is_taken in enumerate([*taken, True]):
                if is_taken:
                    if block - start >= room:
                        return start
                    if block - start > most:
                        best, most = start, block - start
                    start = block + 1
        return best
