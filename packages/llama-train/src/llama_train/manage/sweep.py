"""Layouts and batch sizes tried out on this machine, each in processes of its own, so that none can end the others."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llama_parallel.layout import describe
from llama_train.config import TrainConfig
from llama_train.config_file import dump_config
from llama_train.config_parallel import ParallelSettings
from llama_train.layout_choice import check_parallel, sizes

from .collect import write_text
from .new_run import predict, shape_of

_PART = re.compile(r"(dp_replicate|dp|tp|pp|cp)(\d+)")
_TAIL = 4000
HOPELESS = 1.25
"""A case whose predicted memory is so many times the card's is not tried: the prediction is good to some percent."""


@dataclass(frozen=True)
class Machine:
    """What cases run on."""

    device: str
    """cuda or cpu."""
    count: int
    """GPUs, or cores."""
    memory: int | None
    """Bytes of a GPU."""
    name: str


@dataclass(frozen=True)
class Case:
    """One set of settings."""

    key: str
    """Its name, and that of its files."""
    config: TrainConfig

    @property
    def processes(self) -> int:
        """How many it takes."""
        return sizes(self.config.parallel).num_processes

    def row(self) -> dict[str, Any]:
        """Its settings, as columns of the tables."""
        config = self.config
        return {
            "case": self.key,
            "layout": describe(sizes(config.parallel)),
            "processes": self.processes,
            "micro_batch_size": config.data.micro_batch_size,
            "gradient_accumulation_steps": config.data.gradient_accumulation_steps,
            "rows_per_step": config.rows_per_step,
            "sequence_length": config.data.sequence_length,
            "activation_checkpointing": config.activation_checkpointing,
            "compile": config.compile,
        }


def parse_layout(text: str) -> ParallelSettings:
    """ "dp2.tp4" → its sizes; "1" is one process.

    Raises:
        ValueError: it reads otherwise.
    """
    found: dict[str, int] = {}
    for part in () if text == "1" else text.split("."):
        match = _PART.fullmatch(part)
        name = "" if match is None else "dp_shard" if match[1] == "dp" else match[1]
        if match is None or name in found or int(match[2]) < 1:
            raise ValueError(f"--layouts is {text!r}; it must be sizes such as 1, dp2, tp4 or dp2.tp2.pp2")
        found[name] = int(match[2])
    return ParallelSettings(**{"dp_shard": 1, **found})  # type: ignore[arg-type]


def cases(
    base: TrainConfig,
    layouts: Sequence[str],
    micro_batches: Sequence[int],
    accumulations: Sequence[int],
    checkpointing: Sequence[str],
    compiled: Sequence[bool],
) -> Iterator[Case]:
    """All combinations, in the order of their layouts."""
    for name, ckpt, comp, rows, count in itertools.product(
        layouts, checkpointing, compiled, micro_batches, accumulations
    ):
        sized = parse_layout(name)
        config = replace(
            base,
            name="sweep",
            activation_checkpointing=ckpt,  # type: ignore[arg-type]  # its values are checked where flags are read
            compile=comp,
            data=replace(base.data, micro_batch_size=rows, gradient_accumulation_steps=count),
            parallel=replace(
                base.parallel,
                **{key: getattr(sized, key) for key in ("dp_replicate", "dp_shard", "tp", "pp", "cp")},
            ),
        )
        words = (
            [name, f"micro{rows}", f"acc{count}"] + ([ckpt] if ckpt != "none" else []) + (["compile"] if comp else [])
        )
        yield Case("-".join(words), config)


def why_not(case: Case, machine: Machine) -> str | None:
    """Why a case is not worth starting; None where it is."""
    if case.processes > machine.count:
        things = "GPUs" if machine.device == "cuda" else "cores"
        return f"needs {case.processes} processes; this machine has {machine.count} {things}"
    try:
        shape = shape_of(case.config)
        check_parallel(case.config, shape)
    except ValueError as error:
        return str(error)
    if machine.memory is not None:
        needed = predict(case.config, shape).total
        if needed > HOPELESS * machine.memory:
            return f"{needed / 1e9:.0f} GB are predicted; a GPU has {machine.memory / 1e9:.0f} GB"
    return None


def run_case(case: Case, folder: Path, steps: int, warmup: int, timeout: float) -> dict[str, Any]:
    """Measure in new processes. A case that fails, or takes too long, has a result that says so."""
    settings, result = folder / f"{case.key}.toml", folder / f"{case.key}.result"
    write_text(settings, dump_config(case.config))
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m"]
    if case.processes > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={case.processes}", "-m"]
    command += ["llama_train.manage.sweep_case", str(settings), str(result), str(steps), str(warmup)]
    log = folder / f"{case.key}.log"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            status: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun ends its processes before itself
                try:
                    process.wait(40)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    if result.is_file():
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        result.unlink()
    else:
        found = _without_result(status, timeout, log)
    return found


def _without_result(status: int | None, timeout: float, log: Path) -> dict[str, Any]:
    if status is None:
        return {"state": "timeout", "reason": f"took longer than {timeout:g} s"}
    text = log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
    if status in (-9, 137) or "Signal 9 (SIGKILL)" in text:
        return {"state": "oom", "reason": "killed by the system, as it does when memory runs out"}
    lines = [
        line.strip() for line in text.splitlines() if re.match(r"\s*(\[rank\d+\]: )?[\w.]*(Error|Exception)\b", line)
    ]
    return {"state": "fail", "reason": lines[-1] if lines else f"status {status}; see {log}"}


def probe(device: str) -> Machine:
    """The machine, asked by a process of its own: this one must not hold any of a GPU's memory."""
    code = (
        "import json, os, torch\n"
        f"gpu = {device != 'cpu'} and torch.cuda.is_available()\n"
        "print(json.dumps(['cuda', torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory, "
        "torch.cuda.get_device_name(0)] if gpu else ['cpu', os.cpu_count() or 1, None, 'CPU']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    machine = Machine(*json.loads(done.stdout.splitlines()[-1]))
    if device == "cuda" and machine.device != "cuda":
        raise ValueError("device is 'cuda'; this machine has no GPU that PyTorch can use: leave it out, or say 'cpu'")
    return machine
