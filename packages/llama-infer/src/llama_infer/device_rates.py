"""What this device can do at best, measured: the rate at which it copies, and at which it multiplies matrices."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceRates:
    copy: float
    """Bytes per second, those read and those written."""
    matmul: float
    """Floating-point operations per second, of a large square product."""


@torch.inference_mode()
def measure_rates(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    """The best of several runs; about a second."""
    cuda = device.type == "cuda"
    size = (2**30 if cuda else 2**27) // 4
    source, target = (torch.ones(size, device=device) for _ in range(2))
    seconds = best_seconds(lambda: target.copy_(source), device)
    width = 8192 if cuda else 1536
    x, y = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(2))
    return DeviceRates(2 * 4 * size / seconds, 2 * width**3 / best_seconds(lambda: x @ y, device))


def best_seconds(call: Callable[[], object], device: torch.device, runs: int = 5) -> float:
    """Of one call, the quickest of several after one that is not counted."""
    best = float("inf")
    for run in range(runs + 1):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        if run:
            best = min(best, time.perf_counter() - start)
    return best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
