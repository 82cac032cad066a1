from __future__ import annotations

import numpy as np
import pytest
import torch

from llama_train.batches import IGNORED, TrainingRows, held_out_batches

TOKENS = np.arange(1000, dtype=np.uint16)


def test_targets_are_the_next_tokens() -> None:
    batch = TrainingRows(TOKENS, 10, seed=0, bos_id=None).rows(0, 6)
    assert batch.tokens.shape == batch.targets.shape == (6, 10)
    assert batch.tokens.dtype == torch.int64
    assert torch.equal(batch.targets, batch.tokens + 1)
    assert torch.equal(batch.tokens, batch.tokens[:, :1] + torch.arange(10))
    assert batch.count == 60


def test_an_epoch_visits_every_row_once_and_the_next_in_another_order() -> None:
    rows = TrainingRows(TOKENS, 10, seed=0, bos_id=None)
    assert rows.rows_per_epoch == 99
    first = rows.rows(0, 99).tokens[:, 0]
    second = rows.rows(99, 99).tokens[:, 0]
    for starts in (first, second):
        assert sorted((starts // 10).tolist()) == list(range(99))
    assert first.tolist() != second.tolist()
    assert first[0] % 10 != second[0] % 10  # the cuts moved too (for this seed)


def test_a_row_depends_on_its_number_only() -> None:
    rows = TrainingRows(TOKENS, 10, seed=5, bos_id=None)
    across = rows.rows(90, 30).tokens  # over the end of an epoch
    fresh = TrainingRows(TOKENS, 10, seed=5, bos_id=None)
    for index in range(30):
        assert torch.equal(fresh.rows(90 + index, 1).tokens[0], across[index])
    other = TrainingRows(TOKENS, 10, seed=6, bos_id=None)
    assert not torch.equal(other.rows(90, 30).tokens, across)


def test_the_cut_of_a_step_into_micro_batches_does_not_change_its_rows() -> None:
    rows = TrainingRows(TOKENS, 10, seed=0, bos_id=None)
    (whole,) = rows.micro_batches(3, size=4, count=1)
    parts = rows.micro_batches(3, size=1, count=4)
    assert torch.equal(whole.tokens, torch.cat([part.tokens for part in parts]))
    assert not torch.equal(whole.tokens, rows.micro_batches(2, 4, 1)[0].tokens)


def test_the_processes_of_a_step_have_its_rows_between_them() -> None:
    rows = TrainingRows(TOKENS, 10, seed=0, bos_id=None)
    (whole,) = rows.micro_batches(3, size=8, count=1)
    parts = [batch for part in range(4) for batch in rows.micro_batches(3, size=1, count=2, part=part, parts=4)]
    assert torch.equal(whole.tokens, torch.cat([part.tokens for part in parts]))


def test_the_start_of_a_document_is_no_target() -> None:
    tokens = TOKENS.copy()
    tokens[::7] = 0
    batch = TrainingRows(tokens, 20, seed=0, bos_id=0).rows(0, 10)
    assert IGNORED in batch.targets
    assert 0 not in batch.targets
    assert batch.count == int((batch.targets >= 0).sum()) < 200


def test_a_masked_target_is_still_an_input() -> None:
    tokens = TOKENS.copy()
    tokens[::7] = 0
    for rows in (1, 3):  # a single row's inputs and targets once shared memory
        assert (TrainingRows(tokens, 20, seed=0, bos_id=0).rows(0, rows).tokens >= 0).all()


def test_too_few_tokens() -> None:
    with pytest.raises(ValueError, match="sequence_length is 501; the 1000 training tokens allow at most 500"):
        TrainingRows(TOKENS, 501, seed=0, bos_id=None)
    rows = TrainingRows(TOKENS, 500, seed=0, bos_id=None)
    assert rows.rows(0, 3).tokens.shape == (3, 500)


@pytest.mark.parametrize("length", [1, 2, 9, 10, 11, 21, 25])
def test_held_out_counts_every_target_once(length: int) -> None:
    batches = list(held_out_batches(TOKENS[:length], 10, rows=2, bos_id=None))
    seen = torch.cat([batch.targets.flatten() for batch in batches]) if batches else torch.empty(0)
    assert seen.tolist() == list(range(1, length))
    assert all(torch.equal(batch.targets, batch.tokens + 1) for batch in batches)


def test_held_out_limit_is_spread_over_the_text() -> None:
    starts = [int(b.tokens[0, 0]) for b in held_out_batches(TOKENS, 10, rows=1, bos_id=None, max_tokens=40)]
    assert starts == [0, 250, 500, 750]
    everything = list(held_out_batches(TOKENS, 10, rows=8, bos_id=None, max_tokens=10**9))
    assert sum(batch.count for batch in everything) == 999
