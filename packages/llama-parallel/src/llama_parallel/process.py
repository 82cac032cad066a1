"""Which of the started processes this one is: torchrun's environment, read once and passed around as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Process:
    """One process of a job. Alone, it is rank 0 of 1.

    Raises ValueError when the ranks are not 0 <= local_rank <= rank < world_size.
    """

    rank: int = 0
    """Number of this process in the whole job."""

    world_size: int = 1
    """Processes in the whole job."""

    local_rank: int = 0
    """Number of this process on its host: the index of its device."""

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size = {self.world_size}: must be at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank = {self.rank}: must be from 0 to {self.world_size - 1}")
        # Hosts before this one hold only ranks below ours, so a host-local number never exceeds the global one.
        if not 0 <= self.local_rank <= self.rank:
            raise ValueError(f"local_rank = {self.local_rank}: must be from 0 to rank {self.rank}")

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints and writes what is needed only once."""
        return self.rank == 0


def read_process(environ: Mapping[str, str]) -> Process:
    """The process that torchrun describes in `environ` (give it `os.environ`).

    With none of RANK, WORLD_SIZE and LOCAL_RANK there is one process. ValueError names what is missing or wrong;
    the variables are described at https://docs.pytorch.org/docs/stable/elastic/run.html.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    missing = [name for name in names if name not in environ]
    if len(missing) == len(names):
        return Process()
    if missing:
        given = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
        raise ValueError(f"{given} without {', '.join(missing)}: torchrun sets all three, one process needs none")

    values = {}
    for name in names:
        try:
            values[name] = int(environ[name])
        except ValueError:
            raise ValueError(f"{name} = {environ[name]!r}: must be a whole number") from None
    return Process(values["RANK"], values["WORLD_SIZE"], values["LOCAL_RANK"])
