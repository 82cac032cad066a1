"""One step of training as the planner sees it: a model, a layout, a batch, and what is stored in which precision."""

from __future__ import annotations

from dataclasses import dataclass

from llama_core import LlamaConfig
from llama_parallel.config import ParallelConfig


@dataclass(frozen=True)
class Precision:
    """Bytes of an element, by what it is."""

    parameter: int
    """Of parameters at rest."""
    compute: int
    """Of products and activations, and of parameters while they are gathered for them."""
    reduce: int
    """In which FSDP's ranks sum gradients."""
    moment: int
    """Of each of AdamW's two moments."""
    master: int = 0
    """Of the optimizer's own copy of the parameters and of their summed gradients; 0: there is none."""


PRECISIONS = {
    "mixed": Precision(parameter=4, compute=2, reduce=4, moment=4),
    "master": Precision(parameter=2, compute=2, reduce=4, moment=4, master=4),
    "bfloat16": Precision(parameter=2, compute=2, reduce=4, moment=2),
    "float32": Precision(parameter=4, compute=4, reduce=4, moment=4),
    "float64": Precision(parameter=8, compute=8, reduce=8, moment=8),
}
"""mixed: float32 parameters that FSDP2 gathers in bfloat16 (it is used whatever the layout). master: bfloat16
parameters and an optimizer with float32 copies of them. bfloat16: nothing else, "pure"."""


@dataclass(frozen=True)
class Work:
    """Everything that memory, communication and time of a step depend on."""

    model: LlamaConfig
    layout: ParallelConfig
    sequence_length: int
    global_batch: int
    """Rows of a step, over all data-parallel ranks."""
    micro_batch: int = 1
    """Rows that pass through the model at once on a rank."""
    precision: str = "mixed"
    checkpointing: str = "none"
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    """Of the pipeline; more than 1 with schedules that interleave."""
    context: str = "ring"
    sequence_parallel: bool = True
    kernels: bool = True
    """llama_kernels' operations; otherwise the plain ones, which store more."""
    reshard_after_forward: bool | None = None
    """As in ParallelPlan: None means unless there are pipeline stages."""

    @property
    def bytes_of(self) -> Precision:
        """Element sizes."""
        return PRECISIONS[self.precision]

    @property
    def micro_batches(self) -> int:
        """Forward and backward passes of a rank in one step."""
        return self.global_batch // self.layout.dp // self.micro_batch

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch that a tensor-parallel group works on: a context-parallel rank's."""
        return self.micro_batch * self.sequence_length // self.layout.cp

    @property
    def stream_ranks(self) -> int:
        """Ranks that share the residual stream: those of tp, with sequence parallelism."""
        return self.layout.tp if self.sequence_parallel else 1

    @property
    def shards(self) -> int:
        """Ranks over which FSDP shards a parameter: dp_shard · cp."""
        return self.layout.dp_shard * self.layout.cp

    @property
    def fsdp(self) -> bool:
        """Whether FSDP2 is used: to shard, or for its mixed precision (see `parallelize`)."""
        return self.shards > 1 or self.bytes_of.parameter != self.bytes_of.compute

    @property
    def reshards(self) -> bool:
        """Whether a layer's gathered parameters are dropped between forward and backward."""
        return self.layout.pp == 1 if self.reshard_after_forward is None else self.reshard_after_forward
