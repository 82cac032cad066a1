"""Reading at an offset straight into given memory, from several threads at once.

No memory map: a mapped file that another program cuts short kills the process with SIGBUS, and a model whose weights
are still mapped changes when the file does. `preadv` copies once, from the page cache into its final place.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from .errors import CheckpointError


class FileBytes:
    """An open file with positional, thread-safe reads.

    Raises:
        CheckpointError: the file cannot be opened, or ends before what is asked for.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be opened: {error.strerror}") from None
        self.size = os.fstat(self._file.fileno()).st_size
        self._lock = threading.Lock()

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset`."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise CheckpointError(f"{self.path}: {count} bytes at offset {offset} lie outside its {self.size} bytes")
        buffer = bytearray(count)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset`."""
        done = 0
        while done < len(buffer):
            count = self._read_some(offset + done, buffer[done:])
            if count <= 0:
                raise CheckpointError(
                    f"{self.path}: ends at byte {offset + done}, before byte {offset + len(buffer)}; it is truncated"
                )
            done += count

    def read_tensor(self, offset: int, out: Tensor) -> None:
        """Fill a contiguous CPU tensor with the bytes from `offset`."""
        if out.numel():
            self.read_into(offset, out.detach().view(torch.uint8).numpy().data.cast("B"))

    def _read_some(self, offset: int, buffer: memoryview) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [buffer], offset)
        with self._lock:  # systems without positional reads share one file position
            self._file.seek(offset)
            return self._file.readinto(buffer) or 0

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> FileBytes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
