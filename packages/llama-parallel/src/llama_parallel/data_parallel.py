"""Data parallelism by FSDP2: parameters, gradients and optimizer state sharded, gathered layer by layer while needed.

Per layer, forward: all-gather of the parameters over dp_shard · cp, in the compute dtype, behind the layer before it.
Backward: all-gather again, then reduce-scatter of the gradients in float32, behind the next layer's arithmetic, and
with HSDP an all-reduce of the shards over dp_replicate. (Zhao et al. 2023, https://arxiv.org/abs/2304.11277.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from llama_core import Llama
from llama_core.model import DecoderLayer

from .mesh import parameter_mesh
from .stages import reshard


def apply_fsdp(
    model: Llama,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """Shard every layer over dp_shard · cp, and replicate over dp_replicate, in place.

    Gradients are summed over ranks, not averaged: the loss is divided once, by the tokens of the whole global batch.

    Embedding (unless the head shares it) and layers are gathered one by one. Final norm and head stay gathered from the
    start of the forward pass to the end of the backward pass, since the loss takes the head's weight from outside.

    Args:
        model: after tensor parallelism, activation checkpointing and compilation.
        mesh: of `build_mesh`.
        compute_dtype: in which parameters are gathered and products computed; `None` means their own.
        reduce_dtype: in which gradients are summed; `None` means that of the computation.
        reshard_after_forward: drop a layer's gathered parameters between forward and backward: less memory, a second
            all-gather.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        cast_forward_inputs=False,  # the angles of rotary positions stay float32; the rest follows the embedding
    )
    data = parameter_mesh(mesh)
    if data["dp_replicate"].size() == 1:
        data = data["dp_shard_cp"]
    parts: list[nn.Module] = [layer for layer in model.model.layers if isinstance(layer, DecoderLayer)]
    embedding = model.model.embed_tokens
    if embedding is not None and (model.lm_head is None or embedding.weight is not model.lm_head.weight):
        parts.insert(0, embedding)
    for part in parts:
        fully_shard(part, mesh=data, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=data, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # the factor 1 as NCCL's "pre-multiplied sum" costs a kernel
    _gather_anew_after_evaluation(model)


def widen_gradients(model: nn.Module) -> None:
    """Bring gradients that were made outside of FSDP's backward passes into the dtype in which ranks sum them.

    FSDP does so at the end of its own passes, and refuses to sum a layer of both kinds. From torch 2.15 at the latest
    it lets autograd accumulate in that dtype from the start, and there is nothing to do.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
            for parameter in (parameter for group in groups if group is not None for parameter in group.fsdp_params):
                if hasattr(parameter, "to_accumulated_grad_if_needed"):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


def _gather_anew_after_evaluation(model: Llama) -> None:
    """What a forward pass without backward has gathered and kept would outlive the next optimizer step: drop it."""
    evaluated = False

    def after(module: nn.Module, *_: Any) -> None:
        nonlocal evaluated
        evaluated = not torch.is_grad_enabled()

    def before(module: nn.Module, *_: Any) -> None:
        if evaluated and torch.is_grad_enabled():
            reshard(module)

    model.register_forward_hook(after)
    model.register_forward_pre_hook(before, prepend=True)
