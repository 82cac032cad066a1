"""From the section [parallel] to a layout that was checked, and to what `llama_parallel.parallelize` wants to know."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from llama_core import LlamaConfig
from llama_parallel import ParallelConfig, Process, check_layout, read_process

from .config import TrainConfig
from .config_parallel import ParallelSettings

if TYPE_CHECKING:
    from llama_parallel import ParallelPlan

_RESHARD = {"auto": None, "yes": True, "no": False}


def which_process(environ: Mapping[str, str] = os.environ) -> Process:
    """This process among all: of the process group that exists, else as torchrun's environment says, else alone."""
    import torch.distributed as dist

    if dist.is_initialized():
        return Process(dist.get_rank(), dist.get_world_size(), dist.get_rank())
    return read_process(environ)


def fill_in(settings: ParallelSettings, processes: int) -> ParallelSettings:
    """The settings with dp_shard = 0 replaced by what is left of so many processes.

    Raises:
        ValueError: the sizes do not make up so many processes.
    """
    rest = settings.dp_replicate * settings.cp * settings.tp * settings.pp
    if settings.dp_shard == 0:
        if processes % rest:
            raise ValueError(
                f"{_product(settings)} = {rest} processes do not divide the {processes} that were started: "
                f"start a multiple, torchrun --nproc-per-node {rest} …, or change [parallel]"
            )
        return replace(settings, dp_shard=processes // rest)
    if settings.dp_shard * rest != processes:
        wanted = settings.dp_shard * rest
        raise ValueError(
            f"{_product(settings)} = {wanted} processes, but {processes} {'was' if processes == 1 else 'were'} "
            f"started: torchrun --nproc-per-node {wanted} …, or change [parallel]"
        )
    return settings


def _product(settings: ParallelSettings) -> str:
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
    return " × ".join(f"parallel.{name} {getattr(settings, name)}" for name in names if getattr(settings, name) > 1)


def sizes(settings: ParallelSettings) -> ParallelConfig:
    """The mesh's sizes, of settings that are filled in."""
    return ParallelConfig(settings.dp_replicate, settings.dp_shard, settings.cp, settings.tp, settings.pp)


def check_parallel(config: TrainConfig, shape: LlamaConfig) -> None:
    """Raise ValueError for a layout or schedule that cannot train this model with these batches.

    Args:
        config: resolved.
        shape: the model's.
    """
    settings = config.parallel
    check_layout(
        sizes(settings),
        shape,
        sequence_length=config.data.sequence_length,
        global_batch=config.rows_per_step,
        context=settings.context,
        sequence_parallel=settings.sequence_parallel,
        schedule=settings.schedule,
        virtual_stages=settings.virtual_stages,
        layers_per_stage=settings.layers_per_stage,
        micro_batches=config.data.gradient_accumulation_steps,
    )
    if settings.cp > 1 and config.attention == "plain":
        raise ValueError("attention is 'plain'; with parallel.cp above 1 it must be auto, flash or triton")
    if settings.overlap_tp and (config.compile or config.activation_checkpointing == "selective"):
        raise ValueError(
            "parallel.overlap_tp goes neither with compile = true nor with activation_checkpointing = 'selective'"
        )
    if settings.pp > 1 and settings.schedule == "zero_bubble" and config.compile:
        raise ValueError("parallel.schedule is 'zero_bubble', which does not go with compile = true")


def plan_of(config: TrainConfig) -> ParallelPlan:
    """What `parallelize` does besides the sizes."""
    import torch

    from llama_parallel import ParallelPlan

    settings = config.parallel
    dtype: torch.dtype = getattr(torch, config.dtype)
    return ParallelPlan(
        sequence_parallel=settings.sequence_parallel,
        overlap_tp=settings.overlap_tp,
        activation_checkpointing=config.activation_checkpointing,
        compile=config.compile,
        compute_dtype=dtype if keeps_float32(config) else None,
        reshard_after_forward=_RESHARD[settings.reshard_after_forward],
        context=settings.context,
        attention=config.attention if config.attention in ("flash", "triton") else None,
        schedule=settings.schedule,
        virtual_stages=settings.virtual_stages,
        layers_per_stage=settings.layers_per_stage,
    )


def keeps_float32(config: TrainConfig) -> bool:
    """Whether weights rest in float32 while products are bfloat16: the master weights of a layout."""
    return config.dtype == "bfloat16" and config.optimizer.master_weights
