"""Data, tensor, pipeline and context parallelism for Llama over torch.distributed."""

from llama_parallel.clip import clip_grad_norm_ as clip_grad_norm_
from llama_parallel.clip import nonfinite_gradients as nonfinite_gradients
from llama_parallel.config import ParallelConfig as ParallelConfig
from llama_parallel.gradients import MicroBatch as MicroBatch
from llama_parallel.gradients import accumulate_gradients as accumulate_gradients
from llama_parallel.layout import check_layout as check_layout
from llama_parallel.mesh import build_mesh as build_mesh
from llama_parallel.parallelize import Parallel as Parallel
from llama_parallel.parallelize import ParallelPlan as ParallelPlan
from llama_parallel.parallelize import parallelize as parallelize
from llama_parallel.process import Process as Process
from llama_parallel.process import read_process as read_process
from llama_parallel.shards import init_shards as init_shards
from llama_parallel.shards import load_shards as load_shards
