from __future__ import annotations

import pytest
import torch

from llama_train.flops import flops_per_token, flops_per_token_torchtitan, mfu, peak_flops, peak_of


def test_picotrons_formula() -> None:
    # SmolLM-1.7B at sequence 2048: 41.0K tokens/s on an H100 is 50% (reference/training.md, section 4), where
    # picotron's count has the embedding table twice.
    parameters = 1_711_376_384 + 49152 * 2048
    per_token = flops_per_token(parameters, layers=24, attention_width=2048, sequence_length=2048)
    assert per_token == 6 * parameters + 12 * 24 * 2048 * 2048
    assert mfu(41.0e3, per_token, 989.5e12) == pytest.approx(0.50, abs=0.005)
    assert mfu(1.0, per_token, None) is None


def test_torchtitans_formula() -> None:
    # torchtitan's table for Llama-3-8B at 8192 on H100s: 6,667 tokens/s and 39% MFU; its peak is 989e12.
    parameters, embedding = 8_030_261_248, 128256 * 4096
    picotron = flops_per_token(parameters, layers=32, attention_width=4096, sequence_length=8192)
    torchtitan = flops_per_token_torchtitan(parameters, embedding, 32, 4096, 8192)
    assert torchtitan == picotron - 6 * embedding
    assert mfu(6667, torchtitan, 989e12) == pytest.approx(0.390, abs=0.0005)
    assert mfu(6667, picotron, 989e12) == pytest.approx(0.412, abs=0.0005)


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
