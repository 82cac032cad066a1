"""How many ways each kind of parallelism splits the work."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the mesh dimensions. Their product is the number of processes; the default is one process.

    Raises ValueError for a size that is no whole number of at least 1.
    """

    dp_replicate: int = 1
    """Data parallelism with a full copy of the parameters in each group (HSDP's outer dimension)."""

    dp_shard: int = 1
    """Data parallelism with parameters, gradients and optimizer state sharded over the group (FSDP)."""

    cp: int = 1
    """Context parallelism: the processes that share one sequence."""

    tp: int = 1
    """Tensor parallelism: the processes that share each matrix."""

    pp: int = 1
    """Pipeline parallelism: the stages that share the layers."""

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            # bool is an int in Python: tp = true in a TOML file would otherwise pass for 1.
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{field.name} = {size!r}: must be a whole number of at least 1")

    @property
    def dp(self) -> int:
        """Replicas of the model that see different data: dp_replicate × dp_shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_processes(self) -> int:
        """Processes that this layout needs."""
        return math.prod(getattr(self, field.name) for field in fields(self))

    def check(self, world_size: int) -> None:
        """Raise ValueError unless exactly `world_size` processes make up this layout."""
        if self.num_processes != world_size:
            sizes = " × ".join(f"{field.name} {getattr(self, field.name)}" for field in fields(self))
            raise ValueError(f"{sizes} = {self.num_processes} processes, but {world_size} were started")
