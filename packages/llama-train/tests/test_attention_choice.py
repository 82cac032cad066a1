"""Every value of the key `attention` trains the same model, or says why it can't before anything has begun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from llama_core import LlamaConfig, causal_attend, plain_attend
from llama_train import TrainConfig, train
from llama_train.attention_choice import choose_attend

CPU = torch.device("cpu")
CHOICES = get_args(get_type_hints(TrainConfig)["attention"])
SHAPE = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip


def _agrees_with_the_formula(attention: str, device: torch.device, dtype: torch.dtype, tolerance: float) -> str:
    """Output and gradients beside plain_attend's in float64; the name of what computed them."""
    attend, name = choose_attend(attention, SHAPE, 24, device, dtype)
    torch.manual_seed(0)
    inputs = [torch.randn(2, 24, heads, 16).to(device, dtype) for heads in (4, 2, 2)]
    results = []
    for function, kind in ((attend, dtype), (plain_attend, torch.float64)):
        q, k, v = (x.to(kind).requires_grad_() for x in inputs)
        out = function(0, q, k, v)
        results.append([x.double() for x in (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))])
    for actual, expected in zip(*results, strict=True):
        assert (actual - expected).norm() <= tolerance * expected.norm()
    return name


def test_the_choices_are_those_of_the_design() -> None:
    assert CHOICES == ("auto", "sdpa", "flash", "triton", "plain")


@pytest.mark.parametrize(("attention", "name"), [("auto", "sdpa"), ("sdpa", "sdpa"), ("plain", "plain")])
def test_on_a_cpu_without_kernels(attention: str, name: str) -> None:
    attend, given = choose_attend(attention, SHAPE, 24, CPU, torch.float32)
    assert (attend, given) == (plain_attend if name == "plain" else causal_attend, name)
    assert _agrees_with_the_formula(attention, CPU, torch.float32, 1e-5) == name


def test_flash_on_a_cpu_is_that_of_torch_and_refuses_what_it_would_round() -> None:
    assert _agrees_with_the_formula("flash", CPU, torch.float32, 1e-5) == "flash_cpu"
    with pytest.raises(ValueError, match=r"attention is 'flash'.*flash_cpu: it keeps the log-sum-exp in float32"):
        choose_attend("flash", SHAPE, 24, CPU, torch.float64)


def test_triton_needs_a_gpu(tiny: TrainConfig, recorder: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"attention is 'triton'.*it needs a CUDA device, and the tensors are on cpu"):
        train(replace(tiny, attention="triton"), recorder())
    assert not Path(str(tiny.folder)).exists()  # told before anything was made


@pytest.mark.parametrize("attention", ["flash", "plain"])
def test_a_run_is_the_same_through_each(
    attention: Any, tiny: TrainConfig, tmp_path: Path, recorder: Callable[[], Any], change: Callable[..., TrainConfig]
) -> None:
    usual = change(tiny, **{"schedule.steps": 5, "evaluation.max_tokens": 64})
    other = replace(usual, attention=attention, folder=str(tmp_path / "other"))
    lines = recorder()
    results = [train(usual, recorder()), train(other, lines)]
    assert f"attention  {'flash_cpu' if attention == 'flash' else 'plain'}" in lines.text
    losses = [result.held_out.loss for result in results if result.held_out]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)  # float32, five steps


def test_triton_in_its_interpreter(tmp_path: Path) -> None:
    """Triton decides between compiling and interpreting when it is imported, so this takes another process."""
    code = """
        import sys, pathlib, torch
        from llama_train import TrainConfig, train
        from llama_train.config import DataConfig, EvaluationConfig, ModelConfig, ScheduleConfig
        torch.set_num_threads(1)
        folder = pathlib.Path(sys.argv[1])
        (folder / "text").mkdir()
        for n in range(4):
            (folder / "text" / f"{n}.txt").write_text(f"{n} is a number and {n + 1} follows it\\n" * 20)
        losses = []
        for attention in ("triton", "sdpa"):
            result = train(TrainConfig(
                folder=str(folder / attention), device="cpu", attention=attention,
                model=ModelConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2),
                data=DataConfig(source=str(folder / "text"), held_out_fraction=0.25, vocab_size=270,
                                sequence_length=8, micro_batch_size=1),
                schedule=ScheduleConfig(steps=3, warmup_steps=1),
                evaluation=EvaluationConfig(sample_tokens=2, max_tokens=16),
            ))
            losses.append(result.held_out.loss)
        assert abs(losses[0] - losses[1]) < 1e-5, losses
    """
    lines = [line.removeprefix("        ") for line in code.splitlines()]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(lines), str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "attention  triton" in result.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("attention", CHOICES)
def test_on_a_gpu(attention: str) -> None:
    device = torch.device("cuda")
    name = _agrees_with_the_formula(attention, device, torch.bfloat16, 2e-2)  # 8 bits, three products in a row
    wanted = {"auto": ("flash4", "cudnn"), "flash": ("flash4", "flash2", "flash_torch")}
    assert name in wanted.get(attention, (attention,))


# The compiler looks at .grad of a layer's input, which is no leaf, and imports what torch 2.11 calls deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kernels", ["auto", "plain"])
@pytest.mark.parametrize("attention", CHOICES)
def test_a_run_on_a_gpu_through_each(
    attention: Any, kernels: Any, compiled: bool, tiny: TrainConfig, tmp_path: Path, recorder: Callable[[], Any],
    change: Callable[..., TrainConfig],
) -> None:  # fmt: skip
    torch.compiler.reset()  # the compiler counts what it compiled for earlier cases, and stops at eight
    sizes = {"model.hidden_size": 64, "model.intermediate_size": 128, "schedule.steps": 5, "evaluation.max_tokens": 64}
    usual = change(tiny, device="cuda", dtype="bfloat16", attention="plain", kernels="plain", **sizes)
    folder = str(tmp_path / "other")
    other = replace(usual, attention=attention, kernels=kernels, compile=compiled, folder=folder)
    losses = [result.held_out.loss for result in (train(usual, recorder()), train(other, recorder()))]  # type: ignore[union-attr]
    assert losses[1] == pytest.approx(losses[0], abs=1e-2)  # a mean over 64 tokens of logits with 8 bits
