"""Kills training runs with SIGKILL at random moments while they save, and reports what each found when it went on.

    python packages/llama-train/tests/kill_report.py FOLDER --kills 30 --processes 1

Runs are forked from this process, which has imported torch. A kill may cost the steps since the last checkpoint that
was complete, and nothing else; in the end the losses of all parts are those of an undisturbed run, bit for bit. Exits
with 1 where that is not so. test_kill_report runs it.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import re
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
from rich.console import Console

from llama_train import TrainConfig, train
from llama_train.checkpoint import list_checkpoints, newest_checkpoint
from llama_train.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    ParallelSettings,
    ScheduleConfig,
)
from llama_train.console import Reporter

EVERY = 2  # steps between checkpoints: a run of this size is then saving most of the time
LONGEST = 0.4  # seconds from the first step to the kill


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config, chance, failed = _config(arguments.folder, arguments.processes), random.Random(arguments.seed), 0
    checkpoints = Path(str(config.folder)) / "checkpoints"
    saved = trained = 0  # told by the runs: the last checkpoint that was complete, the last step that was made
    for number in range(1, arguments.kills + 1):
        way = replace(config.checkpoint, asynchronous=number % 3 != 0)
        run = _Run(replace(config, checkpoint=way), arguments.processes)
        run.read_until(r"^step +\d+/")
        moment = chance.uniform(0.0, LONGEST)
        time.sleep(moment)
        _wait_for_a_save(checkpoints)
        time.sleep(chance.uniform(0.0, 0.005))
        run.kill(chance.randrange(arguments.processes))
        saved, trained = max(saved, run.saved), run.trained
        writing = [path.name.removeprefix(".partial-") for path in checkpoints.glob(".partial-*")]
        newest, passed_over = newest_checkpoint(checkpoints)
        found = 0 if newest is None else newest.step
        damaged = [line for line in passed_over if "is passed over" in line]
        # asynchronously the next checkpoint may be under way for EVERY steps before the one in hand is complete
        most = EVERY * (2 if way.asynchronous else 1)
        good = found >= saved and trained - found <= most and not damaged
        failed += not good
        print(
            f"kill {number:2d}  {'beside training' if way.asynchronous else 'between steps'}, {moment:.3f} s after the "
            f"first step, at step {trained}, {'writing ' + writing[0] if writing else 'between two checkpoints'}: "
            f"last told complete {saved}, goes on from {found}, {max(0, trained - found)} steps lost"
            f"{'' if good else '  WRONG ' + '; '.join(damaged)}",
            flush=True,
        )
    last = list_checkpoints(checkpoints)[-1].step
    same = _undisturbed(config, last, arguments.processes)
    print(f"the {last} steps that were kept have the losses of an undisturbed run: {'yes' if same else 'NO'}")
    return 0 if failed == 0 and same else 1


def _wait_for_a_save(checkpoints: Path) -> None:
    until = time.monotonic() + 2.0
    while time.monotonic() < until and not any(checkpoints.glob(".partial-*")):
        time.sleep(0.0005)


def _config(folder: Path, processes: int) -> TrainConfig:
    (folder / "text").mkdir(parents=True, exist_ok=True)
    for index in range(6):
        lines = [f"def f{index}_{n}(x):\n    return x * {n * n} + {index}  # the {n}th\n" for n in range(30)]
        (folder / "text" / f"file{index}.py").write_text("".join(lines), encoding="utf-8")
    return TrainConfig(
        folder=str(folder / "run"),
        device="cpu",
        model=ModelConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2),
        data=DataConfig(
            source=str(folder / "text"), suffixes=(".py",), held_out_fraction=0.2, vocab_size=300, sequence_length=16,
            micro_batch_size=4 // processes,
        ),
        schedule=ScheduleConfig(steps=100_000, warmup_steps=4),
        checkpoint=CheckpointConfig(every=EVERY, keep=2),
        evaluation=EvaluationConfig(sample_tokens=0),
        logging=LoggingConfig(every=1),
        parallel=ParallelSettings(dp_shard=processes),
    )  # fmt: skip


class _Told(Reporter):
    """Writes its lines to a pipe at once: what was told had happened before the kill."""

    def __init__(self, pipe: int) -> None:
        super().__init__(Console(quiet=True), progress=False)
        self._pipe = pipe

    def note(self, text: str) -> None:
        os.write(self._pipe, f"{text}\n".encode())


class _Run:
    """A run on forked processes, and what rank 0 told so far."""

    def __init__(self, config: TrainConfig, processes: int) -> None:
        self.text = ""
        self._pipe, write = os.pipe()
        store = Path(str(config.folder)).parent / "store"
        store.unlink(missing_ok=True)
        self._children = [self._fork(config, rank, processes, store, write) for rank in range(processes)]
        os.close(write)

    def _fork(self, config: TrainConfig, rank: int, processes: int, store: Path, pipe: int) -> int:
        child = os.fork()
        if child:
            return child
        try:
            if processes > 1:
                errors = store.with_name(f"errors-{rank}.txt")  # the survivor complains of the dead one
                os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
                faulthandler.enable()
                dist.init_process_group(
                    "gloo", store=dist.FileStore(str(store), processes), rank=rank, world_size=processes
                )
            train(config, _Told(pipe) if rank == 0 else None)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def read_until(self, pattern: str) -> None:
        while not re.search(pattern, self.text, re.MULTILINE):
            part = os.read(self._pipe, 65536)
            if not part:
                raise RuntimeError(f"the run ended by itself:\n{self.text}")
            self.text += part.decode()

    def kill(self, rank: int) -> None:
        """SIGKILL to one process; the others must end by themselves."""
        os.kill(self._children[rank], signal.SIGKILL)
        for child in self._children:
            os.waitpid(child, 0)
        while part := os.read(self._pipe, 65536):
            self.text += part.decode()
        os.close(self._pipe)

    @property
    def saved(self) -> int:
        return max((int(step) for step in re.findall(r"saved .*step-(\d+)", self.text)), default=0)

    @property
    def trained(self) -> int:
        return max(int(step) for step in re.findall(r"^step +(\d+)/", self.text, re.MULTILINE))


def _undisturbed(config: TrainConfig, last: int, processes: int) -> bool:
    alone = replace(config, folder=f"{config.folder}-undisturbed", checkpoint=CheckpointConfig(every=0))
    run = _Run(alone, processes)
    run.read_until(rf"^step +{last + 2}/")  # a line is told before it is written
    run.kill(0)
    expected, found = (_losses(Path(str(folder)), last) for folder in (alone.folder, config.folder))
    return len(expected) == last and found == expected


def _losses(folder: Path, last: int) -> dict[int, float]:
    found = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == "train" and record["step"] <= last:
            found[record["step"]] = record["loss"]
    return found


if __name__ == "__main__":
    sys.exit(main())
