"""The static cache against passing everything at once; case B22."""

import itertools

import pytest
import torch
from torch import Tensor

from llama_core import Llama, LlamaConfig
from llama_infer.static_cache import StaticKVCache

T0 = LlamaConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
)
CUTS = [(16,), (7, 9), (1,) * 16, (5, 1, 10), (15, 1)]


@pytest.fixture(scope="module")
def model() -> Llama:
    """T0 with weights of standard deviation 0.2: small ones hide errors because logits are almost flat."""
    model = Llama(T0).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0, 0.2, generator=generator)
    return model


def cache_for(rows: int, size: int = 16) -> StaticKVCache:
    return StaticKVCache(T0, rows, size, torch.float32)


def in_chunks(model: Llama, tokens: Tensor, cut: tuple[int, ...]) -> tuple[Tensor, StaticKVCache]:
    cache, parts, start = cache_for(len(tokens)), [], 0
    for width in cut:
        step = cache.append(width)
        hidden = model(tokens[:, start : start + width], step.positions, step)
        parts.append(model.logits(hidden))
        start += width
    return torch.cat(parts, dim=1), cache


# --- case B22: a second chunk of prompt against a filled cache uses the wrong mask


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("cut", CUTS)
def test_b22_every_cut_equals_the_whole(model: Llama, cut: tuple[int, ...], rows: int) -> None:
    tokens = torch.stack([torch.arange(1, 17), torch.arange(100, 116)])[:rows]
    logits, cache = in_chunks(model, tokens, cut)
    torch.testing.assert_close(logits, model.logits(model(tokens)), atol=1e-5, rtol=0)
    assert cache.lengths == [16] * rows


@pytest.mark.parametrize("cut", CUTS)
def test_b22_no_token_sees_its_future(model: Llama, cut: tuple[int, ...]) -> None:
    tokens = torch.arange(1, 17).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 15] = 99
    before, after = (in_chunks(model, ids, cut)[0] for ids in (tokens, changed))
    assert torch.equal(before[:, :15], after[:, :15])
    assert not torch.equal(before[:, 15], after[:, 15])


def test_b22_mask_of_the_second_chunk() -> None:
    cache = cache_for(1)
    cache.append(7)
    bias = cache.append(9).bias
    assert bias is not None
    assert bias.shape == (1, 1, 9, 16)
    assert [row.isfinite().nonzero().flatten().tolist() for row in bias[0, 0]] == [
        list(range(seen)) for seen in range(8, 17)
    ]


def test_b22_a_chunk_past_the_size_is_an_error_and_changes_nothing(model: Llama) -> None:
    cache = cache_for(1)
    cache.append(10)
    before = [block.clone() for block in cache.keys]
    with pytest.raises(ValueError, match="7 tokens after the 10 in the cache need 17 slots; it has 16"):
        cache.append(7)
    assert cache.lengths == [10]
    assert all(torch.equal(a, b) for a, b in zip(before, cache.keys, strict=True))


# --- rows of different lengths


def test_ragged_rows_equal_single_rows(model: Llama) -> None:
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [1]]
    then = [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
    cache = cache_for(3)
    for pad in (0, 11):
        padded = torch.tensor([row + [pad] * (7 - len(row)) for row in prompts])
        cache.truncate(0)
        step = cache.append(7, [len(row) for row in prompts])
        outs = [model(padded, step.positions, step)]
        assert cache.lengths == [3, 7, 1]
        # one token, and then two at once
        for part in (slice(0, 1), slice(1, 3)):
            tokens = torch.tensor([row[part] for row in then])
            step = cache.append(tokens.shape[1])
            outs.append(model(tokens, step.positions, step))
        for row, (prompt, more) in enumerate(zip(prompts, then, strict=True)):
            whole = model(torch.tensor([prompt + more]))[0]
            ours = torch.cat([outs[0][row, : len(prompt)], outs[1][row], outs[2][row]])
            torch.testing.assert_close(model.logits(ours), model.logits(whole), atol=1e-5, rtol=0)


def test_keep_drops_rows_and_the_rest_goes_on(model: Llama) -> None:
    prompts = [[5, 6, 7], [9, 8, 7, 6], [1], [2, 3]]
    cache = cache_for(4)
    step = cache.append(4, [len(row) for row in prompts])
    model(torch.tensor([row + [0] * (4 - len(row)) for row in prompts]), step.positions, step)
    cache.keep([1, 3])
    assert cache.lengths == [4, 2]
    step = cache.append(1)
    hidden = model(torch.tensor([[50], [60]]), step.positions, step)
    for row, ids in enumerate([[9, 8, 7, 6, 50], [2, 3, 60]]):
        torch.testing.assert_close(hidden[row, 0], model(torch.tensor([ids]))[0, -1], atol=1e-5, rtol=0)


def test_grow_keeps_what_is_there(model: Llama) -> None:
    tokens = torch.arange(1, 17).unsqueeze(0)
    cache = cache_for(1, size=10)
    step = cache.append(10)
    model(tokens[:, :10], step.positions, step)
    cache.grow(16)
    step = cache.append(6)
    hidden = model(tokens[:, 10:], step.positions, step)
    torch.testing.assert_close(hidden, model(tokens)[:, 10:], atol=1e-5, rtol=0)


def test_truncate_forgets_the_end(model: Llama) -> None:
    cache = cache_for(1)
    for ids in ([1, 2, 3, 4, 5], [6, 7]):
        step = cache.append(len(ids))
        hidden = model(torch.tensor([ids]), step.positions, step)
        cache.truncate(3)
    assert cache.lengths == [3]
    torch.testing.assert_close(hidden[0, -1], model(torch.tensor([[1, 2, 3, 6, 7]]))[0, -1], atol=1e-5, rtol=0)


def test_float64_agrees_to_rounding() -> None:
    model = Llama(T0).double().eval().requires_grad_(False)
    tokens = torch.arange(1, 17).unsqueeze(0)
    cache = StaticKVCache(T0, 1, 16, torch.float64)
    parts = []
    for start, end in itertools.pairwise([0, 6, 7, 16]):
        step = cache.append(end - start)
        parts.append(model(tokens[:, start:end], step.positions, step))
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), atol=1e-12, rtol=0)


@pytest.mark.parametrize("counts", [[1, 2, 3], [4, 1], [-1, 1]])
def test_bad_counts_are_errors(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="counts must be 2 numbers from 0 to the width 3"):
        cache_for(2).append(3, counts)


def test_empty_cache_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1 row and 1 slot, got rows=0, size=4"):
        cache_for(0, 4)
