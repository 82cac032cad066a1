"""A training run from settings to result. Read `train` first: it is the table of contents of this package."""

from __future__ import annotations

import math
import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llama_core import Llama, load_tokenizer
from llama_parallel import read_process

from .attention_choice import choose_attend
from .batches import TrainingRows, held_out_batches
from .build import build_model, model_config, resolve
from .checkpoint import Checkpoint, load_checkpoint, newest_checkpoint, save_checkpoint
from .config import TrainConfig
from .console import Reporter
from .evaluate import Evaluation, evaluate
from .export import export_model
from .flops import flops_per_token, mfu, peak_flops
from .metrics import MetricsFile, StepMetrics, human, peak_memory
from .optimizer import Optimizer
from .prepare import PreparedData, prepare
from .run_folder import RunFolder, open_run_folder
from .sample import sample_text
from .schedule import learning_rate
from .step import training_step
from .stopping import StopRequest


class NonFiniteLoss(RuntimeError):
    """The loss or the gradient became infinite or NaN; nothing was saved after that."""


@dataclass(frozen=True)
class TrainResult:
    """What a run ended with."""

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

    Args:
        config: the run.
        reporter: prints; by default on standard output.

    Raises:
        ValueError: settings that do not fit each other, the machine or the run folder.
        NonFiniteLoss: the run diverged; its last checkpoint is from before that.
        SaveError: a checkpoint could not be written; earlier ones are intact.
    """
    process = read_process(os.environ)
    if process.world_size > 1:
        raise ValueError(
            f"{process.world_size} processes were started; training on several is not there yet: start one"
        )
    config = resolve(config)
    device = torch.device(config.device)
    # A shape that doesn't fit together should be told before the text is read; the tokenizer's numbers come later.
    data = config.data
    shape = model_config(
        config.model, vocab_size=data.vocab_size, sequence_length=data.sequence_length, bos_id=None, eos_id=None
    )
    # So should a kernel that can't serve it.
    _, attention = choose_attend(config.attention, shape, data.sequence_length, device, getattr(torch, config.dtype))
    reporter = reporter or Reporter(progress=config.logging.progress)
    with reporter, open_run_folder(config) as (folder, changes):
        reporter.note(f"run        {folder.path}")
        reporter.note(f"attention  {attention}")
        run = _Run(config, folder, prepare(data, folder.data, reporter.note), device, reporter)
        run.resume(changes)
        if not run.steps():
            return TrainResult(folder.path, run.done, finished=False)
        return run.finish()


class _Run:
    """The state of one run: model, optimizer, and how many steps are done. All else follows from these."""

    def __init__(
        self, config: TrainConfig, folder: RunFolder, data: PreparedData, device: torch.device, reporter: Reporter
    ) -> None:
        self.config, self.folder, self.data, self.device, self.reporter = config, folder, data, device, reporter
        length = config.data.sequence_length
        shape = model_config(
            config.model,
            vocab_size=data.vocab_size,
            sequence_length=length,
            bos_id=data.bos_id,
            eos_id=data.eos_id,
        )
        self.rows = TrainingRows(data.train, length, config.seed, data.bos_id)
        self.model: Llama = build_model(shape, config, device)
        self.optimizer = Optimizer(self.model.named_parameters(), config.optimizer)
        self.done = 0
        self.saved: Checkpoint | None = None
        parameters = self.model.num_parameters()
        self.flops = flops_per_token(
            parameters, shape.num_hidden_layers, shape.num_attention_heads * shape.head_width, length
        )
        self.peak = peak_flops(device)
        per_step = config.data.rows_per_step * length
        total = config.schedule.steps * per_step
        epochs = total / (self.rows.rows_per_epoch * length)
        reporter.note(f"model      {human(parameters)} parameters, {config.dtype} on {device.type}")
        reporter.note(
            f"batch      {config.data.micro_batch_size} × {length} tokens × {config.data.gradient_accumulation_steps} "
            f"= {human(per_step)} a step; {config.schedule.steps} steps = {human(total)} tokens, {epochs:.2f} epochs"
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint holds, live; the data's place and the learning rate follow from the step."""
        parameters = {f"model.{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        moments = {f"optimizer.{name}": value for name, value in self.optimizer.state_dict().items()}
        generators = {"generator.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            generators["generator.cuda"] = torch.cuda.get_rng_state(self.device)
        return {**parameters, **moments, **generators}

    def resume(self, changes: list[str]) -> None:
        """Take up the newest checkpoint of the folder that is whole, if there is one."""
        self.saved, passed_over = newest_checkpoint(self.folder.checkpoints)
        for line in passed_over:
            self.reporter.note(f"warning    {line}")
        if self.saved is not None:
            steps = self.config.schedule.steps
            if self.saved.step > steps:
                raise ValueError(f"schedule.steps is {steps}; {self.saved.path} is already past that: raise it")
            tensors = self.tensors()
            generators = [name for name in tensors if name.startswith("generator.")]
            load_checkpoint(self.saved, tensors)
            torch.set_rng_state(tensors["generator.cpu"])
            if "generator.cuda" in generators:
                torch.cuda.set_rng_state(tensors["generator.cuda"], self.device)
            self.done = self.saved.step
            self.reporter.note(f"resumed    step {self.done}, from {self.saved.path}")
            for line in changes:
                self.reporter.note(f"changed    {line}")
        self.metrics = MetricsFile(self.folder.metrics, self.done)

    def steps(self) -> bool:
        """Train to the last step; False if asked to stop before it. Saved either way."""
        config, every = self.config, self.config.checkpoint.every
        last = config.schedule.steps
        self.reporter.start(self.done, last)
        unseen: list[tuple[int, Tensor, Tensor]] = []
        clock, clock_step = time.perf_counter(), self.done
        with StopRequest() as stop:
            while self.done < last and stop.reason is None:
                step = self.done + 1
                result = training_step(
                    self.model,
                    self.optimizer,
                    self.rows.micro_batches(
                        step, config.data.micro_batch_size, config.data.gradient_accumulation_steps
                    ),
                    rate := learning_rate(step, config.optimizer.learning_rate, config.schedule),
                    config.optimizer.max_grad_norm,
                )
                self.done = step
                self.reporter.advance(step)
                if result.targets == 0:
                    self.reporter.note(f"warning    step {step} has no token to predict; the weights stay as they are")
                unseen.append((step, result.loss, result.grad_norm))
                shows = step % config.logging.every == 0 or step in (1, last)
                evaluates = config.evaluation.every > 0 and step % config.evaluation.every == 0 and step < last
                saves = every > 0 and step % every == 0 and step < last
                # Reading a number waits for the GPU, so it is done only where there is something to show or keep.
                if shows or evaluates or saves or self.device.type == "cpu":
                    self._check(unseen)
                if shows:
                    self._show(step, result.loss, result.grad_norm, rate, step - clock_step, clock)
                    clock, clock_step = time.perf_counter(), step
                if evaluates or saves:
                    paused = time.perf_counter()
                    if evaluates:
                        self._evaluate()
                    if saves:
                        self._save()
                    clock += time.perf_counter() - paused
            self._check(unseen)
            if self.saved is None or self.saved.step != self.done:
                self._save()
        self.reporter.stop()
        if self.done < last:
            self.reporter.note(
                f"stopped    by {stop.reason} after step {self.done} of {last}; saved. Start the same command again to "
                "continue"
            )
        return self.done == last

    def finish(self) -> TrainResult:
        """Held-out loss, export and text sample of the trained model."""
        result = self._evaluate()
        tokenizer = load_tokenizer(self.data.tokenizer)
        export = self.folder.export if self.config.checkpoint.export else None
        if export is not None:
            export_model(self.model, tokenizer, export)
            self.reporter.note(f"exported   {export}")
        sample = None
        if self.config.evaluation.sample_tokens:
            sample = sample_text(self.model, tokenizer, self.config.evaluation, self.config.seed)
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
        batches = held_out_batches(
            self.data.held_out,
            config.data.sequence_length,
            config.data.micro_batch_size,
            self.data.bos_id,
            config.evaluation.max_tokens,
        )
        result = evaluate(self.model, batches)
        self.metrics.write_evaluation(self.done, result.loss, result.tokens)
        share = 100 * result.fraction_of_chance(self.data.vocab_size)
        self.reporter.note(
            f"held out   step {self.done}: loss {result.loss:.4f} over {result.tokens:,} tokens, perplexity "
            f"{result.perplexity:.2f}, {share:.1f}% of ln({self.data.vocab_size})"
        )
        return result

    def _save(self) -> None:
        self.saved = save_checkpoint(self.folder.checkpoints, self.done, self.tensors(), self.config.checkpoint.keep)
        self.reporter.note(f"saved      {self.saved.path}")

    def _show(self, step: int, loss: Tensor, grad_norm: Tensor, rate: float, steps: int, since: float) -> None:
        per_step = self.config.data.rows_per_step * self.config.data.sequence_length
        speed = steps * per_step / (time.perf_counter() - since)
        metrics = StepMetrics(
            step=step,
            tokens=step * per_step,
            loss=float(loss),
            grad_norm=float(grad_norm),
            learning_rate=rate,
            tokens_per_second=speed,
            mfu=mfu(speed, self.flops, self.peak),
            memory=peak_memory(self.device),
        )
        self.reporter.line(metrics)
        self.metrics.write(metrics)

    def _check(self, unseen: list[tuple[int, Tensor, Tensor]]) -> None:
        for step, loss, grad_norm in unseen:
            for name, value in (("loss", float(loss)), ("gradient norm", float(grad_norm))):
                if not math.isfinite(value):
                    last = "none" if self.saved is None else str(self.saved.path)
                    raise NonFiniteLoss(
                        f"the {name} of step {step} is {value}; training stopped, and nothing was saved since; last "
                        f"checkpoint: {last}. Lower optimizer.learning_rate, {self.config.optimizer.learning_rate}, or "
                        f"lengthen schedule.warmup_steps, {self.config.schedule.warmup_steps}"
                    )
        unseen.clear()
