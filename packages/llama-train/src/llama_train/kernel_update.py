"""`Optimizer`'s passes over memory with llama_kernels: each gradient is read for its norm and read for the update.

In between nothing is written: clipping is a factor that the update applies. With float32 master weights the update also
writes the model's weight, and a step of one micro-batch takes the model's gradients as they are; a second one's are
added to them in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llama_kernels.adamw import adamw_, add_float32, norms
from llama_kernels.compat import runs_triton


class KernelUpdate:
    """Gradients on their way from the model's parameters to AdamW's update.

    Args:
        parameters: the model's, by name.
        trained: what the update changes, by the same names: the parameters, or their float32 twins.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], trained: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._names = {id(twin): name for name, twin in trained.items()}
        self._twinned = [name for name, twin in trained.items() if twin is not parameters[name]]
        self._sums: dict[str, Tensor] = {}
        self._scale: Tensor | None = None

    @classmethod
    def of(cls, parameters: Mapping[str, nn.Parameter], trained: Mapping[str, nn.Parameter]) -> KernelUpdate | None:
        """None where a kernel cannot serve: another device or dtype, or a DTensor."""
        everyone = (*parameters.values(), *trained.values())
        serves = all(type(p) is nn.Parameter and runs_triton(p) and p.is_contiguous() for p in everyone)
        return cls(parameters, trained) if serves else None

    def collect(self) -> None:
        """Take over the gradients of a micro-batch from parameters that have a twin."""
        for name in self._twinned:
            grad = self._parameters[name].grad
            if grad is not None:
                before = self._sums.get(name)
                self._sums[name] = grad if before is None else add_float32(before, grad)
                self._parameters[name].grad = None

    def _gradients(self) -> dict[str, Tensor]:
        own = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        return {**own, **self._sums}

    def clip(self, max_norm: float) -> tuple[dict[str, Tensor], Tensor]:
        """(norm of each gradient, of all); the next `step` scales by what brings the latter down to `max_norm`."""
        gradients = self._gradients()
        each = norms(list(gradients.values()))
        total = torch.linalg.vector_norm(each)
        # as torch.nn.utils.clip_grads_with_norm_
        self._scale = torch.clamp(max_norm / (total + 1e-6), max=1.0) if max_norm else None
        return dict(zip(gradients, each.unbind(), strict=True)), total

    def step(self, group: Mapping[str, Any], states: Sequence[Mapping[str, Tensor]], skip: Tensor | None) -> None:
        """AdamW on one group of a torch optimizer.

        Args:
            group: its params, lr, betas, eps and weight_decay.
            states: of each of its params: step, exp_avg, exp_avg_sq.
            skip: as of `Optimizer.step`.
        """
        gradients = self._gradients()
        work = [
            (self._names[id(twin)], twin, state)
            for twin, state in zip(group["params"], states, strict=True)
            if self._names[id(twin)] in gradients
        ]
        if not work:
            return
        steps = [state["step"] for _, _, state in work]
        torch._foreach_add_(steps, 1.0 if skip is None else 1.0 - skip)
        counts = torch.stack(steps).double()  # 1 - 0.999 has three digits less in float32
        corrections = [(1 - beta**counts).float().unbind() for beta in group["betas"]]
        for (name, twin, state), *correction in zip(work, *corrections, strict=True):
            parameter = self._parameters[name]
            adamw_(
                twin,
                gradients[name].contiguous(),
                state["exp_avg"],
                state["exp_avg_sq"],
                (correction[0], correction[1]),
                learning_rate=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                scale=self._scale,
                skip=skip,
                rounded=None if parameter is twin else parameter,
            )
            torch.autograd.graph.increment_version([twin, parameter])  # a kernel of ours is nothing that torch counts

    def forget(self) -> None:
        """All gradients that were taken over."""
        self._sums.clear()
        self._scale = None
