"""What is available on a device, and why not.  `python -m llama_kernels.backends` prints it."""

from __future__ import annotations

import torch

from llama_kernels.attention_backends import attention_backends
from llama_kernels.compat import HAS_TRITON


def _why_not_triton(device: torch.device) -> str | None:
    if not HAS_TRITON:
        return "triton is not installed (it has wheels for Linux)"
    if device.type != "cuda":
        return f"Triton kernels run on GPUs, not on {device.type}; plain torch serves"
    return None


def _why_not_fp8(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"fp8 products run on GPUs, not on {device.type}; plain torch rounds the same way"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        return f"fp8 wants compute capability 8.9, this GPU has {capability[0]}.{capability[1]}"
    return None


def backends(device: torch.device | str | None = None) -> dict[str, str | None]:
    """For each kind of kernel None where it is available on `device`, else the reason why not.

    Args:
        device: default the current GPU, or the CPU where there is none.

    Returns:
        "triton" (rms_norm, add_rms_norm, rope, swiglu, linear_cross_entropy, sample, the int8 and int4 linears),
        "fp8" (fp8_matmul, and fp8_linear as a kernel), and "attention: NAME" for every attention backend.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    rows = {"triton": _why_not_triton(device), "fp8": _why_not_fp8(device)}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return rows | {f"attention: {name}": reason for name, reason in attention_backends(device, dtype).items()}


def main() -> None:
    """Print the table for this machine."""
    rows = backends()
    width = max(map(len, rows))
    for name, reason in rows.items():
        print(f"{name:<{width}}  {'available' if reason is None else 'not: ' + reason}")


if __name__ == "__main__":
    main()
