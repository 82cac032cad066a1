"""Devices, precisions and operations by name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_core import Llama, Ops, generate_naive, preset
from llama_infer import LLM, SamplingParams
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


# --- the keys kernels and attention: every choice, where it can; else a refusal with the reason


@pytest.mark.parametrize("kernels", ["auto", "plain"])
@pytest.mark.parametrize("attention", ["auto", "sdpa", "flash", "plain"])
def test_every_choice_gives_the_same_tokens(save: Callable[..., Path], kernels: str, attention: str) -> None:
    llm = LLM(save(), device="cpu", kernels=kernels, attention=attention)
    assert (llm.model.ops == Ops()) == (kernels == "plain")
    output = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[0]
    plain = Llama(llm.model.config).eval()
    plain.load_state_dict(llm.model.state_dict())
    assert output.token_ids == generate_naive(lambda t: plain.logits(plain(t)), [1, 2, 3], max_new_tokens=8)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"attention": "triton"},
            "attention 'triton' cannot run here: (Triton kernels|triton is)",
        ),
        ({"attention": "flash", "dtype": torch.float64}, "'flash' cannot serve this call.*float64"),
        ({"device": "meta"}, "device must be auto, cpu, cuda or cuda:N, got 'meta'"),
    ],
)
def test_choices_that_cannot_run_say_why(save: Callable[..., Path], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LLM(save(), **{"device": "cpu", **settings})


def test_the_paged_kernels_in_the_interpreter_equal_the_oracle(save: Callable[..., Path]) -> None:
    pytest.importorskip("triton")
    code = (
        "import sys; from llama_infer import LLM, SamplingParams; from llama_core import generate_naive\n"
        "llm = LLM(sys.argv[1], device='cpu', attention='triton', max_num_seqs=4, max_num_batched_tokens=5)\n"
        "prompts = [[1, 2, 3], list(range(9))]\n"
        "outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))\n"
        "logits = lambda t: llm.model.logits(llm.model(t))\n"
        "for prompt, output in zip(prompts, outputs):\n"
        "    assert output.token_ids == generate_naive(logits, prompt, max_new_tokens=3)\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code, str(save())], env=environment, check=True, timeout=300)
