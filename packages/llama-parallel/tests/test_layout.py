import re

import pytest
import torch.distributed as dist

from llama_core import LlamaConfig, preset
from llama_parallel import ParallelConfig, check_layout

T0 = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
)  # fmt: skip
NINE = T0.replace(num_attention_heads=9, num_key_value_heads=3, head_dim=8, hidden_size=72, intermediate_size=72)


def refused(
    layout: ParallelConfig, model: LlamaConfig = T0, length: int = 64, batch: int = 16, **options: object
) -> str:
    with pytest.raises(ValueError) as error:
        check_layout(layout, model, sequence_length=length, global_batch=batch, **options)  # type: ignore[arg-type]
    assert not dist.is_initialized()
    return str(error.value)


@pytest.mark.parametrize(
    "layout",
    [
        ParallelConfig(),
        ParallelConfig(tp=4),  # two key/value heads, each on two ranks
        ParallelConfig(pp=2, cp=2, tp=2, dp_shard=2),
        ParallelConfig(dp_replicate=4, dp_shard=4),
    ],
)
def test_layouts_that_work(layout: ParallelConfig) -> None:
    check_layout(layout, T0, sequence_length=64, global_batch=16)


def test_a_large_model_on_a_cluster() -> None:
    layout = ParallelConfig(dp_shard=16, tp=8, pp=4)
    check_layout(layout, preset("llama-3-70b"), sequence_length=8192, global_batch=512)


def test_uneven_layers_and_an_uneven_vocabulary_work() -> None:
    check_layout(ParallelConfig(pp=2), T0.replace(num_hidden_layers=3), sequence_length=64, global_batch=1)
    check_layout(ParallelConfig(tp=4), T0.replace(vocab_size=131), sequence_length=64, global_batch=1)


def test_nine_heads_over_two_ranks() -> None:
    text = refused(ParallelConfig(tp=2), NINE)
    assert "9 attention heads do not divide over tp 2" in text
    assert "layouts of 2 processes that work: " in text
    # What is advised does work.
    for advice in re.findall(r"((?:(?:dp_replicate|dp_shard|cp|tp|pp) \d+ ?)+)", text.split("that work: ")[1]):
        sizes = {name: int(size) for name, size in re.findall(r"(\w+) (\d+)", advice)}
        check_layout(ParallelConfig(**sizes), NINE, sequence_length=64, global_batch=16)


def test_smaller_layouts_where_none_of_the_size_works() -> None:
    text = refused(ParallelConfig(tp=5), batch=1, length=63)
    assert "smaller ones that work: " in text


@pytest.mark.parametrize(
    ("layout", "changes", "length", "batch", "message"),
    [
        (ParallelConfig(tp=4), {"num_key_value_heads": 4, "num_attention_heads": 12, "head_dim": 8}, 64, 16, None),
        (ParallelConfig(tp=6), {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8}, 66, 16,
         "tp 6 is neither a divisor nor a multiple of 4 key/value heads"),
        (ParallelConfig(tp=4), {"intermediate_size": 66}, 64, 16, "intermediate_size 66 does not divide over tp 4"),
        (ParallelConfig(tp=4), {"vocab_size": 5}, 64, 16, "vocab_size 5 leaves a rank of tp 4 without a row"),
        (ParallelConfig(cp=4), {}, 60, 16, "sequence length 60 does not divide into 8 pieces"),
        (ParallelConfig(tp=4, cp=2), {}, 20, 16, "the 10 tokens .* do not divide over tp 4"),
        (ParallelConfig(pp=3), {}, 64, 16, "2 layers are fewer than pp 3"),
        (ParallelConfig(dp_shard=2, dp_replicate=2), {}, 64, 6, "batch of 6 does not divide over 4 data-parallel"),
    ],
)  # fmt: skip
def test_reasons(layout: ParallelConfig, changes: dict[str, int], length: int, batch: int, message: str | None) -> None:
    model = T0.replace(**changes)
    if message is None:
        check_layout(layout, model, sequence_length=length, global_batch=batch)
    else:
        assert re.search(message, refused(layout, model, length, batch))


def test_all_reasons_are_named_at_once() -> None:
    text = refused(ParallelConfig(tp=3, pp=4), length=64, batch=16)
    assert "attention heads" in text
    assert "layers are fewer" in text


def test_ulysses_shares_heads_not_pairs_of_pieces() -> None:
    check_layout(ParallelConfig(cp=4), T0, sequence_length=60, global_batch=1, context="ulysses")
    assert "2 attention heads of a tensor-parallel rank do not divide over cp 4" in refused(
        ParallelConfig(cp=4, tp=2), context="ulysses"
    )


def test_without_sequence_parallelism_any_length_goes() -> None:
    check_layout(ParallelConfig(tp=2), T0, sequence_length=7, global_batch=1, sequence_parallel=False)
    assert "the 7 tokens" in refused(ParallelConfig(tp=2), length=7)


def test_pipelines_that_work() -> None:
    five = T0.replace(num_hidden_layers=5)
    check_layout(ParallelConfig(pp=2), five, sequence_length=64, global_batch=8, layers_per_stage=(1, 4))
    check_layout(ParallelConfig(pp=2), five, sequence_length=64, global_batch=8, schedule="interleaved_1f1b")
    check_layout(ParallelConfig(pp=4), five, sequence_length=64, global_batch=8, micro_batches=1)
    check_layout(
        ParallelConfig(pp=4), five, sequence_length=64, global_batch=8, micro_batches=10, schedule="zero_bubble"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers_per_stage": (2, 2)}, r"layers_per_stage = \(2, 2\): 2 numbers .*, 5 together"),
        ({"schedule": "interleaved_1f1b", "virtual_stages": 3}, "5 layers are fewer than pp 2 with 3 stages on each"),
        (
            {"schedule": "zero_bubble", "micro_batches": 5},
            "zero_bubble over pp 2 cannot run 5 micro-batches.*; 4 or 6 do",
        ),
        (
            {"schedule": "interleaved_1f1b", "micro_batches": 9},
            "9 micro-batches: they do not divide into 4 rounds; 8 or 10",
        ),
        ({"schedule": "1f1b", "virtual_stages": 2}, "virtual_stages = 2: 1f1b has one stage on each rank"),
        ({"schedule": "afab"}, "schedule = 'afab': must be one of"),
        ({"micro_batches": 0}, "micro_batches = 0: must be at least 1"),
    ],
)
def test_pipelines_that_do_not(options: dict[str, object], message: str) -> None:
    assert re.search(message, refused(ParallelConfig(pp=2), T0.replace(num_hidden_layers=5), **options))


def test_a_pipeline_that_does_not_fit_is_advised_of_smaller_ones() -> None:
    text = refused(ParallelConfig(pp=4), T0.replace(num_hidden_layers=5), schedule="interleaved_1f1b")
    assert "5 layers are fewer than pp 4 with 2 stages on each rank" in text
    assert "dp_shard 2 pp 2" in text


def test_nonsense_is_refused() -> None:
    assert "sequence_length = 0" in refused(ParallelConfig(), length=0)
    assert "global_batch = -1" in refused(ParallelConfig(), batch=-1)
    assert "context = 'spiral'" in refused(ParallelConfig(), context="spiral")
