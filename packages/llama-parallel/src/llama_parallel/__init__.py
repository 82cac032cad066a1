"""Data, tensor, pipeline and context parallelism for Llama over torch.distributed."""

from importlib import import_module
from typing import TYPE_CHECKING

from llama_parallel.config import ParallelConfig as ParallelConfig
from llama_parallel.process import Process as Process
from llama_parallel.process import read_process as read_process
from llama_parallel.schedules import bubble as bubble

if TYPE_CHECKING:
    from llama_parallel.clip import clip_grad_norm_ as clip_grad_norm_
    from llama_parallel.clip import nonfinite_gradients as nonfinite_gradients
    from llama_parallel.evaluation import mean_loss as mean_loss
    from llama_parallel.gradients import MicroBatch as MicroBatch
    from llama_parallel.gradients import accumulate_gradients as accumulate_gradients
    from llama_parallel.layout import check_layout as check_layout
    from llama_parallel.logits import full_logits as full_logits
    from llama_parallel.mesh import build_mesh as build_mesh
    from llama_parallel.parallel import Parallel as Parallel
    from llama_parallel.parallel import ParallelPlan as ParallelPlan
    from llama_parallel.parallel import parallelize as parallelize
    from llama_parallel.sequence_shards import shard_sequence as shard_sequence
    from llama_parallel.sequence_shards import unshard_sequence as unshard_sequence
    from llama_parallel.shards import init_shards as init_shards
    from llama_parallel.shards import load_shards as load_shards

_LATER = {
    "clip_grad_norm_": "clip",
    "nonfinite_gradients": "clip",
    "mean_loss": "evaluation",
    "MicroBatch": "gradients",
    "accumulate_gradients": "gradients",
    "check_layout": "layout",
    "full_logits": "logits",
    "build_mesh": "mesh",
    "Parallel": "parallel",
    "ParallelPlan": "parallel",
    "parallelize": "parallel",
    "shard_sequence": "sequence_shards",
    "unshard_sequence": "sequence_shards",
    "init_shards": "shards",
    "load_shards": "shards",
}


def __getattr__(name: str) -> object:
    # These need torch and its DTensors, which take seconds to import; sizes and help texts must not wait for them.
    if name in _LATER:
        return getattr(import_module(f"llama_parallel.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
