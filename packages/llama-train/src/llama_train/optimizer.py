"""AdamW with decay groups and, for low-precision models, float32 master weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .config import OptimizerConfig

if TYPE_CHECKING:
    from .kernel_update import KernelUpdate


class Optimizer:
    """AdamW (Loshchilov & Hutter 2019) over named parameters. The learning rate is given with each step.

    Matrices are decayed; vectors (norm weights, biases) are not. With `master_weights`, a parameter of 16 bits has a
    float32 twin: gradients are summed and applied there, because an update smaller than 1/256 of a bfloat16 weight
    would be rounded away, and the result is copied back.

    One step is: for each micro-batch `backward()` then `collect()`; then `clip()`; then `step(rate)`.

    Args:
        named_parameters: as of `model.named_parameters()`; shared parameters come once.
        config: betas, eps, weight decay.
        kernels: update with llama_kernels where they can serve all parameters. The state is the same.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, kernels: bool = False
    ) -> None:
        self._parameters = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
        if not self._parameters:
            raise ValueError("the model has no parameter to train")
        self._trained = {name: self._twin(parameter, config) for name, parameter in self._parameters.items()}
        self.norms: dict[str, Tensor] = {}
        self.before_update: Callable[[], None] = lambda: None
        """Called by each `step` before anything of `state_dict` changes."""
        decayed = [parameter for parameter in self._trained.values() if parameter.ndim >= 2]
        kept = [parameter for parameter in self._trained.values() if parameter.ndim < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": kept, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            fused=all(parameter.device.type in ("cpu", "cuda") for parameter in self._trained.values()),
        )
        self._kernels: KernelUpdate | None = None
        if kernels:
            from .kernel_update import KernelUpdate  # here: a CPU run needs no Triton

            self._kernels = KernelUpdate.of(self._parameters, self._trained)

    @staticmethod
    def _twin(parameter: nn.Parameter, config: OptimizerConfig) -> nn.Parameter:
        if not config.master_weights or parameter.dtype not in (torch.bfloat16, torch.float16):
            return parameter
        return nn.Parameter(parameter.detach().float())

    def _twins(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        pairs = [(parameter, self._trained[name]) for name, parameter in self._parameters.items()]
        return [(parameter, twin) for parameter, twin in pairs if parameter is not twin]

    @torch.no_grad()
    def collect(self) -> None:
        """Move the gradients of a micro-batch into the float32 sums. Without master weights they are there already."""
        if self._kernels is not None:
            self._kernels.collect()
            return
        for parameter, twin in self._twins():
            if parameter.grad is None:
                continue
            if twin.grad is None:
                twin.grad = parameter.grad.float()
            else:
                twin.grad += parameter.grad
            parameter.grad = None

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their joint norm is at most `max_norm` (0: leave them); the norm before. With
        kernels it is `step` that scales them.

        `norms` then holds that of each gradient.
        """
        if self._kernels is not None:
            self.norms, norm = self._kernels.clip(max_norm)
            return norm
        gradients = {name: p.grad for name, p in self._trained.items() if p.grad is not None}
        norms = torch._foreach_norm(list(gradients.values()))
        self.norms = dict(zip(gradients, norms, strict=True))
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        if max_norm:  # else there is nothing to multiply with, and two passes over memory to save
            torch.nn.utils.clip_grads_with_norm_(self._trained.values(), max_norm, total, foreach=True)
        return total

    @torch.no_grad()
    def step(self, learning_rate: float, skip: Tensor | None = None) -> None:
        """Apply the gradients and forget them.

        Args:
            learning_rate: of this step.
            skip: a float32 scalar on the device; where it is 1, weights, moments and step counts stay as they were.
                Nothing waits for it: the fused kernel looks at it (it is GradScaler's `found_inf`).
        """
        self.before_update()
        self._adamw.found_inf = skip  # type: ignore[attr-defined]
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        if self._kernels is not None:
            for group in self._adamw.param_groups:
                self._kernels.step(group, [self._moments(parameter) for parameter in group["params"]], skip)
        else:
            self._adamw.step()
            torch.autograd.graph.increment_version(self._trained.values())  # which the fused kernel leaves out
            self.publish()
        self.zero_grad()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the float32 weights into the model's. Without master weights they are the model's already."""
        for parameter, twin in self._twins():
            parameter.copy_(twin)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        if self._kernels is not None:
            self._kernels.forget()
        for parameter in (*self._parameters.values(), *self._trained.values()):
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """Those that are there now, of parameters and of their float32 twins."""
        holders = {id(p): p for p in (*self._parameters.values(), *self._trained.values())}
        return [holder.grad for holder in holders.values() if holder.grad is not None]

    def state_dict(self) -> dict[str, Tensor]:
        """Moments, step counts and master weights by the names of the parameters: "exp_avg.model.norm.weight", …

        Tensors are the live ones. Before the first step the moments are zeros.
        """
        state = {}
        for name, twin in self._trained.items():
            for key, value in self._moments(twin).items():
                state[f"{key}.{name}"] = value
            if twin is not self._parameters[name]:
                state[f"master.{name}"] = twin.detach()
        return state

    def _moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        # AdamW makes them at its first step; a run that loads a checkpoint needs them before, to load into.
        state = self._adamw.state[parameter]
        if not state:
            fused = self._adamw.defaults["fused"]  # the fused kernel counts steps on the device of the parameter
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu")
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        moments: dict[str, Tensor] = state
        return moments
