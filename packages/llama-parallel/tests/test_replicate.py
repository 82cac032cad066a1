"""Bucketed, overlapped summing of gradients against one plain all-reduce per parameter after backward."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from llama_parallel.replicate import GradientBuckets, Replication, all_reduce_gradients
from llama_parallel.testing import run_ranks


class Branches(nn.Module):
    """Four layers, of which one may be left out, with a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.double()

    def forward(self, x: Tensor, skipped: int | None = None) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x if index == skipped else torch.tanh(layer(x))
        return x.square().sum()


def batch(rank: int, number: int = 0) -> Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * number + rank), dtype=torch.float64)


def oracle(rank: int, batches: int = 1, skipped: int | None = None) -> list[Tensor]:
    model = Branches()
    for number in range(batches):
        model(batch(rank, number), skipped).backward()
    all_reduce_gradients(model.parameters(), dist.group.WORLD)
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("bucket_bytes", [1, 600, 1 << 20])
@pytest.mark.parametrize("skipped", [None, 1])
def test_equals_the_oracle(bucket_bytes: int, skipped: int | None) -> None:
    def work(rank: int) -> tuple[int, list[Tensor], list[Tensor]]:
        model = Branches()
        buckets = GradientBuckets(model.parameters(), dist.group.WORLD, bucket_bytes)
        for _ in range(2):  # a second step starts afresh
            model.zero_grad()
            model(batch(rank), skipped).backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        return len(buckets.buckets), found, oracle(rank, skipped=skipped)

    results = run_ranks(work, 3)
    assert results[0][0] == {1: 7, 600: 3, 1 << 20: 1}[bucket_bytes]  # weight 512 bytes, bias 64
    for _, found, wanted in results:
        assert len(found) == len(wanted) == 7
        for grad, right, first in zip(found, wanted, results[0][1], strict=True):
            torch.testing.assert_close(grad, right, rtol=1e-14, atol=1e-14)
            assert torch.equal(grad, first)


def test_accumulation_sends_once() -> None:
    def work(rank: int) -> tuple[int, list[Tensor], list[Tensor]]:
        model = Branches()
        buckets = GradientBuckets(model.parameters(), dist.group.WORLD, 1 << 20)
        sent = 0
        send = buckets._send

        def count() -> None:
            nonlocal sent
            sent += 1
            send()

        buckets._send = count  # type: ignore[method-assign]
        for number in range(3):
            buckets.enabled = number == 2
            model(batch(rank, number)).backward()
        return sent, [p.grad for p in model.parameters() if p.grad is not None], oracle(rank, batches=3)

    for sent, found, wanted in run_ranks(work, 2):
        assert sent == 1
        for grad, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(grad, right, rtol=1e-14, atol=1e-14)


def test_buckets_leave_while_backward_runs() -> None:
    def work(rank: int) -> list[str]:
        model, events = Branches(), list[str]()
        buckets = GradientBuckets(model.parameters(), dist.group.WORLD, 1)
        send = buckets._send

        def note() -> None:
            events.append("sent")
            send()

        buckets._send = note  # type: ignore[method-assign]
        model.layers[0].bias.register_hook(lambda grad: events.append("first layer"))
        model(batch(rank)).backward()
        return events

    for events in run_ranks(work, 2):
        assert events.index("first layer") >= 3


def test_hooks_survive_the_move_from_meta() -> None:
    def work(rank: int) -> bool:
        with torch.device("meta"):
            model = nn.Linear(4, 4)
        replication = Replication(model, dist.group.WORLD)
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.weight.fill_(1.0)
            model.bias.zero_()
        replication.set_requires_gradient_sync(False)
        model(torch.full((1, 4), float(rank))).sum().backward()
        assert float(model.weight.grad.max()) == rank  # type: ignore[union-attr]
        replication.set_requires_gradient_sync(True)
        model.zero_grad()
        model(torch.full((1, 4), float(rank))).sum().backward()
        return bool((model.weight.grad == 3.0).all())  # type: ignore[union-attr]

    assert run_ranks(work, 3) == [True] * 3
