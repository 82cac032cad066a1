"""The paged cache against passing everything at once, by every attention that reads it; case B22."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llama_core import Llama, LlamaConfig
from llama_infer.paged_cache import PagedKVCache, PagedStep, PlainStep, Span, block_bytes, rows_by_backend, sdpa_rows

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
BLOCKS = {
    "side by side": [[0, 1, 2, 3], [6, 7, 8, 9]],
    "side by side, the second before": [[6, 7, 8, 9], [0, 1, 2, 3]],
    "anywhere": [[5, 0, 9, 2], [3, 1, 4, 8]],
}
WAYS = {"sdpa": sdpa_rows, "plain": rows_by_backend("plain"), "flash": rows_by_backend("flash"), "paged": None}
Step = PlainStep | PagedStep


@pytest.fixture(scope="module")
def model() -> Llama:
    """T0 with weights of standard deviation 0.2: small ones hide errors because logits are almost flat."""
    model = Llama(T0).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0, 0.2, generator=generator)
    return model


def step_for(cache: PagedKVCache, spans: list[Span], way: str) -> Step:
    attend_rows = WAYS[way]
    if attend_rows is not None:
        return PlainStep(cache, spans, attend_rows)
    size = cache.block_size
    slots = [
        span.blocks[at // size] * size + at % size
        for span in spans
        for at in range(span.start, span.start + span.count)
    ]
    lengths = torch.tensor([span.start + span.count for span in spans], dtype=torch.int32)
    bounds = torch.tensor([0, *(span.count for span in spans)]).cumsum(0).int()
    decode = all(span.count == 1 for span in spans)
    tables = torch.tensor([span.blocks for span in spans], dtype=torch.int32)
    return PagedStep(
        cache, torch.tensor(slots).int(), tables, lengths, None if decode else bounds,
        max(span.count for span in spans), int(lengths.max()),
    )  # fmt: skip


def in_chunks(model: Llama, tokens: Tensor, cut: tuple[int, ...], blocks: list[list[int]], way: str) -> Tensor:
    cache = PagedKVCache(T0, 10, 4, torch.float32)
    cache.memory.fill_(float("nan"))  # what is read must have been written
    parts, start = [], 0
    for width in cut:
        step = step_for(cache, [Span(row, start, width) for row in blocks[: len(tokens)]], way)
        positions = torch.arange(start, start + width).repeat(len(tokens))
        hidden = model(tokens[:, start : start + width].reshape(1, -1), positions.unsqueeze(0), step)
        parts.append(model.logits(hidden[0]).unflatten(0, (len(tokens), width)))
        start += width
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", BLOCKS)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_b22_every_cut_equals_the_whole(model: Llama, cut: tuple[int, ...], rows: int, place: str, way: str) -> None:
    tokens = torch.stack([torch.arange(1, 17), torch.arange(100, 116)])[:rows]
    logits = in_chunks(model, tokens, cut, BLOCKS[place], way)
    torch.testing.assert_close(logits, model.logits(model(tokens)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_b22_no_token_sees_its_future(model: Llama, cut: tuple[int, ...], way: str) -> None:
    tokens = torch.arange(1, 17).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 15] = 99
    before, after = (in_chunks(model, ids, cut, BLOCKS["anywhere"], way) for ids in (tokens, changed))
    assert torch.equal(before[:, :15], after[:, :15])
    assert not torch.equal(before[:, 15], after[:, 15])


@pytest.mark.parametrize("way", WAYS)
def test_prompts_parts_and_single_tokens_in_one_pass(model: Llama, way: str) -> None:
    texts = [torch.arange(1, 14), torch.arange(40, 51), torch.arange(90, 95)]
    blocks = [[9, 1, 6, 3], [2, 0, 4], [7, 8]]
    before = [12, 4, 0]
    cache = PagedKVCache(T0, 10, 4, torch.float32)
    for text, row, held in zip(texts, blocks, before, strict=True):
        if held:
            step = step_for(cache, [Span(row, 0, held)], "sdpa")
            model(text[:held].unsqueeze(0), torch.arange(held).unsqueeze(0), step)
    wide = [row + [0] * (4 - len(row)) for row in blocks]
    spans = [Span(row, held, len(text) - held) for row, held, text in zip(wide, before, texts, strict=True)]
    step = step_for(cache, spans, way)
    tokens = torch.cat([text[held:] for text, held in zip(texts, before, strict=True)])
    positions = torch.cat([torch.arange(held, len(text)) for text, held in zip(texts, before, strict=True)])
    hidden = model(tokens.unsqueeze(0), positions.unsqueeze(0), step)[0]
    whole = [model(text.unsqueeze(0))[0, held:] for text, held in zip(texts, before, strict=True)]
    torch.testing.assert_close(hidden, torch.cat(whole), atol=1e-5, rtol=0)


def test_sequences_at_equal_distances_are_one_call(model: Llama) -> None:
    cache = PagedKVCache(T0, 16, 4, torch.float32)
    spans = [Span([at, at + 1], 5, 1) for at in (0, 3, 6, 12)]
    step = PlainStep(cache, spans)
    assert [part.sequences for part in step.parts] == [3, 1]


def test_copies_read_before_they_write() -> None:
    cache = PagedKVCache(T0, 3, 4, torch.float32)
    for block in range(3):
        cache.memory[:, :, block] = block
    cache.copy([(0, 1), (1, 2)])
    assert cache.memory[0, 0, :, 0, 0, 0].tolist() == [0.0, 0.0, 1.0]


def test_bytes_of_a_block() -> None:
    cache = PagedKVCache(T0, 3, 4, torch.bfloat16)
    assert block_bytes(T0, 4, torch.bfloat16) * 3 == cache.memory.nbytes
