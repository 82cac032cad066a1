"""What the loop asks of a model that trains, whether it lies in one process or on many; and the one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from llama_core import Llama, LlamaConfig

from .batches import Batch
from .build import build_model
from .config import TrainConfig
from .evaluate import Evaluation, evaluate
from .optimizer import Optimizer
from .step import StepResult, training_step
from .world import World


class Trainer(Protocol):
    """A model and its optimizer. With several processes, each call is made by all of them at once."""

    part: int
    parts: int
    """Of the rows of a step this process takes part number `part` of `parts`."""
    rests_in: torch.dtype
    """In which the weights rest."""

    def step(self, micro_batches: Sequence[Batch], learning_rate: float, max_grad_norm: float) -> StepResult:
        """One optimizer step; the result is that of all processes' rows."""

    def evaluate(self, batches: Iterable[Batch]) -> Evaluation:
        """The mean loss over all batches, which every process gives alike and of which it takes its share."""

    def logits(self, tokens: Tensor) -> Tensor:
        """(1, S) → (1, S, V), on every process."""

    def tensors(self) -> dict[str, Tensor]:
        """Weights, moments and step counts, live, by names that are the same on every layout."""

    def loaded(self) -> None:
        """To be called when `tensors` were filled."""

    def sent(self) -> list[str]:
        """With `trace_comm`: lines on what this process sent in the last step."""

    def held(self) -> tuple[int, int]:
        """(parameters, bytes of them, their gradients and moments) that this process holds at rest."""

    def whole(self) -> Llama | None:
        """The model on rank 0, in the dtype of the run, to be written; None elsewhere."""


class OneProcess:
    """The plain model, with nothing in its way."""

    part, parts = 0, 1

    def __init__(self, config: TrainConfig, shape: LlamaConfig, world: World) -> None:
        self.model = build_model(shape, config, world.device)
        self.optimizer = Optimizer(self.model.named_parameters(), config.optimizer)
        self.rests_in: torch.dtype = getattr(torch, config.dtype)

    def step(self, micro_batches: Sequence[Batch], learning_rate: float, max_grad_norm: float) -> StepResult:
        return training_step(self.model, self.optimizer, micro_batches, learning_rate, max_grad_norm)

    def evaluate(self, batches: Iterable[Batch]) -> Evaluation:
        return evaluate(self.model, batches)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.model.logits(self.model(tokens))

    def tensors(self) -> dict[str, Tensor]:
        parameters = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        return checkpoint_names(parameters, self.optimizer)

    def loaded(self) -> None:
        self.optimizer.publish()

    def sent(self) -> list[str]:
        return ["one process sends nothing"]

    def held(self) -> tuple[int, int]:
        return self.model.num_parameters(), bytes_at_rest(self.model.parameters(), self.optimizer)

    def whole(self) -> Llama | None:
        return self.model


def checkpoint_names(parameters: dict[str, Tensor], optimizer: Optimizer) -> dict[str, Tensor]:
    """What a checkpoint holds. Float32 master weights take the place of the weights that were rounded from them, so
    that a layout whose weights rest in float32 reads them, and the other way round."""
    tensors = {f"model.{name}": value for name, value in parameters.items()}
    for name, value in optimizer.state_dict().items():
        kind, _, parameter = name.partition(".")
        tensors[f"model.{parameter}" if kind == "master" else f"optimizer.{name}"] = value
    return tensors


def bytes_at_rest(parameters: Iterable[Tensor], optimizer: Optimizer) -> int:
    """Of local parts: weights, gradients of the same type, moments and master weights."""

    def local(tensor: Tensor) -> int:
        part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return part.nbytes

    return sum(2 * local(p) for p in parameters) + sum(local(value) for value in optimizer.state_dict().values())
