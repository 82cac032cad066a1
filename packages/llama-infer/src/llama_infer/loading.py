"""From a path to a model that is ready to generate: where it goes, in what precision, whole or a share of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from llama_core import Llama, pack_projections
from llama_core.checkpoint import check
from llama_core.load import load_checkpoint, open_checkpoint

from .cpu import use_onednn
from .placement import ops_for
from .quantize import place_rounded, quantize_model

if TYPE_CHECKING:
    from .ranks import Ranks


def load_for_inference(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kernels: str = "auto",
    quantization: str | None = None,
    ranks: Ranks | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Llama:
    """Load a model, or with `ranks` this rank's share of it, straight onto its device.

    Args:
        path: what `llama_core.load_model` takes.
        dtype, device: of the weights.
        kernels, quantization, progress: as in `LLM`.

    Raises:
        ValueError: nothing usable there (`llama_core.CheckpointError`), a rounding that does not fit, too many ranks.
    """
    checkpoint = open_checkpoint(path)
    try:
        check(checkpoint)
        whole = checkpoint.config
        if ranks is not None:
            from .shared_model import share_checkpoint, share_of

            share = share_of(whole, ranks.axis.size, ranks.axis.rank)
            checkpoint = share_checkpoint(checkpoint, share)
        found: list[str | None] = []
        model = load_checkpoint(
            checkpoint,
            dtype,
            device,
            ops_for(device, kernels),
            prepare=lambda model: found.append(place_rounded(model, checkpoint, device)),
            progress=progress,
        )
    finally:
        checkpoint.close()
    if found != [None]:
        if quantization not in (None, *found):
            raise ValueError(f"{path} holds weights of {found[0]}; quantization must be that, got {quantization!r}")
    elif quantization is not None:
        quantize_model(model, quantization)
    elif kernels == "auto":
        pack_projections(model)
        use_onednn(model)
    if ranks is not None:
        from .shared_model import join_shares

        join_shares(model, whole, share, ranks.axis)
    return model
