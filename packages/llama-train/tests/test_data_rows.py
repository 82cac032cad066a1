"""Packing, masks, mixtures: which tokens a row holds, and that it depends on its number alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from llama_core import Llama, positions_from_documents
from llama_train.batches import Batch
from llama_train.data.best_fit import best_fit
from llama_train.data.mixture import BLOCK, Mixture, _batch, set_batches
from llama_train.data.rows import IGNORED, CutRows, PackedRows, cut_row
from llama_train.data.shard import read_shard, write_shard
from llama_train.data.token_set import TokenSet
from llama_train.forward import forward
from llama_train.step import accumulate_gradients


@pytest.fixture
def tokens(tmp_path: Path) -> Callable[..., TokenSet]:
    """`tokens(lengths, per_shard)`: documents of those lengths whose ids are 0, 1, 2, … through all of them."""

    def make(lengths: list[int], per_shard: int = 4, counted: list[bool] | None = None, name: str = "s") -> TokenSet:
        shards, at = [], 0
        for number in range(0, len(lengths), per_shard):
            part = lengths[number : number + per_shard]
            ids = np.arange(at, at + sum(part))
            mask = None if counted is None else np.array(counted[at : at + sum(part)])
            path = tmp_path / f"{name}-{number}"
            write_shard(path, ids, np.cumsum(part), np.array(part), mask, vocab_size=60_000, tokenizer="t")
            shards.append(read_shard(path))
            at += sum(part)
        return TokenSet(name, shards)

    return make


def random_lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    return [Random(seed + n).randint(1, longest) for n in range(count)]


def naive_best_fit(lengths: list[int], capacity: int) -> int:
    """The formula: the longest first, each into the bin with the least space that is enough."""
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [space for space in spaces if space >= length]
        if fits:
            spaces.remove(min(fits))
            spaces.append(min(fits) - length)
        else:
            spaces.append(capacity - length)
    return len(spaces)


@pytest.mark.parametrize(("count", "longest", "capacity"), [(1, 1, 1), (50, 3, 7), (300, 40, 40), (400, 60, 64)])
def test_best_fit_is_that_of_the_formula(count: int, longest: int, capacity: int) -> None:
    for seed in range(5):
        lengths = random_lengths(count, longest, 1000 * seed)
        bins = best_fit(np.array(lengths), capacity)
        filled = np.bincount(bins, weights=lengths)
        assert filled.max() <= capacity
        assert filled.min() > 0
        assert len(filled) == naive_best_fit(lengths, capacity)


def test_window_is_the_slice(tokens: Callable[..., TokenSet]) -> None:
    lengths = [3, 1, 5, 2, 4, 1, 1]
    whole = tokens(lengths, per_shard=2)
    numbers = np.repeat(np.arange(len(lengths)), lengths)
    for start in range(len(whole)):
        for stop in range(start + 1, len(whole) + 1):
            window = whole.window(start, stop)
            assert window.ids.tolist() == list(range(start, stop))
            assert window.documents.tolist() == numbers[start:stop].tolist()
    part = TokenSet("part", whole.shards, np.array([0, 2, 6]))
    assert part.window(2, 9).ids.tolist() == [2, 4, 5, 6, 7, 8, 16]


def test_packing_loses_no_token_and_cuts_no_document_that_fits(tokens: Callable[..., TokenSet]) -> None:
    lengths = random_lengths(200, 40)
    rows = PackedRows(tokens(lengths), 16, seed=0)
    starts = set(np.cumsum([0, *lengths[:-1]]).tolist())
    found: Counter[int] = Counter()
    for number in range(rows.rows_per_epoch):
        row = rows.row(number)
        real = row.targets != IGNORED
        assert (row.targets[real] == row.tokens[real] + 1).all()
        found.update(row.targets[real].tolist())
        for document in np.unique(row.documents[real]):
            ids = row.tokens[row.documents == document]
            assert (np.diff(ids) == 1).all()
    assert found == Counter(token for token in range(sum(lengths)) if token not in starts)
    assert rows.fullness > 0.95
    again = [rows.row(rows.rows_per_epoch + number).tokens.tolist() for number in range(rows.rows_per_epoch)]
    first = [rows.row(number).tokens.tolist() for number in range(rows.rows_per_epoch)]
    assert sorted(again) == sorted(first)
    assert again != first


def test_an_epoch_of_cut_rows_leaves_out_less_than_two(tokens: Callable[..., TokenSet]) -> None:
    whole = tokens(random_lengths(60, 30))
    rows = CutRows(whole, 16, seed=3)
    seen = np.concatenate([rows.row(number).tokens for number in range(rows.rows_per_epoch)])
    assert len(set(seen.tolist())) == len(seen) > len(whole) - 32
    with pytest.raises(ValueError, match="shorten it or add text"):
        CutRows(whole, len(whole), seed=3)
    with pytest.raises(ValueError, match="shorten it or add text"):
        PackedRows(whole, len(whole), seed=3)


def test_prompts_are_no_targets_and_parts_without_any_are_left_out(tokens: Callable[..., TokenSet]) -> None:
    """B30 (5): chats of 20 tokens of prompt and 4 of answer in rows of 8: no row is without a target."""
    counted = ([False] * 20 + [True] * 4) * 6
    masked = tokens([24] * 6, counted=counted)
    rows = PackedRows(masked, 8, seed=0)
    found: list[int] = []
    for number in range(rows.rows_per_epoch):
        targets = rows.row(number).targets
        assert (targets != IGNORED).any()
        found += targets[targets != IGNORED].tolist()
    assert sorted(found) == [token for token, counts in enumerate(counted) if counts]
    assert rows.left_out == 6 * 2
    assert masked.is_masked
    (batch,) = set_batches(masked, 144, 1, mask_documents=True)
    assert batch.count == 24
    with pytest.raises(ValueError, match="0 places with something to learn"):
        PackedRows(tokens([24], counted=[False] * 24, name="none"), 8, seed=0)


@pytest.mark.parametrize("packing", [CutRows, PackedRows])
def test_the_same_samples_for_any_number_of_ranks_and_after_a_resume(
    packing: type[CutRows], tokens: Callable[..., TokenSet]
) -> None:
    lengths = random_lengths(120, 30)

    def mixture(seed: int = 0) -> Mixture:
        sources = [packing(tokens(lengths, name=name), 16, seed=index) for index, name in enumerate("ab")]
        return Mixture(sources, [3, 1], seed, mask_documents=True)

    def step(rows: Mixture, number: int, parts: int, size: int) -> torch.Tensor:
        count = 8 // parts // size
        batches = [b for part in range(parts) for b in rows.micro_batches(number, size, count, part, parts)]
        return torch.cat([torch.stack([b.tokens, b.targets, b.documents]) for b in batches], dim=1)  # type: ignore[list-item]

    rows = mixture()
    for number in (1, 2, 7, 300):  # epochs later, too
        whole = step(rows, number, 1, 8)
        for parts, size in ((1, 2), (2, 4), (4, 1), (8, 1)):
            assert torch.equal(step(mixture(), number, parts, size), whole)
    assert not torch.equal(step(mixture(1), 1, 1, 8), step(rows, 1, 1, 8))


def test_weights_are_honoured(tokens: Callable[..., TokenSet]) -> None:
    """At the end of a block every source has its share to within one row of all blocks together; every row of a source
    comes in turn, whatever the block."""
    weights = [0.5, 0.3, 0.1993, 0.0007 + 0.0005]
    sources = [CutRows(tokens([100], name=f"s{index}"), 10, seed=index) for index in range(4)]
    mixture = Mixture(sources, weights, 0, mask_documents=False)
    counts, taken = np.zeros(4), [list[int]() for _ in range(4)]
    for number in range(5 * BLOCK):
        source, place = mixture.place(number)
        counts[source] += 1
        taken[source].append(place)
        if (number + 1) % BLOCK == 0:
            assert (np.abs(counts - (number + 1) * np.array(weights) / sum(weights)) <= 1).all()
    for places in taken:
        assert sorted(places) == list(range(len(places)))
    with pytest.raises(ValueError, match=r"the weight of s1 is 0.0001; at least 1/1024"):
        Mixture(sources[:2], [1, 0.0001], 0, mask_documents=False)


def test_case_b29_packed_documents_do_not_see_each_other(
    t0: Callable[..., Llama], tokens: Callable[..., TokenSet]
) -> None:
    """axolotl#1375: rows of 5 + 7 + 4 and 9 + 7 tokens; positions, logits and targets are those of lone documents."""
    packed = tokens([5, 7, 4, 9, 7, 1])
    batch = _batch([cut_row(packed, 0, 16), cut_row(packed, 16, 16)], mask_documents=True)
    assert batch.documents is not None
    positions = positions_from_documents(batch.documents)
    assert positions[0].tolist() == [*range(5), *range(7), *range(4)]
    assert positions[1].tolist() == [*range(9), *range(7)]
    assert batch.count == 27
    model = t0()
    hidden = forward(model, batch)
    total = 0.0
    for row, start, length in ((0, 0, 5), (0, 5, 7), (0, 12, 4), (1, 0, 9), (1, 9, 7)):
        alone = batch.tokens[row : row + 1, start : start + length]
        logits = model.logits(model(alone))
        assert torch.allclose(model.logits(hidden)[row, start : start + length], logits[0], atol=1e-5)
        total += torch.nn.functional.cross_entropy(logits[0, :-1], alone[0, 1:], reduction="sum").item()
    loss, count = accumulate_gradients(model, [batch])
    assert count == 27
    assert float(loss) == pytest.approx(total / 27, abs=1e-5)
    changed = batch.tokens.clone()
    changed[0, :5] = 99
    other = forward(model, Batch(changed, batch.targets, batch.documents))
    assert (model.logits(other) - model.logits(hidden))[0, 5:].abs().max() <= 1e-6
    swapped = forward(model, Batch(batch.tokens.flip(0), batch.targets, batch.documents.flip(0)))
    assert torch.allclose(swapped.flip(0), hidden, atol=1e-6)


