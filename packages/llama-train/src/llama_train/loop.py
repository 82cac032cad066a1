"""A training run from settings to result. Read `train` first: it is the table of contents of this package."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llama_core import load_tokenizer

from .build import model_config
from .checkpoint import Checkpoint, load_checkpoint, newest_checkpoint, stored_names
from .config import TrainConfig
from .console import Reporter
from .evaluate import Evaluation
from .export import export_run
from .layout_choice import which_process
from .meter import Meter
from .metrics import EvaluationMetrics, Sinks, StepMetrics
from .nonfinite import check_finite
from .prepare import PreparedData, measuring_batches, training_rows
from .run_folder import RunFolder, share_run_folder
from .sample import sample_text
from .saving import FAILED, Saver
from .schedule import learning_rate
from .sinks import open_sinks
from .startup import memory_told, prepare_once, resolve_run, tell
from .start import begin, check_vocabulary
from .step import StepResult
from .stopping import StopRequest, describe
from .trainer import OneProcess, Trainer
from .world import World, enter_world


@dataclass(frozen=True)
class TrainResult:
    """What a run ended with; the same on every process, but for the export, which rank 0 alone has."""

    folder: Path
    step: int
    """Optimizer steps made in all."""
    finished: bool
    """False where the run was asked to stop before its last step."""
    held_out: Evaluation | None = None
    export: Path | None = None
    sample: str | None = None


def train(config: TrainConfig, reporter: Reporter | None = None) -> TrainResult:
    """Train as the settings say, continuing an earlier start of the same run where its folder has a checkpoint.

    Under torchrun every process makes this call; they find each other, and rank 0 prints and writes. A process group
    that exists already is used.

    Args:
        config: the run.
        reporter: prints; by default on standard output.

    Raises:
        ValueError: settings that do not fit each other, the machine, the number of processes or the run folder.
        NonFiniteLoss: the run diverged; its last checkpoint is from before that.
        SaveError: a checkpoint could not be written; earlier ones are intact.
        OutOfMemory: the model or a step needs more memory than there is.
        RankError: another process died or hangs.
        RemoteError: another process failed first, and raised one of these.
    """
    process = which_process()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    config, device, attention = resolve_run(config, process)
    reporter = reporter or Reporter(progress=config.logging.progress)
    if not process.is_main:
        reporter.silence()
    with (
        enter_world(process, device, config.parallel.timeout) as world,
        memory_told(config),
        reporter,
        share_run_folder(config, world) as (folder, changes),
    ):
        reporter.note(f"run        {folder.path}")
        reporter.note(f"attention  {attention}")
        run = _Run(config, folder, prepare_once(config, folder.data, world, reporter), world, reporter)
        run.resume(changes)
        with run.open_sinks():
            if not run.steps():
                return TrainResult(folder.path, run.done, finished=False)
            return run.finish()


class _Run:
    """The state of one run: model, optimizer, and how many steps are done. All else follows from these."""

    def __init__(
        self, config: TrainConfig, folder: RunFolder, data: PreparedData, world: World, reporter: Reporter
    ) -> None:
        self.config, self.folder, self.data, self.world, self.reporter = config, folder, data, world, reporter
        length = config.data.sequence_length
        shape = model_config(
            config.model,
            vocab_size=data.vocab_size,
            sequence_length=length,
            bos_id=data.bos_id,
            eos_id=data.eos_id,
        )
        check_vocabulary(config, shape, data.vocab_size)
        self.rows = training_rows(data, config.data, config.seed)
        if world.size == 1:
            self.trainer: Trainer = OneProcess(config, shape, world)
        else:
            from .on_ranks import OnRanks  # here: one process needs neither meshes nor FSDP

            self.trainer = OnRanks(config, shape, world)
        self.done = 0
        self.saved: Checkpoint | None = None
        self.saver = Saver(folder.checkpoints, config.checkpoint, world)
        self.trainer.optimizer.before_update = self.saver.hold_back
        self.sinks = Sinks()
        self.meter = Meter(config, shape, world, self.done)
        epochs = config.schedule.total * config.rows_per_step / self.rows.rows_per_epoch
        tell(config, shape, self.trainer, epochs, world, reporter)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint holds, live; the data's place and the learning rate follow from the step."""
        generators = {"generator.cpu": torch.get_rng_state()}
        if self.world.device.type == "cuda":
            generators["generator.cuda"] = torch.cuda.get_rng_state(self.world.device)
        return {**self.trainer.tensors(), **generators}

    def resume(self, changes: list[str]) -> None:
        """Take up the newest checkpoint of the folder that is whole, if there is one."""
        self.saved, passed_over = self.world.main_does(lambda: newest_checkpoint(self.folder.checkpoints))
        for line in passed_over:
            self.reporter.note(f"warning    {line}")
        begin(self.config, self.trainer, self.world, self.reporter, resumes=self.saved is not None)
        if self.saved is not None:
            steps = self.config.schedule.total
            if self.saved.step > steps:
                raise ValueError(f"schedule.steps is {steps}; {self.saved.path} is already past that: raise it")
            tensors, stored = self.tensors(), stored_names(self.saved)
            for name in [name for name in tensors if name.startswith("generator.") and name not in stored]:
                del tensors[name]  # saved on a CPU, resumed on a GPU
            load_checkpoint(self.saved, tensors, self.world)
            self.trainer.loaded()
            torch.set_rng_state(tensors["generator.cpu"])
            if "generator.cuda" in tensors:
                torch.cuda.set_rng_state(tensors["generator.cuda"], self.world.device)
            self.done = self.saved.step
            self.reporter.note(f"resumed    step {self.done}, from {self.saved.path}")
            for line in changes:
                self.reporter.note(f"changed    {line}")

    @contextmanager
    def open_sinks(self) -> Iterator[None]:
        """Where rank 0 writes figures; closed however the run ends."""
        if self.world.is_main:
            self.sinks = open_sinks(self.config, self.folder, self.done)
        try:
            yield
        finally:
            self.sinks.close()

    def steps(self) -> bool:
        """Train to the last step; False if asked to stop before it. Saved either way."""
        config, trainer, world, every = self.config, self.trainer, self.world, self.config.checkpoint.every
        last = config.schedule.total
        self.reporter.start(self.done, last)
        unseen: list[tuple[int, StepResult]] = []
        self.meter.start(self.done)
        signal = 0
        with StopRequest() as stop, self.saver as saver:
            while self.done < last and not signal:
                step = self.done + 1
                agreed = world.start_largest(lambda: saver.signal or stop.number)
                result = trainer.step(
                    self.rows.micro_batches(
                        step,
                        config.data.micro_batch_size,
                        config.data.gradient_accumulation_steps,
                        trainer.part,
                        trainer.parts,
                    ),
                    rate := learning_rate(step, config.optimizer.learning_rate, config.schedule),
                    config.optimizer.max_grad_norm,
                )
                signal = agreed()  # the same on all processes, so that all stop after the same step
                if signal == FAILED:
                    saver.wait()  # raises what went wrong
                self._tell_saved()
                self.done = step
                self.reporter.advance(step)
                if result.targets == 0:
                    self.reporter.note(f"warning    step {step} has no token to predict; the weights stay as they are")
                unseen.append((step, result))
                shows = step % config.logging.every == 0 or step in (1, last)
                evaluates = config.evaluation.every > 0 and step % config.evaluation.every == 0 and step < last
                saves = every > 0 and step % every == 0 and step < last
                # Reading a number waits for the GPU, so it is done only where there is something to show or keep.
                if shows or evaluates or saves or world.device.type == "cpu":
                    self._check(unseen)
                if shows:
                    self._show(self.meter.measure(step, result, rate, skipped=0))
                with self.meter.pause():
                    if evaluates:
                        self._evaluate()
                    if saves:
                        self._save()
            self._check(unseen)
            if self.done not in (saver.step, None if self.saved is None else self.saved.step):
                self._save()
            saver.wait()
            self._tell_saved()
        self.reporter.stop()
        if self.done < last:
            self.reporter.note(
                f"stopped    by {describe(signal)} after step {self.done} of {last}; saved. "
                "Start the same command again to continue"
            )
        return self.done == last

    def finish(self) -> TrainResult:
        """Held-out loss, export and text sample of the trained model."""
        result = self._evaluate()
        tokenizer = load_tokenizer(self.data.tokenizer)
        export = None
        if self.config.checkpoint.export:
            model = self.trainer.whole()
            if model is not None:
                export = self.folder.export
                export_run(model, tokenizer, self.config, self.folder, self.reporter.note)
            del model
        sample = None
        if self.config.evaluation.sample_tokens:
            device, seed = self.world.device, self.config.seed
            sample = sample_text(self.trainer.logits, tokenizer, self.config.evaluation, seed, device)
            self.reporter.note("sample     " + sample.replace("\n", "\n           "))
        if export is not None:
            prompt = shlex.quote(self.config.evaluation.sample_prompt)
            # llama-infer's own default is 1, at which a small model raves
            self.reporter.note(
                f"generate   llama-infer generate --model {shlex.quote(str(export))} --prompt {prompt} "
                f"--temperature {self.config.evaluation.sample_temperature:g}"
            )
        return TrainResult(self.folder.path, self.done, True, result, export, sample)

    def _evaluate(self) -> Evaluation:
        config = self.config
        # The rows of a micro-batch fit in memory with gradients, so without them they do all the more.
        batches = measuring_batches(self.data, config.data, config.data.micro_batch_size, config.evaluation.max_tokens)
        result = self.trainer.evaluate(batches)
        self.sinks.write_evaluation(
            EvaluationMetrics(self.done, result.loss, result.tokens, result.perplexity, bits_per_byte=None)
        )
        share = 100 * result.fraction_of_chance(self.data.vocab_size)
        self.reporter.note(
            f"held out   step {self.done}: loss {result.loss:.4f} over {result.tokens:,} tokens, perplexity "
            f"{result.perplexity:.2f}, {share:.1f}% of ln({self.data.vocab_size})"
        )
        return result

    def _save(self) -> None:
        self.saver.save(self.done, self.tensors())
        self._tell_saved()

    def _tell_saved(self) -> None:
        if (written := self.saver.written()) is not None:
            self.saved = written
            self.reporter.note(f"saved      {written.path}")

    def _show(self, metrics: StepMetrics) -> None:
        self.reporter.line(metrics)
        for line in self.trainer.sent() if self.config.trace_comm else ():
            self.reporter.note(f"sent       {line}")
        self.sinks.write(metrics)

    def _check(self, unseen: list[tuple[int, StepResult]]) -> None:
        for step, result in unseen:
            check_finite(step, result, self.world, self.config, None if self.saved is None else self.saved.path)
        unseen.clear()
