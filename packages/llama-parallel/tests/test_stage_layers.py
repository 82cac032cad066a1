import pytest

from llama_core import LlamaConfig, preset
from llama_parallel.stage_layers import balance_layers, stage_layers

SMALL = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=5, num_attention_heads=4, vocab_size=128)


def slowest(config: LlamaConfig, layers: tuple[int, ...]) -> float:
    """In layers; the head multiplies V · E, the embedding is a fiftieth of it."""
    per_layer = config.hidden_size * (2 * config.num_attention_heads + 2 * config.kv_heads) * config.head_width
    per_layer += 3 * config.hidden_size * config.intermediate_size
    head = config.vocab_size * config.hidden_size / per_layer
    extra = [head / 50, *[0.0] * (len(layers) - 2), head]
    return max(count + more for count, more in zip(layers, extra, strict=True))


@pytest.mark.parametrize(("name", "stages"), [("llama-3-8b", 2), ("llama-3-8b", 4), ("llama-3-70b", 8)])
def test_no_other_split_is_faster(name: str, stages: int) -> None:
    config = preset(name)
    layers = balance_layers(config, stages)
    assert sum(layers) == config.num_hidden_layers
    best = slowest(config, layers)
    for giver in range(stages):
        for taker in range(stages):
            moved = list(layers)
            moved[giver] -= 1
            moved[taker] += 1
            assert slowest(config, tuple(moved)) >= best


def test_the_head_is_worth_layers() -> None:
    assert balance_layers(preset("llama-3-8b"), 4) == (8, 9, 9, 6)  # a head of 525 million weights, layers of 218
    assert balance_layers(SMALL.replace(vocab_size=100_000), 2) == (4, 1)


def test_stages_follow_each_other() -> None:
    assert stage_layers(SMALL, 2, (1, 4)) == (range(1), range(1, 5))
    found = [layer for stage in stage_layers(preset("llama-3-70b"), 16) for layer in stage]
    assert found == list(range(80))


@pytest.mark.parametrize("layers", [(5,), (2, 2), (5, 0), (3, 2.0), (6, -1)])
def test_layers_that_do_not_add_up(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"layers_per_stage = .*: 2 numbers of at least 1 are wanted, 5 together"):
        stage_layers(SMALL, 2, layers)


def test_fewer_layers_than_stages() -> None:
    with pytest.raises(ValueError, match="5 layers are fewer than 6 pipeline stages"):
        stage_layers(SMALL, 6)
