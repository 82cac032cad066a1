"""Traces of some steps, and a record of allocations, as the section [profile] asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile

from .config import ProfileConfig
from .world import World

_ALLOCATIONS = 200_000  # of the latest allocations and frees, with their stacks


class Profiling:
    """Around the steps of a run; `before` and `after` are called for each step.

    Args:
        config: what to record.
        folder: for the files; made if something is recorded.
        world: this process.
        note: prints a line.

    Raises:
        ValueError: memory is to be recorded where there is no GPU.
    """

    def __init__(self, config: ProfileConfig, folder: Path, world: World, note: Callable[[str], None]) -> None:
        if config.memory and world.device.type != "cuda":
            raise ValueError(f"profile.memory is true; it records a GPU's memory, and device is {world.device.type!r}")
        self._config, self._folder, self._world, self._note = config, folder, world, note
        self._profile: profile | None = None
        self._records = False

    def before(self, step: int) -> None:
        """The step begins."""
        steps = self._config.steps
        if steps is None or self._profile is not None or not steps[0] <= step <= steps[1]:
            return
        activities = [ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=True, acc_events=True)
        self._profile.start()

    def after(self, step: int) -> None:
        """The step is done, on the GPU perhaps not yet."""
        if self._config.steps is not None and step == self._config.steps[1]:
            self._write_trace()
            self._write_memory()

    def __enter__(self) -> Profiling:
        config = self._config
        if config.steps is not None or config.memory or config.flight_recorder:
            self._folder.mkdir(parents=True, exist_ok=True)
        if config.memory:
            torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)
            self._records = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write_trace()  # the run ended in the middle of these steps
        self._write_memory()

    def _write_trace(self) -> None:
        if self._profile is None:
            return
        running, self._profile = self._profile, None
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        running.stop()
        path = self._path("steps", "json")
        running.export_chrome_trace(str(path))
        self._note(f"traced     {path}")

    def _write_memory(self) -> None:
        if not self._records:
            return
        self._records = False
        path = self._path("memory", "pickle")
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
        self._note(f"traced     {path}")

    def _path(self, name: str, suffix: str) -> Path:
        return self._folder / f"{name}-rank-{self._world.process.rank}.{suffix}"
