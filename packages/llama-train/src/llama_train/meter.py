"""Speed, utilisation and data wait of the steps between two lines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from llama_core import LlamaConfig

from .build import count_parameters
from .config import TrainConfig
from .flops import flops_per_token, flops_per_token_torchtitan, mfu, peak_flops
from .metrics import StepMetrics, peak_memory
from .step import StepResult
from .world import World


class Meter:
    """Counts time from one call of `measure` to the next, without what happens in a `pause`.

    Args:
        config: of the run.
        shape: of the model.
        world: the processes that share each step.
    """

    def __init__(self, config: TrainConfig, shape: LlamaConfig, world: World) -> None:
        length = config.data.sequence_length
        self.tokens_per_step = config.rows_per_step * length
        self._world, self._peak = world, peak_flops(world.device)
        layers, width = shape.num_hidden_layers, shape.num_attention_heads * shape.head_width
        parameters = count_parameters(shape)
        embedding = 0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size
        self._flops = flops_per_token(parameters, layers, width, length)
        self._flops_torchtitan = flops_per_token_torchtitan(parameters, embedding, layers, width, length)
        if config.lora.rank:  # frozen weights get no gradient, which is a third of their products
            self._flops -= 2 * parameters
            self._flops_torchtitan -= 2 * (parameters - embedding)
        self.start(0)

    def start(self, done: int) -> None:
        """Count from now and from step `done` on."""
        self._clock, self._step, self._waited = time.perf_counter(), done, 0.0

    def waited(self, seconds: float) -> None:
        """A step had to wait so long for its batches."""
        self._waited += seconds

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time of an evaluation or a save, which is no training time."""
        before = time.perf_counter()
        yield
        self._clock += time.perf_counter() - before

    def measure(self, step: int, result: StepResult, learning_rate: float, skipped: int) -> StepMetrics:
        """The figures after `step`; reading them waits for the GPU."""
        loss, grad_norm = float(result.loss), float(result.grad_norm)  # first: the time is that of finished work
        steps = step - self._step
        speed = steps * self.tokens_per_step / (time.perf_counter() - self._clock)
        metrics = StepMetrics(
            step=step,
            tokens=step * self.tokens_per_step,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            tokens_per_second=speed,
            tokens_per_second_per_device=speed / self._world.size,
            mfu=mfu(speed / self._world.size, self._flops, self._peak),
            mfu_torchtitan=mfu(speed / self._world.size, self._flops_torchtitan, self._peak),
            memory=peak_memory(self._world.device),
            data_wait=1000 * self._waited / steps,
            skipped=skipped,
        )
        self.start(step)
        return metrics
