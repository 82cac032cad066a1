"""Three ways to compute attention give one result, and their counts are those of the formulas."""

from __future__ import annotations

import pytest
import torch

from llama_core import preset
from llama_infer.heads_bench import BATCHED, LOOP, ONE, Weights, batched, bench_heads, count, loop, one_head

CPU = torch.device("cpu")


def weights(heads: int, kv_heads: int, width: int, hidden: int, device: str = "cpu") -> Weights:
    generator = torch.Generator().manual_seed(heads + kv_heads)

    def normal(*sizes: int) -> torch.Tensor:
        if device == "meta":
            return torch.empty(sizes, device="meta")
        return torch.randn(sizes, generator=generator, dtype=torch.float64) / hidden**0.5

    q, o = normal(heads * width, hidden), normal(hidden, heads * width)
    return Weights(q, normal(kv_heads * width, hidden), normal(kv_heads * width, hidden), o, width)


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_ways_are_equal(kv_heads: int) -> None:
    some = weights(6, kv_heads, 4, 20)
    x = torch.randn(7, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    heads = sum((one_head(x, some, head) for head in range(6)), torch.zeros_like(x))
    # The loop's scores pass float32 on their way through softmax, as they do in half precision.
    torch.testing.assert_close(loop(x, some), heads, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(batched(x, some), heads, rtol=1e-5, atol=1e-6)


def test_llama_3_8b_saves_three_quarters_of_the_cache() -> None:
    full, grouped, single = (weights(32, kv, 128, 4096, "meta") for kv in (32, 8, 1))
    rows = [count(BATCHED, some, tokens=100, tp=4, seconds=0.0) for some in (full, grouped, single)]
    assert [row.cache_bytes for row in rows] == [2 * 100 * kv * 128 * 4 for kv in (32, 8, 1)]
    assert 1 - rows[1].cache_bytes / rows[0].cache_bytes == 0.75
    assert [row.weight_bytes for row in rows] == [4 * 4096 * 128 * (64 + 2 * kv) for kv in (32, 8, 1)]
    # A rank holds at least one whole head, so a single one is on every rank.
    assert [row.rank_cache_bytes for row in rows] == [2 * 100 * kv * 128 * 4 for kv in (8, 2, 1)]
    # A ring's all-reduce sends 2 (n-1)/n of the output, whatever the heads.
    assert {row.sent_bytes for row in rows} == {2 * 3 * 100 * 4096 * 4 // 4}
    one = count(ONE, grouped, tokens=100, tp=4, seconds=0.0)
    assert one.flops == 2 * 100 * 4 * 128 * 4096 + 100 * 100 * (4 * 128 + 5)
    assert (one.weight_bytes, one.sent_bytes) == (4 * 4 * 128 * 4096, 0)
    assert count(LOOP, full, tokens=100, tp=4, seconds=0.0).flops == 32 * one.flops


def test_rows_are_full_grouped_and_single() -> None:
    config = preset("tiny").replace(num_attention_heads=8, num_key_value_heads=2, head_dim=4)
    rows = bench_heads(config, tokens=3, tp=2, dtype=torch.float32, device=CPU, repeats=1)
    ways = [(row.way, row.kv_heads) for row in rows]
    assert ways == [(ONE, 1), (LOOP, 8), (BATCHED, 8), (LOOP, 2), (BATCHED, 2), (LOOP, 1), (BATCHED, 1)]
    assert all(row.seconds > 0 for row in rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, "tokens is 0; it must be at least 1"),
        ({"tp": 0}, "tp is 0"),
        ({"tp": 3}, "tp is 3; 4 heads do not divide over it"),
    ],
)
def test_wrong_sizes(changes: dict[str, int], message: str) -> None:
    sizes = {"tokens": 2, "tp": 1, **changes}
    with pytest.raises(ValueError, match=message):
        bench_heads(preset("tiny"), dtype=torch.float32, device=CPU, **sizes)
