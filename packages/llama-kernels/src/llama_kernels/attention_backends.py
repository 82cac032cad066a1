"""The table of attention backends: what each computes with, what it can serve, and which one a call gets.

A backend is a pair of functions, forward -> (out, lse) and backward -> (dq, dk, dv), and a function that says why it
cannot serve a call. `choose` is the only place where a choice is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from llama_kernels.attention_call import AttentionCall
from llama_kernels.compat import HAS_TRITON, INTERPRETING
from llama_kernels.flash_attention import (
    FLASH2,
    FLASH4,
    flash2_backward,
    flash2_forward,
    flash4_backward,
    flash4_forward,
    installed,
)
from llama_kernels.reference_attention import plain_backward, plain_forward
from llama_kernels.torch_attention import (
    cudnn_backward,
    cudnn_forward,
    flash_cpu_backward,
    flash_cpu_forward,
    flash_torch_backward,
    flash_torch_forward,
)
from llama_kernels.triton_attention import triton_forward
from llama_kernels.triton_attention_backward import triton_backward

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Backend:
    name: str
    why_not: Callable[[AttentionCall], str | None]  # None: it can
    forward: Callable[..., tuple[Tensor, Tensor]]  # (q, k, v, call, cu_q, cu_k)
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]  # (dout, q, k, v, out, lse, call, cu_q, cu_k)


def _needs_cuda_half(call: AttentionCall) -> str | None:
    if call.device.type != "cuda":
        return f"it needs a CUDA device, and the tensors are on {call.device.type}"
    if call.dtype not in HALF:
        return f"it takes float16 and bfloat16, not {str(call.dtype).removeprefix('torch.')}"
    if torch.cuda.get_device_capability(call.device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or later"
    if call.head_dim % 8:
        return f"head widths must be multiples of 8, not {call.head_dim}"
    return None


def _why_not_flash4(call: AttentionCall) -> str | None:
    if not installed(FLASH4):
        return "the package flash-attn-4 is not installed"
    if reason := _needs_cuda_half(call):
        return reason
    if torch.cuda.get_device_capability(call.device) < (9, 0):
        return "it needs a GPU of compute capability 9.0 or later"
    if call.head_dim % 32:  # width 40 gave wrong gradients in 4.0.0b36 on an H200; 32, 64, 96, 128, 192, 256 are right
        return f"head widths are trusted at multiples of 32, not {call.head_dim}"
    return None if call.bottom_right else f"its causal mask is the bottom-right one, not q_offset={call.q_offset}"


def _why_not_flash2(call: AttentionCall) -> str | None:
    if not installed(FLASH2):
        return "the package flash-attn (version 2) is not installed"
    return _why_not_flash_torch(call)


def _why_not_flash_torch(call: AttentionCall) -> str | None:
    if reason := _needs_cuda_half(call):
        return reason
    return None if call.bottom_right else f"its causal mask is the bottom-right one, not q_offset={call.q_offset}"


def _why_not_cudnn(call: AttentionCall) -> str | None:
    if reason := _needs_cuda_half(call):
        return reason
    if call.packed:
        return "packed documents are not passed to cuDNN"
    if call.head_dim > 128:
        return f"head widths go to 128, not {call.head_dim}"
    if call.causal and (call.q_offset != 0 or call.seq_q != call.seq_k):
        return f"its causal mask needs as many queries as keys, not {call.seq_q} and {call.seq_k}"
    if call.seq_q < 2:
        return "a single query is not passed to cuDNN"
    return None


def _why_not_triton(call: AttentionCall) -> str | None:
    if not HAS_TRITON:
        return "the package triton is not installed"
    if call.device.type != "cuda" and not (call.device.type == "cpu" and INTERPRETING):
        return f"it needs a CUDA device, and the tensors are on {call.device.type}"
    return "it computes in float32 and takes no float64" if call.dtype == torch.float64 else None


def _why_not_flash_cpu(call: AttentionCall) -> str | None:
    if call.device.type != "cpu":
        return f"it runs on the CPU, and the tensors are on {call.device.type}"
    return "it keeps the log-sum-exp in float32: float64 goes to plain" if call.dtype == torch.float64 else None


def _why_not_plain(call: AttentionCall) -> str | None:
    return None


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("flash4", _why_not_flash4, flash4_forward, flash4_backward),
        Backend("flash2", _why_not_flash2, flash2_forward, flash2_backward),
        Backend("cudnn", _why_not_cudnn, cudnn_forward, cudnn_backward),
        Backend("triton", _why_not_triton, triton_forward, triton_backward),
        Backend("flash_torch", _why_not_flash_torch, flash_torch_forward, flash_torch_backward),
        Backend("flash_cpu", _why_not_flash_cpu, flash_cpu_forward, flash_cpu_backward),
        Backend("plain", _why_not_plain, plain_forward, plain_backward),
    )
}  # fmt: skip

# Fastest first, as measured on an H200 (benchmarks/results/attention-h200.md). The interpreter is a test's tool only.
ORDER_CUDA = ("flash4", "cudnn", "triton", "flash_torch", "plain")
ORDER_CPU = ("flash_cpu", "plain")

# Names that stand for the first member that can serve.
FAMILIES = {"flash": ("flash4", "flash2", "flash_torch", "flash_cpu")}


@lru_cache(maxsize=1024)
def choose(call: AttentionCall, name: str | None) -> Backend:
    """The backend of this name, of this family, or the fastest that can serve; ValueError that says why none can."""
    if name is None:
        names: tuple[str, ...] = ORDER_CUDA if call.device.type == "cuda" else ORDER_CPU
    else:
        names = FAMILIES.get(name, (name,))
    reasons = []
    for candidate in names:
        if candidate not in BACKENDS:
            known = ", ".join(["None", "'sdpa'", *(repr(x) for x in (*FAMILIES, *BACKENDS))])
            raise ValueError(f"backend {candidate!r} is unknown; choose one of {known}")
        reason = BACKENDS[candidate].why_not(call)
        if reason is None:
            return BACKENDS[candidate]
        reasons.append(f"{candidate}: {reason}")
    raise ValueError(f"attention backend {name!r} cannot serve this call: " + "; ".join(reasons))


def attention_backend(
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    length: int,
    backend: str | None = None,
) -> str:
    """The name of the backend that would serve causal attention of these sizes, from shapes alone.

    Args:
        device, dtype: of the queries, keys and values.
        num_heads, num_kv_heads, head_dim: H, K and D of the model.
        length: tokens of a sequence, queries and keys alike.
        backend: as in `attention`: None for the fastest, or a name or family of backends.

    Raises:
        ValueError: an unknown name, or a named one that cannot serve, with its reason.
    """
    call = AttentionCall(
        device=torch.device(device), dtype=dtype, batch=1, seq_q=length, seq_k=length, num_heads=num_heads,
        num_kv_heads=num_kv_heads, head_dim=head_dim, causal=length > 1, q_offset=0, packed=False, same_documents=True,
        max_q=length, max_k=length,
    )  # fmt: skip
    return choose(call, backend).name


def attention_backends(device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> dict[str, str | None]:
    """For each backend None, or why it cannot serve a plain causal call of head width 128 on this device."""
    sizes: dict[str, Any] = {"batch": 1, "seq_q": 64, "seq_k": 64, "max_q": 64, "max_k": 64, "head_dim": 128}
    call = AttentionCall(
        device=torch.device(device), dtype=dtype, num_heads=1, num_kv_heads=1, causal=True, q_offset=0, packed=False,
        same_documents=True, **sizes,
    )  # fmt: skip
    return {name: backend.why_not(call) for name, backend in BACKENDS.items()}
