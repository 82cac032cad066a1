"""Devices, precisions and operations by name."""

import pytest
import torch

from llama_core import Llama, Ops, preset
from llama_infer.placement import ops_for, resolve_device, resolve_dtype


def test_auto_is_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(ValueError, match="device cuda:1: torch sees 1 CUDA devices"):
        resolve_device("cuda:1")
    with pytest.raises(ValueError, match="device must be auto, cpu, cuda or cuda:N, got 'gpu'"):
        resolve_device("gpu")


def test_dtypes() -> None:
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float16", torch.device("cpu")) == torch.float16
    assert resolve_dtype(torch.float64, torch.device("cpu")) == torch.float64
    with pytest.raises(ValueError, match="dtype must be auto or one of float32, bfloat16, float16, got 'int8'"):
        resolve_dtype("int8", torch.device("cpu"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_operations_of_every_device_fit_the_model(device: str) -> None:
    ops = ops_for(torch.device(device))
    assert isinstance(ops, Ops)
    if device == "cpu":
        plain, model, tokens = Llama(preset("tiny")), Llama(preset("tiny"), ops), torch.tensor([[1, 2, 3]])
        with torch.inference_mode():
            torch.testing.assert_close(model(tokens), plain(tokens), atol=1e-5, rtol=1e-5)
