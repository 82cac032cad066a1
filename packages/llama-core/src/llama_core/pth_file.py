"""One file that `torch.save` wrote: tensors by name, and never anything else."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor

from .errors import CheckpointError


def load_pth(path: Path) -> dict[str, Tensor]:
    """The tensors of one .pth file, mapped and not read. Nothing in the file is ever executed.

    Raises:
        CheckpointError: not a torch file of tensors by name.
    """
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise CheckpointError(
            f"{path} is refused: its pickle holds more than tensors, or is damaged: {reason}"
        ) from None
    except Exception as error:  # torch raises many kinds for damaged archives; all of them mean this file
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise CheckpointError(f"{path} cannot be read: {reason}") from None
    if not isinstance(content, dict) or not content:
        raise CheckpointError(f"{path} holds {type(content).__name__}; it must hold tensors by name")
    for name, tensor in content.items():
        plain = isinstance(name, str) and isinstance(tensor, Tensor)
        if not plain or tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise CheckpointError(f"{path}: {str(name)[:80]} is no plain tensor")
    return content
