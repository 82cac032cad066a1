"""What a checkpoint holds of a run, and filling it again."""

from __future__ import annotations

import torch
from torch import Tensor

from .checkpoint import Checkpoint, load_checkpoint, stored_names
from .trainer import Trainer
from .world import World

_PASSED = "data.passed_over"


class State:
    """Model and optimizer, where the data stands, random generators. All else of a run follows from these.

    Args:
        trainer: holds model and optimizer.
        world: the processes.
    """

    def __init__(self, trainer: Trainer, world: World) -> None:
        self._trainer, self._world = trainer, world
        self.done = 0
        """Optimizer steps made."""
        self.passed_over = 0
        """Steps whose rows were passed over after a rollback: step n takes the rows of number n + passed_over."""

    def tensors(self) -> dict[str, Tensor]:
        """Everything that is saved, live, by names that are the same on every layout. The learning rate follows from
        the step, the data's place from the step and `passed_over`."""
        own = {"generator.cpu": torch.get_rng_state(), _PASSED: torch.tensor(self.passed_over)}
        if self._world.device.type == "cuda":
            own["generator.cuda"] = torch.cuda.get_rng_state(self._world.device)
        return {**self._trainer.tensors(), **own}

    def load(self, checkpoint: Checkpoint) -> None:
        """Take up a checkpoint, of whatever layout; a collective call.

        Raises:
            ValueError: it is of another model.
        """
        tensors, stored = self.tensors(), stored_names(checkpoint)
        own = [name for name in tensors if name.startswith(("generator.", _PASSED))]
        for name in [name for name in own if name not in stored]:
            del tensors[name]  # saved on a CPU, resumed on a GPU; or by a version that passed nothing over
        load_checkpoint(checkpoint, tensors, self._world)
        self._trainer.loaded()
        torch.set_rng_state(tensors["generator.cpu"])
        if "generator.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["generator.cuda"], self._world.device)
        self.done = checkpoint.step
        self.passed_over = int(tensors[_PASSED]) if _PASSED in tensors else 0
