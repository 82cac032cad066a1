"""Data, tensor, pipeline and context parallelism for Llama over torch.distributed."""

from llama_parallel.config import ParallelConfig as ParallelConfig
from llama_parallel.layout import check_layout as check_layout
from llama_parallel.mesh import build_mesh as build_mesh
from llama_parallel.process import Process as Process
from llama_parallel.process import read_process as read_process
