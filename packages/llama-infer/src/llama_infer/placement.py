"""Where a model runs, in what precision and with which operations: from names to objects."""

from __future__ import annotations

import dataclasses

import torch

import llama_kernels
from llama_core import Ops

from .cpu import cpu_ops

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


def ops_for(device: torch.device) -> Ops:
    """The fastest operations for inference on a device: llama_kernels' on a GPU."""
    if device.type == "cpu":
        return cpu_ops()
    fast = llama_kernels.ops(device)  # the same fields as llama_core.Ops; neither package knows the other
    return Ops(**{field.name: getattr(fast, field.name) for field in dataclasses.fields(Ops)})
