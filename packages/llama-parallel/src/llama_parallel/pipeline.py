"""The pipeline: the stages of this rank, run by torch.distributed.pipelining's schedules.

Between stages travel hidden states, (B, S, E) or with sequence parallelism (B, S / tp, E), one way and their gradients
the other, micro-batch by micro-batch. Tokens, targets, positions and documents do not travel: every stage's rank has
its data-parallel group's micro-batches and takes from them what it needs. The last stage computes the loss from its
hidden states and its head's weight, so logits are as little whole here as anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from llama_core import Llama

from .data_parallel import widen_gradients
from .deferred_products import DeferredProducts
from .replicate import GradientBuckets
from .schedules import torch_schedule
from .tied_embedding import sum_ends

if TYPE_CHECKING:
    from .gradients import MicroBatch
    from .parallel import Parallel

LossOf = Callable[[Tensor, Llama, "MicroBatch"], Tensor]
"""Hidden states of the last stage, its model, the micro-batch → its contribution to the loss, a scalar."""


class Pipeline:
    """The stages of one rank, and their schedule.

    Args:
        model: all parameters of this rank.
        stages: its pieces by their number in the pipeline.
        count: stages of the whole pipeline.
        schedule: a name of `schedules.SCHEDULES`.
        mesh: of `build_mesh`.
        deferred: of each stage, with zero_bubble.
        replicas: ranks with copies of the same parameters, whose gradients are to be summed after the last
            micro-batch; None where FSDP does it or there are none.
    """

    def __init__(
        self,
        model: Llama,
        stages: dict[int, Llama],
        count: int,
        schedule: str,
        mesh: DeviceMesh,
        deferred: dict[int, DeferredProducts],
        replicas: ProcessGroup | None,
    ) -> None:
        self.model, self.stages, self.count, self.schedule = model, stages, count, schedule
        self.group, self.deferred, self.replicas = mesh.get_group("pp"), deferred, replicas
        self._buckets: GradientBuckets | None = None
        self._built: tuple[Any, Any] = (None, None)
        self._batches: Sequence[MicroBatch] = ()

    @property
    def last(self) -> Llama | None:
        """The model of the pipeline's last stage, if it is on this rank."""
        return self.stages.get(self.count - 1)

    def accumulate(self, parallel: Parallel, batches: Sequence[MicroBatch], loss_of: LossOf) -> Tensor | None:
        """Run all micro-batches forward and backward, sum gradients over replicas and between tied ends.

        What is summed here must not have been summed before: see `gradients.summed_later`.

        Args:
            parallel: this rank's model and mesh.
            batches: all of one shape, the same on every rank of the pipeline.
            loss_of: contributions that add up to the loss of the whole step.

        Returns:
            Their sum on the ranks of the last stage, else None.

        Raises:
            ValueError: micro-batches of several shapes, or as many as the schedule cannot run.
        """
        shapes = sorted({tuple(batch.tokens.shape) for batch in batches})
        if len(shapes) > 1:
            raise ValueError(f"micro-batches of shapes {shapes}: those of one step through a pipeline must be alike")
        schedule = self._schedule(parallel, len(batches), shapes[0])
        self._batches, self._parallel, self._loss_of = batches, parallel, loss_of
        losses: list[Tensor] = []
        # The targets of torch's signature are the micro-batches' numbers: what the loss needs is here already.
        schedule.step(target=torch.arange(len(batches)), losses=losses, return_outputs=False)
        self._batches = ()
        if self.replicas is not None:
            if self._buckets is None:
                self._buckets = GradientBuckets(self.model.parameters(), self.replicas)
                self._buckets.enabled = False
            self._buckets.finish()
        sum_ends(self.model, self.group)
        return None if self.last is None else torch.stack([loss.detach() for loss in losses]).sum()

    def hidden_shape(self, parallel: Parallel, tokens: Sequence[int]) -> tuple[int, int, int]:
        """Of what travels between stages, for tokens (B, S)."""
        rows, length = tokens
        share = parallel.mesh["tp"].size() if parallel.plan.sequence_parallel else 1
        return rows, length // share, self.model.config.hidden_size

    def hidden_dtype(self, parallel: Parallel) -> torch.dtype:
        """Of what travels between stages."""
        return parallel.plan.compute_dtype or next(self.model.parameters()).dtype

    def _schedule(self, parallel: Parallel, micro_batches: int, shape: tuple[int, ...]) -> Any:
        """torch's schedule with its stages; made anew when a step has another shape, for torch fixes its buffers."""
        key = (micro_batches, shape)
        if self._built[0] != key:
            stages = [self._stage(parallel, index, shape) for index in self.stages]
            self._built = key, torch_schedule(self.schedule, stages, micro_batches, self._loss)
        return self._built[1]

    def _stage(self, parallel: Parallel, index: int, shape: tuple[int, ...]) -> _Stage:
        device = next(self.model.parameters()).device
        meta: dict[str, Any] = {"device": "meta", "dtype": self.hidden_dtype(parallel), "requires_grad": True}
        hidden = torch.empty(self.hidden_shape(parallel, shape), **meta)
        tokens = torch.empty(shape, dtype=torch.int64, device="meta")
        deferred = self.deferred.get(index)
        stage = _Stage(
            self.stages[index],
            index,
            self.count,
            device,
            input_args=(tokens if index == 0 else hidden,),
            output_args=(hidden,),
            group=self.group,
            dw_builder=None if deferred is None else deferred.take,
        )
        stage.arguments = self._arguments
        return stage

    def _arguments(self, number: int) -> tuple[Tensor, dict[str, Any]]:
        """Tokens, and what every stage is called with besides its input, of one micro-batch."""
        batch = self._batches[number]
        positions, attend = self._parallel.inputs(batch.tokens, batch.positions, batch.documents)
        return batch.tokens, {"positions": positions, "attend": attend}

    def _loss(self, hidden: Tensor, number: Tensor) -> Tensor:
        assert self.last is not None
        return self._loss_of(hidden, self.last, self._batches[int(number)])


class _Stage(PipelineStage):
    """torch's stage, which asks for the arguments of each micro-batch instead of having them cut from one batch."""

    arguments: Callable[[int], tuple[Tensor, dict[str, Any]]]

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, kwargs: Any = None, *rest: Any, **named: Any) -> Any:
        tokens, keywords = self.arguments(fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, (tokens,) if self.is_first else (), keywords, *rest, **named)

    def backward_weight_one_chunk(self, *args: Any, **named: Any) -> None:
        super().backward_weight_one_chunk(*args, **named)
        widen_gradients(self.submod)
