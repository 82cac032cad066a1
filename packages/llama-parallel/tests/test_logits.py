from functools import partial

import pytest
import torch
from torch import Tensor

from llama_core import Llama, LlamaConfig, generate_naive, init_weights
from llama_parallel import ParallelConfig, ParallelPlan, build_mesh, full_logits, init_shards, parallelize
from llama_parallel.layout import describe
from llama_parallel.testing import run_ranks

T0 = LlamaConfig(
    vocab_size=131, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2,
)  # fmt: skip
TOKENS = torch.arange(14).view(2, 7)  # seven tokens divide over no two ranks


def plain() -> Llama:
    model = Llama(T0).double()
    init_weights(model, 3)
    return model


def on_rank(rank: int, layout: ParallelConfig, plan: ParallelPlan) -> tuple[Tensor, list[int]]:
    with torch.device("meta"):
        model = Llama(T0).double()
    parallel = parallelize(model, build_mesh(layout), plan)
    init_shards(model, 3, "cpu")
    with torch.no_grad():
        logits = full_logits(parallel, TOKENS)
    return logits, generate_naive(partial(full_logits, parallel), [1, 2, 3], max_new_tokens=4)


@pytest.mark.parametrize(
    ("layout", "plan"),
    [
        (ParallelConfig(), ParallelPlan()),
        (ParallelConfig(tp=4), ParallelPlan()),
        (ParallelConfig(tp=2), ParallelPlan(sequence_parallel=False)),
        (ParallelConfig(dp_shard=2, tp=2), ParallelPlan(activation_checkpointing="full")),
        (ParallelConfig(cp=2), ParallelPlan(context="ulysses")),
        (ParallelConfig(cp=2, tp=2), ParallelPlan()),
    ],
    ids=lambda value: describe(value) if isinstance(value, ParallelConfig) else None,
)
def test_logits_and_samples_are_those_of_one_process(layout: ParallelConfig, plan: ParallelPlan) -> None:
    model = plain()
    with torch.no_grad():
        wanted = model.logits(model(TOKENS))
    samples = generate_naive(lambda tokens: model.logits(model(tokens)), [1, 2, 3], max_new_tokens=4)
    for logits, ids in run_ranks(on_rank, layout.num_processes, layout, plan):
        torch.testing.assert_close(logits, wanted, rtol=1e-10, atol=1e-10)
        assert ids == samples
