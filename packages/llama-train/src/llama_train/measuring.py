"""Held-out loss and text samples of the model as it stands: made under every layout, told and kept."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from llama_core import Tokenizer, load_tokenizer

from .config import TrainConfig
from .console import Reporter
from .evaluate import ByteCount, Evaluation
from .metrics import EvaluationMetrics, MetricsSink
from .prepare import PreparedData, measuring_batches
from .sample import sample_text
from .trainer import Trainer
from .world import World


class Measuring:
    """Of one run. Every call is made by all processes.

    Args:
        config, data, trainer, world, reporter: of the run.
    """

    def __init__(
        self, config: TrainConfig, data: PreparedData, trainer: Trainer, world: World, reporter: Reporter
    ) -> None:
        self._config, self._data, self._trainer, self._world = config, data, trainer, world
        self._reporter = reporter
        settings = config.evaluation
        if settings.sample_chat and settings.sample_tokens:
            try:  # now, and not after the last step of a run of weeks
                self.tokenizer.encode_chat([{"role": "user", "content": settings.sample_prompt}])
            except ValueError as error:
                raise ValueError(f"evaluation.sample_chat is true: {error}") from None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Of the run."""
        return load_tokenizer(self._data.tokenizer)

    @cached_property
    def _count(self) -> ByteCount:
        return ByteCount(self.tokenizer)

    def evaluate(self, step: int, sink: MetricsSink) -> Evaluation:
        """The held-out loss after `step`."""
        data, settings = self._config.data, self._config.evaluation
        # The rows of a micro-batch fit in memory with gradients, so without them they do all the more.
        batches = measuring_batches(self._data, data, data.micro_batch_size, settings.max_tokens)
        result = self._trainer.evaluate(self._count.of(batches))
        result = replace(result, bytes=self._count.bytes)
        bits = result.bits_per_byte
        sink.write_evaluation(EvaluationMetrics(step, result.loss, result.tokens, result.perplexity, bits))
        size = self._data.vocab_size
        told = "" if bits is None else f", {bits:.4f} bits per byte"
        self._reporter.note(
            f"held out   step {step}: loss {result.loss:.4f} over {result.tokens:,} tokens, perplexity "
            f"{result.perplexity:.2f}{told}, {100 * result.fraction_of_chance(size):.1f}% of ln({size})"
        )
        return result

    def sample(self, step: int, sink: MetricsSink) -> str:
        """A text that the model writes after `step`; the same for the same weights and seed."""
        config, device = self._config, self._world.device
        text = sample_text(self._trainer.logits, self.tokenizer, config.evaluation, config.seed, device)
        sink.write_sample(step, text)
        self._reporter.note("sample     " + text.replace("\n", "\n           "))
        return text
