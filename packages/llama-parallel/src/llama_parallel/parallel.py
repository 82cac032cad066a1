"""`parallelize`: from a model on the meta device and a mesh to a model that runs on all ranks. The order matters:

TP changes which parameters there are, activation checkpointing and compilation wrap a layer's arithmetic and TP's
collectives, and FSDP's hooks lie around all that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from llama_core import Attend, Llama, compile_layers, set_activation_checkpointing

from .data_parallel import apply_fsdp
from .mesh import batch_group, parameter_mesh
from .replicate import Replication
from .tensor_parallel import apply_tensor_parallel

_KEPT = ("_c10d_functional::reduce_scatter_tensor", "_c10d_functional::all_reduce")
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

    attend: Attend | None = None
    """Attention; with cp > 1 one that knows the other ranks' keys. None: the model's own."""


@dataclass(frozen=True)
class Parallel:
    """A model on all ranks, and what belongs to it."""

    model: Llama
    mesh: DeviceMesh
    plan: ParallelPlan
    replication: Replication | None = None
    """Where every data-parallel rank holds all parameters: what sums their gradients."""

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
        ValueError: the model does not fit the mesh (see `check_layout` for all reasons at once), or cp > 1 without
            an attention that knows of it.
    """
    plan = ParallelPlan() if plan is None else plan
    if mesh["cp"].size() > 1 and plan.attend is None:
        raise ValueError(f"cp = {mesh['cp'].size()} needs plan.attend: attention that sees the other ranks' keys")
    if plan.attend is not None:
        model.attend = plan.attend
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
