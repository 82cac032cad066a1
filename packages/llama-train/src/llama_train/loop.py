"""A training run from settings to result. Read `train` first: it is the table of contents of this package."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from .batches import Batch
from .build import model_config
from .checkpoint import Checkpoint, newest_checkpoint
from .config import TrainConfig
from .console import Reporter
from .evaluate import Evaluation
from .export import export_run
from .flight_recorder import flight_recorder
from .layout_choice import which_process
from .measuring import Measuring
from .meter import Meter
from .metrics import Sinks, StepMetrics
from .nonfinite import Watch
from .out_of_memory import memory_told
from .prefetch import Prefetch
from .prepare import PreparedData, training_rows
from .profiling import Profiling
from .resume import choose_checkpoint
from .run_folder import RunFolder, run_path, share_run_folder
from .saving import FAILED, Saver
from .schedule import learning_rate
from .sinks import open_sinks
from .start import begin, check_vocabulary
from .startup import prepare_once, resolve_run, tell
from .state import State
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
    nonfinite: tuple[int, ...] = ()
    """Steps that were not finite since this start, and were skipped or rolled back."""


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
    traces = RunFolder(run_path(config)).traces
    with (
        flight_recorder(config.profile.flight_recorder, traces, process) as dump,
        enter_world(process, device, config.parallel.timeout, dump) as world,
        memory_told(config) as told,
        reporter,
        share_run_folder(config, world) as (folder, changes),
    ):
        reporter.note(f"run        {folder.path}")
        reporter.note(f"attention  {attention}")
        run = _Run(config, folder, prepare_once(config, folder.data, world, reporter), world, reporter)
        told.trainer = run.trainer
        run.resume(changes)
        with run.open_sinks(), run.profiling:
            if not run.steps():
                return TrainResult(folder.path, run.state.done, finished=False, nonfinite=tuple(run.watch.steps))
            return run.finish()


class _Run:
    """What one run is made of, and its course."""

    def __init__(
        self, config: TrainConfig, folder: RunFolder, data: PreparedData, world: World, reporter: Reporter
    ) -> None:
        self.config, self.folder, self.world, self.reporter = config, folder, world, reporter
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
        self.state = State(self.trainer, world)
        self.measuring = Measuring(config, data, self.trainer, world, reporter)
        self.watch = Watch(config, world, reporter.note)
        self.saved: Checkpoint | None = None
        self.saver = Saver(folder.checkpoints, config.checkpoint, world)
        self.trainer.optimizer.before_update = self.saver.hold_back
        self.profiling = Profiling(config.profile, folder.traces, world, reporter.note)
        self.sinks = Sinks()
        self.meter = Meter(config, shape, world)
        epochs = config.schedule.total * config.rows_per_step / self.rows.rows_per_epoch
        tell(config, shape, self.trainer, epochs, world, reporter)

    def resume(self, changes: list[str]) -> None:
        """Take up the newest checkpoint of the folder that is whole, or the one to branch off from, if there is one."""
        self.saved, lines = self.world.main_does(lambda: choose_checkpoint(self.config, self.folder))
        begin(self.config, self.trainer, self.world, self.reporter, resumes=self.saved is not None)
        for line in lines:
            self.reporter.note(line)
        if self.saved is not None:
            steps = self.config.schedule.total
            if self.saved.step > steps:
                raise ValueError(f"schedule.steps is {steps}; {self.saved.path} is already past that: raise it")
            self.state.load(self.saved)
            self.reporter.note(f"resumed    step {self.state.done}, from {self.saved.path}")
            for line in changes:
                self.reporter.note(f"changed    {line}")

    @contextmanager
    def open_sinks(self) -> Iterator[None]:
        """Where rank 0 writes figures; closed however the run ends."""
        if self.world.is_main:
            self.sinks = open_sinks(self.config, self.folder, self.state.done)
        try:
            yield
        finally:
            self.sinks.close()

    def batches(self, step: int) -> list[Batch]:
        """This process's part of the rows of a step."""
        data, trainer = self.config.data, self.trainer
        number = step + self.state.passed_over
        size, count = data.micro_batch_size, data.gradient_accumulation_steps
        return [trainer.share(b) for b in self.rows.micro_batches(number, size, count, trainer.part, trainer.parts)]

    def steps(self) -> bool:
        """Train to the last step; False if asked to stop before it. Saved either way."""
        state, last = self.state, self.config.schedule.total
        signal = 0
        self.reporter.start(state.done, last)
        with StopRequest() as stop, self.saver as saver:
            saver.reserve(state.tensors())
            own = self.saved is not None and self.saved.path.parent == self.folder.checkpoints
            if not own and self.config.optimizer.on_nonfinite == "rollback":
                self._save()  # something to go back to
            while state.done < last and not signal:  # once, and again after each rollback
                with Prefetch(self.batches, state.done + 1, last, self.world.device) as data:
                    signal = self._steps(data, stop)
            if state.done not in (saver.step, None if self.saved is None else self.saved.step):
                self._save(last=True)
            saver.wait()
            self._tell_saved()
        self.reporter.stop()
        if (summary := self.watch.summary()) is not None:
            self.reporter.note(summary)
        if state.done < last:
            self.reporter.note(
                f"stopped    by {describe(signal)} after step {state.done} of {last}; saved. "
                "Start the same command again to continue"
            )
        return state.done == last

    def _steps(self, data: Prefetch, stop: StopRequest) -> int:
        """Until the last step, a signal, whose number comes back, or a rollback."""
        config, state, meter, last = self.config, self.state, self.meter, self.config.schedule.total
        signal = 0
        meter.start(state.done)
        while state.done < last and not signal:
            step = state.done + 1
            self.world.expect(f"step {step}", config.data.gradient_accumulation_steps)
            agreed = self.world.start_largest(lambda: self.saver.signal or stop.number)
            batches = data.take(step)
            meter.waited(data.waited)
            rate = learning_rate(step, config.optimizer.learning_rate, config.schedule)
            self.profiling.before(step)
            result = self.trainer.step(batches, rate, config.optimizer.max_grad_norm)
            signal = agreed()  # the same on all processes, so that all stop after the same step
            if signal == FAILED:
                self.saver.wait()  # raises what went wrong
            self._tell_saved()
            state.done = step
            self.profiling.after(step)
            self.reporter.advance(step)
            if result.targets == 0:
                self.reporter.note(f"warning    step {step} has no token to predict; the weights stay as they are")
            self.watch.add(step, result)

            shows = step % config.logging.every == 0 or step in (1, last)
            evaluates, samples, saves = (
                every > 0 and step % every == 0 and step < last
                for every in (config.evaluation.every, config.evaluation.sample_every, config.checkpoint.every)
            )
            # Reading a number waits for the GPU, so it is done only where there is something to show or keep.
            reads = shows or evaluates or samples or saves or step == last or signal or self.world.device.type == "cpu"
            if reads and self._rolls_back():
                return signal
            if shows:
                self._show(meter.measure(step, result, rate, len(self.watch.steps)))
            if evaluates or samples or saves:
                self.world.rest()
            with meter.pause():
                if evaluates:
                    self.measuring.evaluate(step, self.sinks)
                if samples:
                    self.measuring.sample(step, self.sinks)
                if saves:
                    self._save()
        return signal

    def finish(self) -> TrainResult:
        """Held-out loss, export and text sample of the trained model."""
        result = self.measuring.evaluate(self.state.done, self.sinks)
        export = None
        if self.config.checkpoint.export:
            model = self.trainer.whole()
            if model is not None:
                export = self.folder.export
                export_run(model, self.measuring.tokenizer, self.config, self.folder, self.reporter.note)
            del model
        sample = self.measuring.sample(self.state.done, self.sinks) if self.config.evaluation.sample_tokens else None
        if export is not None:
            prompt = shlex.quote(self.config.evaluation.sample_prompt)
            chat = " --chat" if self.config.evaluation.sample_chat else ""
            # llama-infer's own default is 1, at which a small model raves
            self.reporter.note(
                f"generate   llama-infer generate{chat} --model {shlex.quote(str(export))} --prompt {prompt} "
                f"--temperature {self.config.evaluation.sample_temperature:g}"
            )
        return TrainResult(self.folder.path, self.state.done, True, result, export, sample, tuple(self.watch.steps))

    def _save(self, last: bool = False) -> None:
        self.saver.save(self.state.done, self.state.tensors(), last=last)
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

    def _rolls_back(self) -> bool:
        """Look at the steps since the last look; after one that is not finite go back, if that is the choice."""
        bad = self.watch.look(None if self.saved is None else self.saved.path)
        if bad is None:
            return False
        self.world.rest()
        self.saver.wait()
        self._tell_saved()
        checkpoint, _ = self.world.main_does(lambda: newest_checkpoint(self.folder.checkpoints))
        assert checkpoint is not None, "there is one from before the first step"
        passed_over = self.state.passed_over + bad - checkpoint.step
        self.state.load(checkpoint)
        self.state.passed_over = passed_over
        self.reporter.note(f"rollback   to step {checkpoint.step}; the rows of the steps up to {bad} are passed over")
        self.sinks.close()
        if self.world.is_main:
            self.sinks = open_sinks(self.config, self.folder, checkpoint.step)
        return True
