"""`parallelize`: from a model on the meta device and a mesh to a model that runs on all ranks. The order matters:

TP changes which parameters there are, activation checkpointing and compilation wrap a layer's arithmetic and TP's
collectives, and FSDP's hooks lie around all that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from llama_core import Attend, Llama, compile_layers, set_activation_checkpointing

from .context_parallel import check_context, context_attend
from .data_parallel import apply_fsdp
from .deferred_products import defer_products
from .mesh import batch_group, parameter_mesh
from .pipeline import Pipeline
from .replicate import Replication
from .schedules import stages_of_rank
from .sequence_shards import shard_positions
from .stage_layers import stage_layers
from .stages import cut, separate
from .tensor_parallel import apply_tensor_parallel

_KEPT = tuple(f"_c10d_functional::{name}" for name in ("reduce_scatter_tensor", "all_reduce", "all_to_all_single"))
"""What selective checkpointing keeps besides products: the results of communication."""


@dataclass(frozen=True)
class ParallelPlan:
    """What `parallelize` does besides what the mesh's sizes say."""

    sequence_parallel: bool = True
    """Tensor-parallel ranks share the sequence between products. Off for decoding, where it has one token."""

    overlap_tp: bool = False
    """With sequence parallelism, hide what tp sends forward, too, behind halves of products (smaller ones, so it pays
    where they are large). Not with compile or selective checkpointing, which see no product in such halves."""

    activation_checkpointing: str = "none"
    """"none", "selective" or "full"; see llama_core.set_activation_checkpointing."""

    compile: bool = False
    """torch.compile each layer."""

    compile_options: Mapping[str, Any] = field(default_factory=dict)
    """Given to torch.compile."""

    compute_dtype: torch.dtype | None = None
    """In which products are computed and parameters sent; None: that of the parameters. bfloat16 beside float32
    parameters is the usual mixed precision."""

    reduce_dtype: torch.dtype | None = None
    """In which data-parallel ranks sum gradients; None: float32, or the parameters' own if that is wider."""

    reshard_after_forward: bool | None = None
    """Drop gathered parameters between forward and backward. False: keep them to the last micro-batch's backward, one
    all-gather in a step, for whom the whole model fits. None: drop them, unless there are pipeline stages."""

    context: str = "ring"
    """How cp shares a sequence: "ring" or "ulysses"."""

    attention: str | None = None
    """Backend of llama_kernels.attention, with cp > 1 and for packed documents. None: the fastest that can serve."""

    schedule: str = "1f1b"
    """Order of micro-batches with pp > 1: "gpipe", "1f1b", "interleaved_1f1b" or "zero_bubble"; see schedules."""

    virtual_stages: int | None = None
    """Pipeline stages of each rank. None: 2 with "interleaved_1f1b", otherwise 1."""

    layers_per_stage: tuple[int, ...] | None = None
    """Layers of each pipeline stage, pp · virtual_stages numbers. None: balanced by cost, head counted."""

    attend: Attend | None = None
    """Attention where there are no packed documents. None: `context_attend` with cp > 1, otherwise the model's own."""


