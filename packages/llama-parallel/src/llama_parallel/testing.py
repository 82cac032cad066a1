"""Several ranks on one machine within a second or two, for tests: forked, so that nobody imports torch again."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_GRACE = 0.5
"""Seconds to wait for other failures after the first: what a lost peer causes may be seen before its cause."""

_IMPORTED_LATE = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo")
"""What a mesh and FSDP import when first used: once here instead of once in every rank (15 s for 16 on 2 cores)."""


class RankError(RuntimeError):
    """A rank raised, died or hung. The message holds its traceback."""


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, backend: str | None = "gloo"
) -> list[Any]:
    """Call `function(rank, *args)` in `world_size` forked processes that form the default process group.

    Every process computes with one thread. Functions and arguments are inherited, so closures work; results come
    back through pickle. When this returns or raises, no process is left.

    Args:
        function: what each rank does.
        world_size: number of ranks.
        args: given to every rank.
        timeout: seconds for all together, and for each collective.
        backend: of the process group; `None` makes none.

    Returns:
        What the ranks returned, in order.

    Raises:
        RankError: with the first failing rank's traceback, or, after `timeout`, with where each rank stands.
    """
    for module in _IMPORTED_LATE:
        importlib.import_module(module)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes: list[ForkProcess] = []
        pipes: list[Connection] = []
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                work = (function, rank, world_size, args, timeout, backend, Path(folder), sender, os.getpid())
                process = context.Process(target=_rank, args=work, daemon=True)
                with warnings.catch_warnings():
                    # Python 3.12 warns of forks beside threads. The ranks use none of the parent's threads or locks.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                sender.close()
                processes.append(process)
                pipes.append(receiver)
            return _collect(processes, pipes, time.monotonic() + timeout, Path(folder))
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process in processes:
                process.join()
            for pipe in pipes:
                pipe.close()


def _rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    timeout: float,
    backend: str | None,
    folder: Path,
    sender: Connection,
    parent: int,
) -> None:
    # What the parent has left as garbage may own threads that a fork does not copy; collecting a process group of gloo
    # here waits for them for ever.
    gc.freeze()
    torch.set_num_threads(1)  # also keeps the child off the parent's OpenMP threads, which a fork does not copy
    os.environ["OMP_NUM_THREADS"] = "1"
    with open(folder / f"stack-{rank}.txt", "w") as stack:
        faulthandler.enable(file=stack)  # gloo aborts where collectives do not match
        faulthandler.dump_traceback_later(timeout, file=stack)
        try:
            if backend is not None:
                store = torch._C._distributed_c10d.FileStore(str(folder / "store"), world_size)
                patience = timedelta(seconds=timeout)
                dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=patience)
            message = pickle.dumps((None, time.monotonic(), function(rank, *args)))
        except BaseException:
            message = pickle.dumps((traceback.format_exc(), time.monotonic(), None))
        sender.send_bytes(message)
        sender.close()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
    sys.stdout.flush()
    sys.stderr.flush()
    # The sockets stay open until every rank has answered and the parent ends us all: a peer that is still connecting
    # or receiving must not see them close.
    while os.getppid() == parent:
        time.sleep(0.05)
    os._exit(0)


def _collect(processes: list[ForkProcess], pipes: list[Connection], deadline: float, folder: Path) -> list[Any]:
    """Wait for every rank's message, or for the first failure."""
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, str]] = []
    waiting = dict(enumerate(pipes))
    while waiting:
        patience = deadline - time.monotonic()
        ready = wait(list(waiting.values()), timeout=max(patience, 0.0))
        if not ready:
            if failures:
                break
            raise RankError(_hung(processes, sorted(waiting), folder))
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            try:
                error, moment, result = pickle.loads(waiting.pop(rank).recv_bytes())
            except EOFError:
                processes[rank].join()
                stack = (folder / f"stack-{rank}.txt").read_text()
                failures.append((0.0, rank, f"died with exit code {processes[rank].exitcode}\n{stack}"))
                continue
            if error is None:
                results[rank] = result
            else:
                failures.append((moment, rank, f"raised\n{error}"))
        if failures:
            deadline = min(deadline, time.monotonic() + _GRACE)
    if failures:
        _, rank, text = min(failures)
        raise RankError(f"rank {rank} of {len(pipes)} {text}")
    return [results[rank] for rank in range(len(pipes))]


def _hung(processes: list[ForkProcess], ranks: list[int], folder: Path) -> str:
    time.sleep(_GRACE)  # the stacks are written at the same moment at which the parent gives up
    stacks = [f"rank {rank} stands at\n{(folder / f'stack-{rank}.txt').read_text()}" for rank in ranks]
    return f"ranks {ranks} of {len(processes)} have not finished in time\n" + "\n".join(stacks)
