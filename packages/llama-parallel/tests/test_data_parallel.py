"""FSDP2 as it is applied here: mixed precision, when it communicates, and that evaluation leaves nothing stale."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from llama_core import Llama, LlamaConfig, init_weights
from llama_parallel import (
    MicroBatch,
    Parallel,
    ParallelConfig,
    ParallelPlan,
    accumulate_gradients,
    build_mesh,
    init_shards,
    parallelize,
)
from llama_parallel.testing import run_ranks

T0 = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2,
)  # fmt: skip
TOKENS = torch.arange(16).view(2, 8)


def make(layout: ParallelConfig, plan: ParallelPlan | None = None) -> Parallel:
    with torch.device("meta"):
        model = Llama(T0)
    parallel = parallelize(model, build_mesh(layout), plan)
    init_shards(model, 0, "cpu")
    return parallel


def alone() -> Llama:
    model = Llama(T0)
    init_weights(model, 0)
    return model


class Sent(TorchDispatchMode):
    """Collectives that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        library, name = func.name().split(".")[0].split("::")
        if library in ("c10d", "_c10d_functional"):
            self.names[name] += 1
        return func(*args, **(kwargs or {}))

    def count(self, word: str) -> int:
        return sum(n for name, n in self.names.items() if word in name)


@pytest.mark.parametrize("layout", [ParallelConfig(), ParallelConfig(dp_shard=2), ParallelConfig(tp=2)], ids=str)
def test_mixed_precision(layout: ParallelConfig) -> None:
    """float32 at rest, bfloat16 in products, float32 where ranks sum; the angles of positions stay float32."""

    def work(rank: int) -> tuple[Any, ...]:
        seen: list[torch.dtype] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen.extend((q.dtype, v.dtype))
            return torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
            ).transpose(1, 2)

        parallel = make(layout, ParallelPlan(compute_dtype=torch.bfloat16, attend=attend))
        angles: list[torch.dtype] = []
        layer = parallel.model.model.layers[0]
        layer.register_forward_pre_hook(lambda module, args: angles.append(args[1].dtype))
        loss, _ = accumulate_gradients(parallel, [MicroBatch(TOKENS, TOKENS)])
        dtypes = {p.dtype for p in parallel.model.parameters()}
        grads = {p.grad.dtype for p in parallel.model.parameters() if p.grad is not None}
        whole = {n: p.grad.full_tensor() for n, p in parallel.model.named_parameters() if isinstance(p.grad, DTensor)}
        return float(loss), dtypes, grads, set(seen), set(angles), whole

    model = alone()
    assert model.lm_head is not None
    wanted = model.ops.linear_cross_entropy(model(TOKENS), model.lm_head.weight, TOKENS)
    wanted.backward()
    for loss, dtypes, grads, seen, angles, whole in run_ranks(work, layout.num_processes):
        assert dtypes == grads == angles == {torch.float32}
        assert seen == {torch.bfloat16}
        assert loss == pytest.approx(float(wanted.detach()), rel=0.02)  # bfloat16 keeps 8 bits
        for name, p in model.named_parameters():
            assert p.grad is not None
            # a smoke test: bfloat16's 2⁻⁹ for each of about ten roundings in a row
            assert float((whole[name] - p.grad).norm() / p.grad.norm()) < 0.05, name


def test_gathered_layer_by_layer_and_dropped_in_between() -> None:
    def work(rank: int) -> dict[str, tuple[int, int, int]]:
        counts = {}
        for name, reshard in (("drop", True), ("keep", False)):
            parallel = make(ParallelConfig(dp_shard=2), ParallelPlan(reshard_after_forward=reshard))
            assert parallel.model.lm_head is not None
            with Sent() as forward:
                hidden = parallel.model(TOKENS)
                loss = parallel.model.ops.linear_cross_entropy(hidden, parallel.model.lm_head.weight, TOKENS)
            with Sent() as backward:
                loss.backward()
            counts[name] = forward.count("allgather"), backward.count("allgather"), backward.count("reduce_scatter")
        return counts

    groups = T0.num_hidden_layers + 2  # and the embedding, and norm with head
    for counts in run_ranks(work, 2):
        # In backward, norm and head are still there; the embedding's own product needs no weight, FSDP cannot know.
        assert counts["drop"] == (groups, groups - 1, groups)
        assert counts["keep"] == (groups, 0, groups)


def test_accumulation_reduces_once() -> None:
    def work(rank: int) -> tuple[int, int]:
        parallel = make(ParallelConfig(dp_shard=2))
        with Sent() as one:
            accumulate_gradients(parallel, [MicroBatch(TOKENS, TOKENS)])
        with Sent() as four:
            accumulate_gradients(parallel, [MicroBatch(TOKENS, TOKENS)] * 4)
        return one.count("reduce_scatter"), four.count("reduce_scatter")

    groups = T0.num_hidden_layers + 2
    assert run_ranks(work, 2) == [(groups, groups)] * 2


def test_kept_parameters_are_gathered_once_a_step() -> None:
    """And anew in the next, whose weights are others."""

    def work(rank: int) -> tuple[int, int, list[float], bool]:
        parallel = make(ParallelConfig(dp_shard=2), ParallelPlan(reshard_after_forward=False))
        optimizer = torch.optim.SGD(parallel.model.parameters(), lr=0.5)
        losses = []
        with Sent() as sent:
            for _ in range(2):
                losses.append(float(accumulate_gradients(parallel, [MicroBatch(TOKENS, TOKENS)] * 3)[0]))
                optimizer.step()
                optimizer.zero_grad()
        sharded = all(isinstance(p, DTensor) for p in parallel.model.parameters())
        return sent.count("allgather"), sent.count("reduce_scatter"), losses, sharded

    model, wanted = alone(), []
    for _ in range(2):
        assert model.lm_head is not None
        loss = model.ops.linear_cross_entropy(model(TOKENS), model.lm_head.weight, TOKENS)
        loss.backward()
        wanted.append(float(loss.detach()))
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        model.zero_grad()
    groups = T0.num_hidden_layers + 2
    for gathered, reduced, losses, sharded in run_ranks(work, 2):
        assert (gathered, reduced) == (2 * groups, 2 * groups)
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert sharded


def test_evaluation_before_a_step_leaves_no_stale_head() -> None:
    """Without a backward pass, norm and head stay gathered; the next training step must not use them."""

    def work(rank: int) -> tuple[float, float]:
        parallel = make(ParallelConfig(dp_shard=2))
        model = parallel.model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        batch = [MicroBatch(TOKENS, TOKENS)]
        accumulate_gradients(parallel, batch)
        with torch.no_grad():
            model.logits(model(TOKENS))
        optimizer.step()
        after, _ = accumulate_gradients(parallel, batch)
        with torch.no_grad():
            assert model.lm_head is not None
            evaluated = model.ops.linear_cross_entropy(model(TOKENS), model.lm_head.weight, TOKENS)
        return float(after), float(evaluated)

    model = alone()
    assert model.lm_head is not None
    losses = []
    for _ in range(2):
        loss = model.ops.linear_cross_entropy(model(TOKENS), model.lm_head.weight, TOKENS)
        losses.append(float(loss.detach()))
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    for after, evaluated in run_ranks(work, 2):
        assert abs(losses[1] - losses[0]) > 0.1
        assert after == pytest.approx(losses[1], rel=1e-5)
        assert evaluated == pytest.approx(losses[1], rel=1e-5)
