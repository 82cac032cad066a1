"""Copies of a run's tensors in the host's memory, from which a checkpoint is written while training goes on.

On a GPU the copy itself runs beside the next step's forward and backward pass, on a stream of its own, into page-locked
memory, which alone a GPU can write to by itself; only the update of the weights has to wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class HostCopy:
    """Buffers for one copy of a set of tensors. Made by the first `take`, filled again by each later one.

    Args:
        device: on which the tensors lie; some may lie on the CPU all the same.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the buffers now: page-locked memory takes a second for each few GB, once."""
        for name, tensor in tensors.items():
            self._buffer(name, _part(tensor))

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the local part of each tensor, as it is after all work queued so far.

        Call `wait` before reading the result, and `hold_back` before queueing what changes the tensors. The copies
        taken before are overwritten.

        Args:
            tensors: of any shape, plain or DTensors.

        Returns:
            By the same names, tensors of the local parts' shapes on the CPU.
        """
        if self._stream is None:
            return {name: self._copy(name, tensor) for name, tensor in tensors.items()}
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            copies = {name: self._copy(name, tensor) for name, tensor in tensors.items()}
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)
        return copies

    def wait(self) -> None:
        """Until the copies are whole; any thread may call it."""
        if self._copied is not None:
            self._copied.synchronize()

    def hold_back(self) -> None:
        """Let what is queued from now on begin after the copy; the caller does not wait."""
        if self._copied is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        part = _part(tensor)
        return self._buffer(name, part).copy_(part, non_blocking=part.is_cuda)

    def _buffer(self, name: str, part: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != part.shape or buffer.dtype != part.dtype:
            buffer = self._buffers[name] = _empty(part)
        return buffer


def _part(tensor: Tensor) -> Tensor:
    """Of this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _empty(part: Tensor) -> Tensor:
    """Memory of its size on the host, page-locked where a GPU writes to it and the system has so much of that."""
    try:
        return torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
    except RuntimeError:  # then the copy is no slower than one that everybody waits for, but everybody waits
        return torch.empty(part.shape, dtype=part.dtype)
