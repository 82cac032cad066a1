"""Arithmetic of a training step, and the share of the device's peak that a speed amounts to."""

from __future__ import annotations

import torch

# Dense bfloat16 peaks, FLOP/s, from the makers' data sheets. 989.5e12 is the figure picotron divides by.
_PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.5e12,
    "H200": 989.5e12,
    "H800": 989.5e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 peak of a GPU in FLOP/s; None where it is not known, as for every CPU."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(device_name: str) -> float | None:
    """Peak by the name the driver gives. "L4" does not match an L40."""
    words = device_name.replace("-", " ").split()
    for name, peak in _PEAKS.items():
        if all(word in words for word in name.split()):
            return peak
    return None


def flops_per_token(parameters: int, layers: int, attention_width: int, sequence_length: int) -> int:
    """picotron's count (utils.py, get_mfu): 6 for every parameter, both embedding tables included, and
    12 · layers · width · sequence for attention, not halved for causality.

    Args:
        parameters: all parameters of the model.
        layers: decoder layers.
        attention_width: query heads times width of a head.
        sequence_length: tokens in a row.
    """
    return 6 * parameters + 12 * layers * attention_width * sequence_length


def flops_per_token_torchtitan(
    parameters: int, embedding: int, layers: int, attention_width: int, sequence_length: int
) -> int:
    """torchtitan's count (get_dense_model_nparams_and_flops): the same, but the input embedding, a look-up, counts
    for nothing. The output head counts; a tied one is both, and counts once.

    Args:
        parameters: all parameters of the model.
        embedding: those of an input embedding that is not the head too.
        layers, attention_width, sequence_length: as of `flops_per_token`.
    """
    return flops_per_token(parameters - embedding, layers, attention_width, sequence_length)


def mfu(tokens_per_second: float, per_token: int, peak: float | None) -> float | None:
    """Model FLOP/s utilisation, 0 to 1, of one device; None where its peak is not known."""
    return None if peak is None else tokens_per_second * per_token / peak
