"""Keys of [profile]: where time, memory and collectives go. All of it is written into RUN/traces, a file per rank."""

from __future__ import annotations

from dataclasses import dataclass

from .config_checks import require


@dataclass(frozen=True)
class ProfileConfig:
    """What is recorded, for a look with a viewer; nothing by default."""

    steps: tuple[int, int] | None = None
    """First and last step whose operations are traced: steps-rank-N.json, a Chrome trace, for ui.perfetto.dev. They
    are slower; leave the first steps out, which are no example."""
    memory: bool = False
    """On a GPU: record every allocation, and write memory-rank-N.pickle at the end of profile.steps, or of the run, or
    when memory runs out; pytorch.org/memory_viz shows it."""
    flight_recorder: int = 0
    """On several GPUs: how many of the latest collectives NCCL keeps, to be written as collectives-N when a step hangs
    (2000, say); 0 keeps none. `python -m torch.distributed.flight_recorder.fr_trace` reads them."""

    def __post_init__(self) -> None:
        steps = self.steps
        wanted = "a first step of at least 1 and a last one not before it"
        require(steps is None or 1 <= steps[0] <= steps[1], "profile.steps", steps, wanted)
        require(self.flight_recorder >= 0, "profile.flight_recorder", self.flight_recorder, "0 or more")
