from __future__ import annotations

import pytest
import torch

from llama_train.flops import flops_per_token, mfu, peak_flops, peak_of


def test_picotrons_formula() -> None:
    # SmolLM-1.7B at sequence 2048: 41.0K tokens/s on an H100 is 50% (reference/training.md, section 4), where
    # picotron's count has the embedding table twice.
    parameters = 1_711_376_384 + 49152 * 2048
    per_token = flops_per_token(parameters, layers=24, attention_width=2048, sequence_length=2048)
    assert per_token == 6 * parameters + 12 * 24 * 2048 * 2048
    assert mfu(41.0e3, per_token, 989.5e12) == pytest.approx(0.50, abs=0.005)
    assert mfu(1.0, per_token, None) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 3090", None),
    ],
)
def test_peaks_by_name(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak


def test_a_cpu_has_no_known_peak() -> None:
    assert peak_flops(torch.device("cpu")) is None
