"""Ranks of one piece of work: started, listened to, and ended however the work goes."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_GRACE = 1.0
"""Seconds after the first failure: what a lost peer causes may be seen before its cause."""


@dataclass(frozen=True)
class Rank:
    """What a function that runs on every rank gets. The default process group exists."""

    number: int
    size: int
    device: torch.device
    say: Callable[[object], None]
    """Tells the parent something at once, so that it is known whatever happens later."""


@dataclass
class Outcome:
    """What was heard of each rank, in order, and what went wrong: a traceback or where ranks hang."""

    said: list[list[Any]] = field(default_factory=list)
    error: str | None = None

    @property
    def reason(self) -> str:
        """The error in one line."""
        lines = [line for line in (self.error or "").splitlines() if line.strip()]
        known = [line for line in lines if "Error" in line]
        return (known or lines or [""])[-1].strip()[:160]


def run_job(
    function: Callable[..., None], size: int, args: tuple[Any, ...], *, device: str, timeout: float, method: str
) -> Outcome:
    """Call `function(rank, *args)` on `size` ranks; when this returns, none of their processes is left.

    Args:
        function: of a module, what each rank does; it tells results by `rank.say`.
        device: "cuda" (NCCL, a GPU for each rank) or "cpu" (gloo).
        timeout: seconds for all together, starting included.
        method: "fork" (nobody imports torch again; the parent must not have used the GPU) or "spawn".
    """
    context = multiprocessing.get_context(method)
    processes: list[Any] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            for number in range(size):
                receiver, sender = context.Pipe(duplex=False)
                work = (function, number, size, args, device, timeout, folder, sender, os.getpid())
                process = context.Process(target=_rank, args=work)  # type: ignore[attr-defined]
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: ranks use none
                    process.start()
                sender.close()
                processes.append(process)
                pipes.append(receiver)
            return _listen(processes, pipes, time.monotonic() + timeout, Path(folder))
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process in processes:
                process.join()
            for pipe in pipes:
                pipe.close()


def _rank(
    function: Callable[..., None],
    number: int,
    size: int,
    args: tuple[Any, ...],
    device_type: str,
    timeout: float,
    folder: str,
    sender: Connection,
    parent: int,
) -> None:
    if sys.platform == "linux":  # a killed parent takes its ranks along: none may stay on a GPU
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    torch.set_num_threads(1)  # also keeps a forked child off OpenMP threads that it does not have
    stack = open(Path(folder) / f"stack-{number}.txt", "w")  # noqa: SIM115 (open as long as the process lives)
    faulthandler.dump_traceback_later(max(1.0, timeout - 1.0), file=stack)
    try:
        device = torch.device("cuda", number) if device_type == "cuda" else torch.device("cpu")
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=dist.FileStore(str(Path(folder) / "store"), size),
            rank=number,
            world_size=size,
            timeout=timedelta(seconds=timeout),
            device_id=device if cuda else None,
        )
        function(Rank(number, size, device, lambda message: sender.send(("said", message))), *args)
        sender.send(("done", None))
    except BaseException:
        sender.send(("failed", traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    # Connections stay open until all have answered and the parent ends us: a peer may still be receiving.
    while os.getppid() == parent:
        time.sleep(0.05)
    os._exit(0)


def _listen(processes: list[Any], pipes: list[Connection], deadline: float, folder: Path) -> Outcome:
    outcome = Outcome([[] for _ in pipes])
    waiting = dict(enumerate(pipes))
    while waiting:
        ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            if outcome.error is None:
                time.sleep(_GRACE)  # the stacks are about to be written
                stack = (folder / f"stack-{min(waiting)}.txt").read_text()
                outcome.error = f"{stack}\nTimeoutError: ranks {sorted(waiting)} have not finished in time"
            break
        for number in [number for number, pipe in waiting.items() if pipe in ready]:
            try:
                kind, message = waiting[number].recv()
            except EOFError:
                processes[number].join()
                kind, message = "failed", f"RuntimeError: rank {number} died, exit code {processes[number].exitcode}"
            if kind == "said":
                outcome.said[number].append(message)
                continue
            del waiting[number]
            if kind == "failed":
                # an out-of-memory error is the cause of what its peers see, not the other way round
                if outcome.error is None or ("OutOfMemory" in message and "OutOfMemory" not in outcome.error):
                    outcome.error = message
                deadline = min(deadline, time.monotonic() + _GRACE)
    return outcome
