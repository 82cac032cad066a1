"""Plain data parallelism: every rank holds all parameters, and gradients are summed over ranks during backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 25 << 20
"""Large enough that an all-reduce runs at full bandwidth, small enough that the first starts early; torch DDP's."""


def all_reduce_gradients(parameters: Iterable[nn.Parameter], group: ProcessGroup) -> None:
    """Sum every gradient over the group, one all-reduce after the other, once backward is done.

    All there is to data parallelism, and the oracle of `GradientBuckets`, which does the same thing sooner.
    """
    for parameter in parameters:
        dist.all_reduce(_gradient(parameter), group=group)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of the gradient; a parameter that took no part has a gradient of zero."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad


class GradientBuckets:
    """Sums gradients over a group while backward still runs: as soon as all of a bucket are there, it is on its way.

    Buckets are filled in the order in which backward produces gradients, which is about the reverse of the forward
    one (Li et al. 2020, https://arxiv.org/abs/2006.15704, section 4.2). When `backward()` returns, the sums are there.

    Args:
        parameters: the same on every rank, in forward order; each once.
        group: the ranks to sum over.
        bucket_bytes: size from which a bucket is sent.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], group: ProcessGroup, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.group = group
        self.enabled = True
        """False while gradients are only accumulated: what is there is sent with the next enabled backward."""
        self.buckets: list[list[nn.Parameter]] = []
        self._bucket_of: dict[nn.Parameter, int] = {}
        size = 0
        for parameter in reversed([p for p in parameters if p.requires_grad]):
            if not self.buckets or size >= bucket_bytes or parameter.dtype != self.buckets[-1][0].dtype:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(parameter)
            self._bucket_of[parameter] = len(self.buckets) - 1
            size += parameter.numel() * parameter.element_size()
            parameter.register_post_accumulate_grad_hook(self._arrived)
        self._waiting = [len(bucket) for bucket in self.buckets]
        self._sent: dict[int, tuple[Tensor, Any]] = {}
        self._next = 0  # every rank sends the buckets in the same order, whatever the order of arrival
        self._queued = False

    def _arrived(self, parameter: Tensor) -> None:
        if not self.enabled:
            return
        if not self._queued:
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
            self._queued = True
        assert isinstance(parameter, nn.Parameter)
        self._waiting[self._bucket_of[parameter]] -= 1
        while self._next < len(self.buckets) and self._waiting[self._next] == 0:
            self._send()

    def _send(self) -> None:
        flat = torch.cat([_gradient(parameter).flatten() for parameter in self.buckets[self._next]])
        self._sent[self._next] = flat, dist.all_reduce(flat, group=self.group, async_op=True)
        self._next += 1

    def finish(self) -> None:
        """Send what is not on its way yet, wait, and hand out the sums.

        At the end of backward: what a parameter without gradient held back; after passes with `enabled` off, all.
        """
        while self._next < len(self.buckets):
            self._send()
        for index, (flat, work) in self._sent.items():
            work.wait()
            gradients = [_gradient(parameter) for parameter in self.buckets[index]]
            sums = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, sums, strict=True):
                gradient.copy_(part.view_as(gradient))
        self._waiting = [len(bucket) for bucket in self.buckets]
        self._sent, self._next, self._queued = {}, 0, False


class Replication:
    """Gradient buckets for whatever parameters a model has when it first runs.

    Moving a model from meta makes new parameters, on which hooks set before would be lost.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup) -> None:
        self.group = group
        self.enabled = True
        self.buckets: GradientBuckets | None = None
        model.register_forward_pre_hook(self._prepare)

    def set_requires_gradient_sync(self, enabled: bool) -> None:
        """Whether the next backward pass sums over ranks."""
        self.enabled = enabled
        if self.buckets is not None:
            self.buckets.enabled = enabled

    def _prepare(self, model: nn.Module, *_: Any) -> None:
        if self.buckets is None:
            self.buckets = GradientBuckets(model.parameters(), self.group)
            self.buckets.enabled = self.enabled
