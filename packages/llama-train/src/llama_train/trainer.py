"""What the loop asks of a model that trains, whether it lies in one process or on many; and the one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from llama_core import Llama, LlamaConfig

from .batches import Batch
from .build import build_model
from .config import TrainConfig
from .evaluate import Evaluation, evaluate
from .lora import add_adapters, nothing_dropped
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
    shape: LlamaConfig
    parameters: dict[str, nn.Parameter]
    """All that this process has, frozen ones too."""
    optimizer: Optimizer

    def share(self, batch: Batch) -> Batch:
        """What this process needs of its rows, on the CPU; nothing is sent, and a thread may call it."""

    def step(self, micro_batches: Sequence[Batch], learning_rate: float, max_grad_norm: float) -> StepResult:
        """One optimizer step with what `share` gave; the result is that of all processes' rows."""

    def evaluate(self, batches: Iterable[Batch]) -> Evaluation:
        """The mean loss over all batches, which every process gives alike and of which it takes its share."""

    def logits(self, tokens: Tensor) -> Tensor:
        """(1, S) → (1, S, V), on every process."""

    def weights(self) -> dict[str, Tensor]:
        """All weights, frozen ones too, live and as exact as they are kept, named alike on every layout."""

    def tensors(self) -> dict[str, Tensor]:
        """What is trained: weights, moments and step counts, live, by names that are the same on every layout."""

    def loaded(self) -> None:
        """To be called when `weights` or `tensors` were filled."""

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
        self.config = config
        self.shape, self.model = shape, build_model(shape, config, world.device)
        self.parameters = dict(self.model.named_parameters())
        kernels = config.kernels == "auto" and world.device.type == "cuda"
        self.optimizer = Optimizer(self.model.named_parameters(), config.optimizer, kernels)
        self.rests_in: torch.dtype = getattr(torch, config.dtype)

    def share(self, batch: Batch) -> Batch:
        return batch

    def step(self, micro_batches: Sequence[Batch], learning_rate: float, max_grad_norm: float) -> StepResult:
        z_loss = self.config.optimizer.z_loss
        return training_step(self.model, self.optimizer, micro_batches, learning_rate, max_grad_norm, z_loss)

    def evaluate(self, batches: Iterable[Batch]) -> Evaluation:
        with nothing_dropped(self.model, self.config):
            return evaluate(self.model, batches)

    def logits(self, tokens: Tensor) -> Tensor:
        with nothing_dropped(self.model, self.config):
            return self.model.logits(self.model(tokens))

    def weights(self) -> dict[str, Tensor]:
        return exact_weights(dict(self.model.named_parameters()), self.optimizer)

    def tensors(self) -> dict[str, Tensor]:
        return checkpoint_names(dict(self.model.named_parameters()), self.optimizer)

    def loaded(self) -> None:
        self.optimizer.publish()

    def sent(self) -> list[str]:
        return ["one process sends nothing"]

    def held(self) -> tuple[int, int]:
        return self.model.num_parameters(), bytes_at_rest(self.model.parameters(), self.optimizer)

    def whole(self) -> Llama | None:
        if not self.config.lora.rank:
            return self.model
        model = empty_whole(self.model.config, self.config, "cpu")
        model.load_state_dict(self.model.state_dict())
        return model


def empty_whole(shape: LlamaConfig, config: TrainConfig, device: str) -> Llama:
    """A model of the run in its dtype, with its adapters, whose memory is to be filled."""
    with torch.device("meta"):
        model = Llama(shape).to(getattr(torch, config.dtype))
    add_adapters(model, config)
    return model.to_empty(device=device)


def exact_weights(parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> dict[str, Tensor]:
    """Weights by name. Float32 master weights take the place of the weights that were rounded from them, so that a
    layout whose weights rest in float32 reads them, and the other way round."""
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    for name, value in optimizer.state_dict().items():
        kind, _, parameter = name.partition(".")
        if kind == "master":
            weights[parameter] = value
    return weights


def checkpoint_names(parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> dict[str, Tensor]:
    """What a checkpoint holds: weights that are trained, exact, and what the optimizer knows of them. Frozen weights
    are those of the model that the run started from, and are read there."""
    weights = exact_weights(parameters, optimizer)
    tensors = {f"model.{name}": weights[name] for name, parameter in parameters.items() if parameter.requires_grad}
    state = {f"optimizer.{name}": value for name, value in optimizer.state_dict().items()}
    return tensors | {name: value for name, value in state.items() if not name.startswith("optimizer.master.")}


def bytes_at_rest(parameters: Iterable[Tensor], optimizer: Optimizer) -> int:
    """Of local parts: weights, gradients of the same type for those that are trained, moments and master weights."""

    def local(tensor: Tensor) -> int:
        part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return part.nbytes

    return sum((1 + p.requires_grad) * local(p) for p in parameters) + sum(
        local(value) for value in optimizer.state_dict().values()
    )