def test_case_b25_masked_rows_weigh_by_their_tokens(t0: Callable[..., Llama], tokens: Callable[..., TokenSet]) -> None:
    """transformers#34191: rows with 2, 5, 11 and 7 labels, as 4 × 1, 2 × 2 and 1 × 4."""
    labels = [2, 5, 11, 7]
    counted = [place >= 13 - count for count in labels for place in range(13)]
    rows = PackedRows(tokens([13] * 4, counted=counted), 12, seed=0)
    results = []
    for size in (1, 2, 4):
        model = t0()
        batches = Mixture([rows], [1], 0, mask_documents=True).micro_batches(1, size, 4 // size)
        loss, count = accumulate_gradients(model, batches)
        assert count == 25
        results.append((float(loss), [parameter.grad for parameter in model.parameters()]))
    for loss, gradients in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=1e-5)
        for one, other in zip(gradients, results[0][1]):
            assert torch.allclose(one, other, atol=1e-6)  # type: ignore[arg-type]


def test_held_out_documents_are_measured_once(tokens: Callable[..., TokenSet]) -> None:
    whole = tokens([5, 1, 30, 4])
    batches = list(set_batches(whole, 16, 2, mask_documents=True))
    targets = torch.cat([batch.targets.flatten() for batch in batches])
    assert sorted(targets[targets != IGNORED].tolist()) == [t for t in range(40) if t not in (0, 5, 6, 36)]
    assert sum(batch.tokens.shape[0] for batch in set_batches(whole, 4, 2, True, max_tokens=9)) == 2
