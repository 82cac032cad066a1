"""Fast kernels for Llama: Triton and flash attention, each with a plain-torch oracle."""

from llama_kernels.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from llama_kernels.ops import Ops as Ops
from llama_kernels.ops import ops as ops
from llama_kernels.rms_norm import add_rms_norm as add_rms_norm
from llama_kernels.rms_norm import rms_norm as rms_norm
from llama_kernels.rope import rope as rope
from llama_kernels.swiglu import swiglu as swiglu