@dataclass(frozen=True)
class Parallel:
    """A model on all ranks, and what belongs to it."""

    model: Llama
    mesh: DeviceMesh
    plan: ParallelPlan
    replication: Replication | None = None
    """Where every data-parallel rank holds all parameters: what sums their gradients."""
    pipeline: Pipeline | None = None
    """With pp > 1: what runs `model`, which is then this rank's part of it."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """The model's hidden states of this rank's share of the tokens.

        Args:
            tokens: (B, S), of `shard_sequence` with cp > 1.
            positions: (B or 1, S), shared likewise. None: 0, 1, … along the whole row.
            documents: (B, S), shared likewise: see `MicroBatch`. With cp > 1 the ranks of cp then talk.

        Raises:
            ValueError: documents of another shape than tokens.
        """
        hidden: Tensor = self.model(tokens, *self.inputs(tokens, positions, documents))
        return hidden

    def inputs(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> tuple[Tensor | None, Attend]:
        """Positions and attention with which the model, or each stage of a pipeline, takes tokens (B, S)."""
        if documents is not None and documents.shape != tokens.shape[:2]:
            raise ValueError(f"documents {tuple(documents.shape)} do not fit tokens {tuple(tokens.shape[:2])}")
        if positions is None and self.mesh["cp"].size() > 1:
            positions = shard_positions(tokens.shape[1], self.mesh, self.plan.context, tokens.device)
        if positions is None and self.pipeline is not None:  # a later stage cannot tell the length: it sees a share
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        return positions, self.attend_to(documents)

    def attend_to(self, documents: Tensor | None) -> Attend:
        """Attention of one micro-batch: the model's, or one that stays within this rank's shard of documents (B, S)."""
        if documents is None:
            return self.model.attend
        return context_attend(self.mesh, self.plan.context, documents, self.plan.attention)

    def set_gradient_sync(self, enabled: bool) -> None:
        """Whether the next backward pass sums gradients over data-parallel ranks; off for all but the last micro-batch.

        With FSDP gradients are then kept whole, not in shards, until the last.
        """
        if self.replication is not None:
            self.replication.set_requires_gradient_sync(enabled)
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(enabled)
            if self.plan.reshard_after_forward is False:
                self.model.set_reshard_after_backward(enabled)


def parallelize(model: Llama, mesh: DeviceMesh, plan: ParallelPlan | None = None) -> Parallel:
    """Share `model` over `mesh`, in place: cut into stages, TP, checkpointing, compilation, then FSDP or replication.

    Then give it weights with `init_shards` or `load_shards`. A model that has weights already keeps them: each rank
    takes its part.

    dp_shard · cp > 1 shards parameters with FSDP2, over dp_replicate · dp_shard · cp as HSDP; dp_replicate alone
    replicates them. A compute dtype other than the parameters' takes FSDP2 in any case, for its mixed precision.

    Args:
        model: whole; on the meta device, or with weights alike on all ranks. With pp > 1 it loses the layers of others.
        mesh: of `build_mesh`.
        plan: the rest.

    Raises:
        ValueError: the model does not fit the mesh or plan (see `check_layout` for all reasons at once).
    """
    plan = ParallelPlan() if plan is None else plan
    if plan.overlap_tp and (plan.compile or plan.activation_checkpointing == "selective"):
        raise ValueError("overlap_tp goes neither with compile nor with selective activation checkpointing")
    check_context(model.config, mesh, plan.context)
    pp, virtual = mesh["pp"].size(), stages_of_rank(plan.schedule, plan.virtual_stages)
    stages = stage_layers(model.config, pp * virtual, plan.layers_per_stage) if pp > 1 else ()
    own = range(mesh.get_local_rank("pp"), len(stages), pp)
    if stages:
        cut(model, stages, own)
    if plan.attend is not None:
        model.attend = plan.attend
    elif mesh["cp"].size() > 1:
        model.attend = context_attend(mesh, plan.context, backend=plan.attention)
    if mesh["tp"].size() > 1:
        apply_tensor_parallel(model, mesh, plan.sequence_parallel, plan.overlap_tp)
    set_activation_checkpointing(model, plan.activation_checkpointing, keep=_KEPT)
    if plan.compile:
        compile_layers(model, **plan.compile_options)
    parts = separate(model, stages, own) if stages else (model,)

    dtype = next(model.parameters()).dtype
    mixed = plan.compute_dtype not in (None, dtype)
    data = parameter_mesh(mesh)
    sharded = data["dp_shard_cp"].size() > 1 or mixed
    if sharded:
        for part in parts:
            apply_fsdp(
                part,
                mesh,
                compute_dtype=plan.compute_dtype,
                reduce_dtype=plan.reduce_dtype or torch.promote_types(dtype, torch.float32),
                reshard_after_forward=pp == 1 if plan.reshard_after_forward is None else plan.reshard_after_forward,
            )
    replicas = batch_group(mesh) if not sharded and data["dp_replicate"].size() > 1 else None
    if stages:
        deferred = {}
        if plan.schedule == "zero_bubble":
            if plan.compile:
                raise ValueError("zero_bubble does not go with compile: what is put off leaves no trace in a graph")
            deferred = {index: defer_products(part) for index, part in zip(own, parts, strict=True)}
        of_index = dict(zip(own, parts, strict=True))
        pipeline = Pipeline(model, of_index, len(stages), plan.schedule, mesh, deferred, replicas)
        return Parallel(model, mesh, plan, pipeline=pipeline)
    return Parallel(model, mesh, plan, None if replicas is None else Replication(model, replicas))
