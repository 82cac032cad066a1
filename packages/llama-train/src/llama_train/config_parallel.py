"""How many processes share the work, and how: the section [parallel]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .config_checks import finite_and, require


@dataclass(frozen=True)
class ParallelSettings:
    """Layout of a run on several processes (torchrun starts them). The product of the five sizes is their number."""

    dp_replicate: int = 1
    """Data parallelism, parameters whole in each group (with dp_shard: the groups among which shards are repeated)."""
    dp_shard: int = 0
    """Data parallelism, parameters, gradients and moments in shards (FSDP). 0: all processes that are left."""
    cp: int = 1
    """Context parallelism: processes that share a sequence, for long ones."""
    tp: int = 1
    """Tensor parallelism: processes that share every matrix; keep it within a host."""
    pp: int = 1
    """Pipeline parallelism: stages that share the layers; data.gradient_accumulation_steps flow through at once."""
    sequence_parallel: bool = True
    """With tp: norms and the residual stream are shared along the sequence too."""
    overlap_tp: bool = False
    """With tp and sequence_parallel: what is sent forward hides behind halves of products; for large products."""
    context: Literal["ring", "ulysses"] = "ring"
    """With cp: keys go round in a ring, or heads are exchanged for tokens (ulysses)."""
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] = "1f1b"
    """With pp: the order of forward and backward passes."""
    virtual_stages: int | None = None
    """With pp: stages of each process; unset means 2 with interleaved_1f1b, otherwise 1."""
    layers_per_stage: tuple[int, ...] | None = None
    """With pp: decoder layers of each stage; unset means balanced by cost, the head counted."""
    reshard_after_forward: Literal["auto", "yes", "no"] = "auto"
    """With dp_shard: drop gathered parameters between forward and backward; auto does unless pp is above 1."""
    timeout: float = 600.0
    """Seconds after which a process that waits for another gives up."""

    def __post_init__(self) -> None:
        require(self.dp_shard >= 0, "parallel.dp_shard", self.dp_shard, "0 (what is left) or more")
        for name in ("dp_replicate", "cp", "tp", "pp"):
            require(getattr(self, name) >= 1, f"parallel.{name}", getattr(self, name), "at least 1")
        virtual = self.virtual_stages
        require(virtual is None or virtual >= 1, "parallel.virtual_stages", virtual, "at least 1")
        layers = self.layers_per_stage
        require(layers is None or min(layers, default=0) >= 0, "parallel.layers_per_stage", layers, "0 or more each")
        require(finite_and(self.timeout, self.timeout > 0), "parallel.timeout", self.timeout, "above 0")
