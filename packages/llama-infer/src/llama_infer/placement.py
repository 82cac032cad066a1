"""Where a model runs, in what precision and with which operations: from names to objects."""

from __future__ import annotations

import dataclasses

import torch

import llama_kernels
from llama_core import LlamaConfig, Ops
from llama_kernels.compat import runs_triton

from .cpu import cpu_ops
from .paged_cache import AttendRows, rows_by_backend, sdpa_rows

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str | torch.device) -> torch.device:
    """ "auto" is the GPU where torch sees one, else the CPU.

    Raises:
        ValueError: a device that torch doesn't know or doesn't see.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {str(device)!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name}: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def resolve_dtype(name: str | torch.dtype, device: torch.device) -> torch.dtype:
    """ "auto" is float32 on a CPU and bfloat16 on a GPU.

    Raises:
        ValueError: another name than those of DTYPES.
    """
    if isinstance(name, torch.dtype):
        return name
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ValueError(f"dtype must be auto or one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def ops_for(device: torch.device, kernels: str = "auto") -> Ops:
    """The fastest operations for inference on a device, llama_kernels' on a GPU; their definitions for "plain"."""
    if kernels == "plain":
        return Ops()
    if device.type == "cpu":
        return cpu_ops()
    fast = llama_kernels.ops(device)  # the same fields as llama_core.Ops; neither package knows the other
    return Ops(**{field.name: getattr(fast, field.name) for field in dataclasses.fields(Ops)})


ATTENTIONS = ("auto", "sdpa", "flash", "triton", "plain")


def attention_for(
    name: str, kernels: str, config: LlamaConfig, device: torch.device, dtype: torch.dtype
) -> AttendRows | None:
    """The attention of a name: a function that takes sequences one by one, or None for the paged kernels.

    auto: the paged Triton kernels on a GPU (not with kernels="plain"), else torch's scaled_dot_product_attention.
    sdpa: the latter. flash: FlashAttention, of whatever version can serve. triton: the paged kernels. plain: the
    formula, with all scores in memory.

    Raises:
        ValueError: another name, or one that cannot run here; the message says why.
    """
    if name not in ATTENTIONS:
        raise ValueError(f"attention must be one of {', '.join(ATTENTIONS)}, got {name!r}")
    some = torch.zeros(1, 2, 1, config.head_width, dtype=dtype, device=device)
    if name == "auto":
        return None if kernels == "auto" and device.type == "cuda" and runs_triton(some) else sdpa_rows
    if name == "sdpa":
        return sdpa_rows
    if name == "triton":
        if not runs_triton(some):
            reason = llama_kernels.backends(device)["triton"] or f"it takes no {str(dtype).removeprefix('torch.')}"
            raise ValueError(f"attention 'triton' cannot run here: {reason}")
        return None
    attend = rows_by_backend(name)
    attend(some, some, some)  # says why it cannot
    return attend
