"""Fast kernels for Llama: Triton and flash attention, each with a plain-torch oracle."""

from llama_kernels.attention import attention as attention
from llama_kernels.attention import attention_backward as attention_backward
from llama_kernels.attention import attention_forward as attention_forward
from llama_kernels.attention_backends import attention_backend as attention_backend
from llama_kernels.backends import backends as backends
from llama_kernels.fp8_linear import fp8_linear as fp8_linear
from llama_kernels.fp8_linear import quantize_fp8 as quantize_fp8
from llama_kernels.fp8_matmul import fp8_matmul as fp8_matmul
from llama_kernels.int4_linear import int4_linear as int4_linear
from llama_kernels.int4_linear import quantize_int4 as quantize_int4
from llama_kernels.int8_linear import int8_linear as int8_linear
from llama_kernels.int8_linear import quantize_int8 as quantize_int8
from llama_kernels.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from llama_kernels.merge import merge_attention as merge_attention
from llama_kernels.ops import Ops as Ops
from llama_kernels.ops import ops as ops
from llama_kernels.paged_attention import paged_attention as paged_attention
from llama_kernels.rms_norm import add_rms_norm as add_rms_norm
from llama_kernels.rms_norm import rms_norm as rms_norm
from llama_kernels.rope import rope as rope
from llama_kernels.sample import sample as sample
from llama_kernels.swiglu import swiglu as swiglu
from llama_kernels.write_kv import write_kv as write_kv
