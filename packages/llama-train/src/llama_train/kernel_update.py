"""`Optimizer`'s passes over memory with llama_kernels: each gradient is read for its norm and read for the update.

In between nothing is written: clipping is a factor that the update applies. With float32 master weights the update also
writes the model's weight, and a step of one micro-batch takes the model's gradients as they are; a second one's are
added to them in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llama_kernels.adamw import adamw_
from llama_kernels.compat import runs_triton
from llama_kernels.tensor_lists import norms, sum_float32

_AT_ONCE = 1 << 28


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
        self._new: dict[str, Tensor] = {}
        self._scale: Tensor | None = None

    @classmethod
    def of(cls, parameters: Mapping[str, nn.Parameter], trained: Mapping[str, nn.Parameter]) -> KernelUpdate | None:
        """None where a kernel cannot serve: another device or dtype, or a DTensor."""
        everyone = (*parameters.values(), *trained.values())
        serves = all(
            type(p) is nn.Parameter and runs_triton(p) and p.is_contiguous() and p.data_ptr() % 16 == 0
            for p in everyone
        )
        return cls(parameters, trained) if serves else None

    def collect(self) -> None:
        """Take over the gradients of a micro-batch from parameters that have a twin."""
        again: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
        for name in self._twinned:
            grad = self._parameters[name].grad
            if grad is None:
                continue
            self._parameters[name].grad = None
            if name in self._sums:
                again.setdefault((self._sums[name].dtype, grad.dtype), []).append(name)
                self._new[name] = grad
            else:
                self._sums[name] = grad.contiguous()
        for names in (part for alike in again.values() for part in self._parts(alike)):
            sums = sum_float32(
                [self._sums[name] for name in names], [self._new.pop(name).contiguous() for name in names]
            )
            self._sums.update(zip(names, sums, strict=True))

    def _parts(self, names: Sequence[str]) -> Iterator[list[str]]:
        """As many names at once as have about a gigabyte of sums, so that not all terms lie beside all sums."""
        part, size = [], 0
        for name in names:
            part.append(name)
            size += self._parameters[name].numel()
            if size >= _AT_ONCE:
                yield part
                part, size = [], 0
        if part:
            yield part

    def _gradients(self) -> dict[str, Tensor]:
        own = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        return {**own, **self._sums}

    def clip(self, max_norm: float) -> tuple[dict[str, Tensor], Tensor]:
        """(norm of each gradient, of all); the next `step` scales by what brings the latter down to `max_norm`."""
        gradients = self._gradients()
        alike: dict[torch.dtype, list[str]] = {}
        for name, gradient in gradients.items():
            alike.setdefault(gradient.dtype, []).append(name)
        found: dict[str, Tensor] = {}
        for names in alike.values():
            found.update(zip(names, norms([gradients[name].contiguous() for name in names]).unbind(), strict=True))
        each = torch.stack(list(found.values()))
        total = torch.linalg.vector_norm(each)
        # as torch.nn.utils.clip_grads_with_norm_
        self._scale = torch.clamp(max_norm / (total + 1e-6), max=1.0) if max_norm else None
        return found, total

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
        corrections = [(1 - beta**counts).float() for beta in group["betas"]]
        alike: dict[tuple[torch.dtype, ...], list[int]] = {}  # a launch takes one dtype for each of its lists
        for index, (name, twin, _) in enumerate(work):
            dtypes = (twin.dtype, gradients[name].dtype, self._parameters[name].dtype)
            alike.setdefault(dtypes, []).append(index)
        for indices in alike.values():
            names, twins, states = zip(*(work[index] for index in indices), strict=True)
            parameters = [self._parameters[name] for name in names]
            first, second = corrections
            if len(indices) < len(work):
                chosen = torch.tensor(indices)
                if first.is_cuda:  # from pinned memory nothing waits
                    chosen = chosen.pin_memory().to(first.device, non_blocking=True)
                first, second = first[chosen], second[chosen]
            adamw_(
                twins,
                [gradients[name].contiguous() for name in names],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                (first, second),
                learning_rate=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                scale=self._scale,
                skip=skip,
                rounded=None if parameters[0] is twins[0] else parameters,
            )
            torch.autograd.graph.increment_version([*twins, *parameters])  # torch does not see what a kernel does

    def forget(self) -> None:
        """All gradients that were taken over."""
        self._sums.clear()
        self._scale = None
