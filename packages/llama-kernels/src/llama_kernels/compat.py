"""Triton where it is installed, and a stand-in that lets kernel files be imported where it is not.

Kernel files say `from llama_kernels.compat import tl, triton`. Without triton their functions stay plain Python that
nobody calls: `runs_triton` is false for every tensor then, and public functions take their plain path.
Nothing here looks for a driver or a GPU.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "HAS_TRITON",
    "INTERPRETING",
    "as_rows",
    "cdiv",
    "device_guard",
    "multiprocessors",
    "next_power_of_2",
    "runs_triton",
    "shared_memory",
    "tl",
    "triton",
]

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _Stand:
        """Answers every attribute; as a decorator it hands the function back, so kernel files still parse."""

        def __getattr__(self, name: str) -> Any:
            return _Stand()

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return args[0] if args and callable(args[0]) and not kwargs else _Stand()

    triton = _Stand()
    tl = _Stand()

# Triton decides when it is imported whether kernels are compiled or interpreted (TRITON_INTERPRET=1, our CPU tests).
INTERPRETING = HAS_TRITON and bool(triton.knobs.runtime.interpret)


def runs_triton(x: Tensor) -> bool:
    """Whether a Triton kernel can run on x: triton is here, and x is on a GPU, or on the CPU under the interpreter.

    Never for float64: the kernels compute in float32, and whoever asks for float64 wants all of it.
    """
    if not HAS_TRITON or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    return x.is_cuda or (x.device.type == "cpu" and INTERPRETING)


def multiprocessors(x: Tensor) -> int:
    """Streaming multiprocessors of x's GPU; 2 in the interpreter, so that tests meet several programs' partial sums."""
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count) if x.is_cuda else 2


def device_guard(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make x's GPU current: Triton launches on the current device, whatever the pointers say."""
    return torch.cuda.device_of(x) if x.is_cuda else contextlib.nullcontext()


def as_rows(x: Tensor) -> Tensor:
    """View x as (rows, last dimension) with a dense last dimension; copies only where no such view exists.

    Kernels take the row stride as an argument, so a column slice of a packed projection is read where it lies, and an
    incoming gradient with stride 0 (from `sum` or `expand`) is copied before anything reads it as if it were dense.
    """
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def shared_memory(x: Tensor) -> int:
    """Bytes of shared memory that one block may have on x's GPU; plenty in the interpreter."""
    return int(torch.cuda.get_device_properties(x.device).shared_memory_per_block_optin) if x.is_cuda else 2**30


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
