"""The processes of a run: started once, ended always, and the few things they tell each other besides tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from llama_parallel import Process

from .failures import FIRST, RankError, RemoteError
from .watchdog import Watchdog, backend_limit

T = TypeVar("T")

# While one process reads text or writes a checkpoint, the others wait as long as that takes; torchrun ends them if it
# dies.
_PATIENCE = timedelta(days=2)
_FAILED = "llama-train/failed"


@dataclass(frozen=True)
class World:
    """This process among all, its device, and a group of all on the CPU for words; no group where it is alone."""

    process: Process
    device: torch.device
    control: ProcessGroup | None = None
    watchdog: Watchdog | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process prints, and writes what is needed once."""
        return self.process.is_main

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.process.world_size

    def expect(self, what: str, parts: int = 1) -> None:
        """Begin something that all processes do together and that must end in time; see `Watchdog.expect`."""
        if self.watchdog is not None:
            self.watchdog.expect(what, parts)

    def rest(self) -> None:
        """Nothing has to end in time until the next `expect`."""
        if self.watchdog is not None:
            self.watchdog.rest()

    def barrier(self) -> None:
        """Wait for all."""
        if self.control is not None:
            dist.barrier(group=self.control)

    def gather(self, value: T) -> list[T]:
        """Everybody's value, in order of rank, on every process."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def main_does(self, work: Callable[[], T]) -> T:
        """What rank 0 gets from `work`, on every process; what it raises is raised everywhere."""
        if self.control is None:
            return work()
        outcome: list[Any] = [None, None]
        failure: Exception | None = None
        if self.is_main:
            try:
                outcome[0] = work()
            except Exception as error:
                failure, outcome[1] = error, str(error) or type(error).__name__
        dist.broadcast_object_list(outcome, src=0, group=self.control)
        if failure is not None:
            raise failure
        if outcome[1] is not None:
            raise RemoteError(outcome[1])
        result: T = outcome[0]
        return result

    def all_do(self, work: Callable[[], T]) -> T:
        """`work` here as everywhere; if it fails on one process, it fails on all."""
        if self.control is None:
            return work()
        failure: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as error:
            failure = error
        messages = self.gather(None if failure is None else str(failure) or type(failure).__name__)
        if failure is not None:
            raise failure
        for rank, message in enumerate(messages):
            if message is not None:
                raise RemoteError(f"rank {rank}: {message}")
        return result  # type: ignore[no-any-return]

    def start_largest(self, read: Callable[[], int]) -> Callable[[], int]:
        """Tell all a number, and go on; the function that comes back waits for the largest of all.

        Alone, the number is read when it is asked for; with others, now.
        """
        return read if self.control is None else self._start(read(), dist.ReduceOp.MAX)

    def start_sum(self, number: int) -> Callable[[], int]:
        """Tell all a number, and go on; the function that comes back waits for the sum of all."""
        return (lambda: number) if self.control is None else self._start(number, dist.ReduceOp.SUM)

    def _start(self, number: int, operation: Any) -> Callable[[], int]:
        # On the CPU, whatever the device: asking a GPU for a number would wait for all its queued work.
        value = torch.tensor([number])
        work = dist.all_reduce(value, op=operation, group=self.control, async_op=True)

        def result() -> int:
            assert work is not None
            work.wait()
            return int(value)

        return result

    def owns_failure(self) -> bool:
        """Whether the failure of this process is the first of all: what others see after it is its echo."""
        if self.control is None:
            return True
        try:
            # The first that adds gets 1. Where the host of this store is gone, so is rank 0, and what it had to say.
            first: bool = _store().add(_FAILED, 1) == 1
        except RuntimeError:
            return False
        return first


ALONE = World(Process(), torch.device("cpu"))
"""One process that asks nobody."""


@contextmanager
def enter_world(
    process: Process, device: torch.device, timeout: float, hangs: Callable[[], None] = lambda: None
) -> Iterator[World]:
    """Join the other processes, and leave them however this ends. Alone, nothing is started.

    A default process group that exists already, such as that of forked ranks in a test, is used and left.

    Args:
        process: of `which_process`.
        device: this process's.
        timeout: seconds for a collective, and for a step, as `Watchdog` has it.
        hangs: called where that passes, before the process ends.
    """
    if process.world_size == 1:
        yield World(process, device)
        return
    ours = not dist.is_initialized()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ours:
        backend = "nccl" if device.type == "cuda" else "gloo"
        bound = device if device.type == "cuda" else None  # else NCCL guesses the device of its first barrier
        dist.init_process_group(
            backend, timeout=backend_limit(timeout), device_id=bound, **restarted_store(process, timeout)
        )
    watchdog = Watchdog(process, _store(), timeout, hangs=hangs)
    try:
        control = dist.new_group(backend="gloo", timeout=_PATIENCE)
        assert isinstance(control, ProcessGroup)  # only a process outside the group gets something else
        world = World(process, device, control, watchdog)
        try:
            yield world
        except RemoteError:
            raise
        except Exception as error:
            if not world.owns_failure():
                raise RemoteError(str(error)) from error
            if lost_another(error):
                if "timed out" in str(error).lower():  # where nothing was expected: an evaluation
                    watchdog.tell("waited in vain for another process")
                line = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise RankError(f"rank {process.rank} lost another process, which died or hangs: {line}") from error
            error.add_note(FIRST)
            raise
    finally:
        watchdog.close()
        if ours:
            dist.destroy_process_group()


def _store() -> Any:
    """Of torch.distributed, shared by all processes."""
    return dist.distributed_c10d._get_default_store()


def restarted_store(process: Process, timeout: float, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What `init_process_group` needs besides, where torchrun has started the processes again; else nothing.

    Without --standalone or --rdzv-backend, all starts share one store, and there torch would find the addresses of the
    processes that are gone: each further start writes under a name of its own.
    """
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0":
        return {}
    by_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    untyped: Any = dist
    store = untyped.TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        process.world_size,
        is_master=not by_agent and process.is_main,
        timeout=backend_limit(timeout),
    )
    own = untyped.PrefixStore(f"llama-train/start-{attempt}", store)
    return {"store": own, "rank": process.rank, "world_size": process.world_size}


def lost_another(error: BaseException) -> bool:
    """Whether an error of torch.distributed says that another process is gone or does not answer."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def local_size(environ: dict[str, str] | None = None) -> int:
    """Processes of this host, as torchrun says; 1 where it says nothing."""
    return int((os.environ if environ is None else environ).get("LOCAL_WORLD_SIZE", "1"))
