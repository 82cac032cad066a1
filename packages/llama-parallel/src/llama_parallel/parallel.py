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
from .mesh import batch_group, parameter_mesh
from .replicate import Replication
from .sequence_shards import shard_positions
from .tensor_parallel import apply_tensor_parallel

_KEPT = tuple(f"_c10d_functional::{name}" for name in ("reduce_scatter_tensor", "all_reduce", "all_to_all_single"))
"""What selective checkpointing keeps besides products: the results of communication."""


@dataclass(frozen=True)
class ParallelPlan:
    """What `parallelize` does besides what the mesh's sizes say."""

    sequence_parallel: bool = True
    """Tensor-parallel ranks share the sequence between products. Off for decoding, where it has one token."""

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
    """Drop gathered parameters between forward and backward. None: unless there are pipeline stages, where each
    micro-batch would gather them anew."""

    context: str = "ring"
    """How cp shares a sequence: "ring" or "ulysses"."""

    attention: str | None = None
    """Backend of llama_kernels.attention, with cp > 1 and for packed documents. None: the fastest that can serve."""

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

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """The model's hidden states of this rank's share of the tokens.

        Args:
            tokens: (B, S), of `shard_sequence` with cp > 1; on later pipeline stages the hidden states that came.
            positions: (B or 1, S), shared likewise. None: 0, 1, … along the whole row.
            documents: (B, S), shared likewise: see `MicroBatch`. With cp > 1 the ranks of cp then talk.

        Raises:
            ValueError: documents of another shape than tokens.
        """
        if documents is not None and documents.shape != tokens.shape[:2]:
            raise ValueError(f"documents {tuple(documents.shape)} do not fit tokens {tuple(tokens.shape[:2])}")
        if positions is None and self.mesh["cp"].size() > 1:
            positions = shard_positions(tokens.shape[1], self.mesh, self.plan.context, tokens.device)
        hidden: Tensor = self.model(tokens, positions, self.attend_to(documents))
        return hidden

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


def parallelize(model: Llama, mesh: DeviceMesh, plan: ParallelPlan | None = None) -> Parallel:
    """Share `model` over `mesh`, in place: TP, activation checkpointing, compilation, then FSDP or replication.

    Then give it weights with `init_shards` or `load_shards`. A model that has weights already keeps them: each rank
    takes its part.

    dp_shard · cp > 1 shards parameters with FSDP2, over dp_replicate · dp_shard · cp as HSDP; dp_replicate alone
    replicates them. A compute dtype other than the parameters' takes FSDP2 in any case, for its mixed precision.

    Args:
        model: on the meta device, or with weights alike on all ranks; may be a pipeline stage with parts missing.
        mesh: of `build_mesh`.
        plan: the rest.

    Raises:
        ValueError: the model does not fit the mesh (see `check_layout` for all reasons at once), or an unknown context.
    """
    plan = ParallelPlan() if plan is None else plan
    check_context(model.config, mesh, plan.context)
    if plan.attend is not None:
        model.attend = plan.attend
    elif mesh["cp"].size() > 1:
        model.attend = context_attend(mesh, plan.context, backend=plan.attention)
    if mesh["tp"].size() > 1:
        apply_tensor_parallel(model, mesh, plan.sequence_parallel)
    set_activation_checkpointing(model, plan.activation_checkpointing, keep=_KEPT)
    if plan.compile:
        compile_layers(model, **plan.compile_options)

    dtype = next(model.parameters()).dtype
    mixed = plan.compute_dtype not in (None, dtype)
    data = parameter_mesh(mesh)
    if data["dp_shard_cp"].size() > 1 or mixed:
        reshard = mesh["pp"].size() == 1 if plan.reshard_after_forward is None else plan.reshard_after_forward
        apply_fsdp(
            model,
            mesh,
            compute_dtype=plan.compute_dtype,
            reduce_dtype=plan.reduce_dtype or torch.promote_types(dtype, torch.float32),
            reshard_after_forward=reshard,
        )
        return Parallel(model, mesh, plan)
    if data["dp_replicate"].size() > 1:
        return Parallel(model, mesh, plan, Replication(model, batch_group(mesh)))
    return Parallel(model, mesh, plan)
