"""Who holds which blocks: sharing to the token, what goes first, and nothing taken on the word of a hash alone."""

from __future__ import annotations

import pytest

from llama_infer.block_pool import BlockPool, BlockTable


def fill(pool: BlockPool, ids: list[int]) -> BlockTable:
    """A sequence that has been computed to its end."""
    table, held = pool.begin(ids, len(ids))
    assert pool.extend(table, len(ids), len(ids))
    pool.copies.clear()
    pool.commit(table, ids, len(ids))
    assert held < len(ids)
    return table


def test_equal_beginnings_are_shared_and_counted() -> None:
    pool = BlockPool(8, 4)
    first = fill(pool, list(range(10)))
    second, held = pool.begin([*range(8), 50, 51], 10)
    assert held == 8
    assert second.blocks == first.blocks[:2]
    pool.check()
    pool.release(first, list(range(10)), 10)
    assert pool.free == 6  # the shared two are still held
    pool.release(second, [*range(8), 50, 51], 8)
    assert pool.free == 8
    pool.check()


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    pool = BlockPool(8, 4)
    pool.release(fill(pool, list(range(8))), list(range(8)), 8)
    _, held = pool.begin(list(range(8)), 8)
    assert held == 7


def test_a_beginning_behind_another_beginning_is_another_text() -> None:
    pool = BlockPool(8, 4)
    pool.release(fill(pool, [1, 2, 3, 4, 5, 6, 7, 8]), [1, 2, 3, 4, 5, 6, 7, 8], 8)
    _, held = pool.begin([9, 9, 9, 9, 5, 6, 7, 8, 1], 9)
    assert held == 0


def test_equal_keys_of_other_tokens_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Collision:
        def __init__(self, _: bytes) -> None: ...
        def digest(self) -> bytes:
            return b"the same for all"

    monkeypatch.setattr("llama_infer.block_pool.hashlib.sha256", Collision)
    pool = BlockPool(8, 4)
    pool.release(fill(pool, [1, 2, 3, 4, 5]), [1, 2, 3, 4, 5], 5)
    _, held = pool.begin([6, 7, 8, 9, 5, 1], 6)
    assert held == 0


def test_the_least_recently_used_goes_first_and_of_a_text_its_end() -> None:
    pool = BlockPool(4, 4)
    old, new = list(range(8)), list(range(20, 28))
    for ids in (old, new):
        pool.release(fill(pool, ids), ids, 8)
    table, _ = pool.begin([90], 4)
    assert pool.extend(table, 1)
    assert pool.begin([*old, 0], 9)[1] == 4  # the second block of the older text has gone


def test_a_block_that_somebody_writes_on_is_copied() -> None:
    pool = BlockPool(8, 4)
    first = fill(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    second, held = pool.begin([1, 2, 3, 4, 5, 6, 0, 0], 8)
    assert held == 6
    assert pool.copies == [(first.blocks[1], second.blocks[1])]
    pool.check()


def test_nothing_changes_where_there_is_no_room() -> None:
    pool = BlockPool(2, 4)
    table, _ = pool.begin([1], 4)
    assert not pool.extend(table, 9)
    assert table.blocks == []
    assert pool.free == 2


def test_without_caching_nothing_is_found() -> None:
    pool = BlockPool(8, 4, prefix_caching=False)
    pool.release(fill(pool, list(range(8))), list(range(8)), 8)
    assert pool.begin(list(range(9)), 9)[1] == 0


def test_sequences_lie_side_by_side_with_room_to_grow() -> None:
    pool = BlockPool(32, 4, contiguous=True)
    tables = []
    for _ in range(3):
        table, _ = pool.begin([7], 20)
        assert pool.extend(table, 1, 20)
        tables.append(table)
    assert [table.blocks for table in tables] == [[0], [5], [10]]
    for table in tables:
        assert pool.extend(table, 20)
    assert [table.blocks for table in tables] == [list(range(5)), list(range(5, 10)), list(range(10, 15))]


def test_a_shared_beginning_is_copied_to_lie_side_by_side() -> None:
    pool = BlockPool(32, 4, contiguous=True)
    first = fill(pool, list(range(8)))
    second, held = pool.begin([*range(8), 9, 9], 10)
    assert held == 8
    assert second.blocks[1] == second.blocks[0] + 1
    assert pool.copies == list(zip(first.blocks, second.blocks, strict=True))
    pool.check()


def test_a_text_that_nobody_holds_is_continued_where_it_lies() -> None:
    pool = BlockPool(32, 4, contiguous=True)
    first = fill(pool, list(range(10)))
    blocks = list(first.blocks)
    pool.release(first, list(range(10)), 10)
    second, held = pool.begin([*range(10), 77], 16)
    assert held == 10
    assert second.blocks == blocks
    assert pool.copies == []
    pool.check()
