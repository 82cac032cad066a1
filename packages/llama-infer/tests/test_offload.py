"""A model spread over memory and disk gives what the undivided one gives."""

from __future__ import annotations

import builtins
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_core import Llama
from llama_infer import LLM, SamplingParams, cli

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
SHAPE = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 256}
# Embedding and head 68 KiB each, a layer 240 KiB: room for two of the six layers and one that passes through.
BUDGET = 860_000


def on_disk(llm: LLM) -> list[str]:
    return [name for name, parameter in llm.model.named_parameters() if parameter.is_meta]


@pytest.mark.parametrize("tied", [False, True])
def test_equals_the_undivided_model(save: Callable[..., Path], tmp_path: Path, tied: bool) -> None:
    folder = save(tie_word_embeddings=tied, **SHAPE)
    whole = LLM(folder, device="cpu", kernels="plain")
    spread = LLM(
        folder,
        device="cpu",
        kernels="plain",
        device_map="auto",
        max_memory={"cpu": BUDGET},
        offload_folder=tmp_path / "d",
    )
    lying = on_disk(spread)
    assert any(name.startswith("model.layers.5.") for name in lying)
    assert not any(name.startswith(("model.embed_tokens", "model.layers.0.")) for name in lying)
    files = {path.name for path in (tmp_path / "d").glob("*.dat")}
    assert {f"{name}.dat" for name in lying if name != "lm_head.weight"} <= files
    (told,) = spread.remarks
    assert "MB on cpu (embed_tokens, layers 0 … " in told
    assert f"MB on disk at {tmp_path / 'd'} (" in told
    prompts = [[1, 2, 3], list(range(20)), [7]]
    for one, other in zip(whole.generate(prompts, PARAMS), spread.generate(prompts, PARAMS), strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs


def test_a_model_that_fits_stays_whole(save: Callable[..., Path]) -> None:
    llm = LLM(save(), device="cpu", device_map="auto")
    assert not on_disk(llm)
    assert llm.remarks == ("weights: 0 MB on cpu (embed_tokens, norm, layers 0 … 1)",)


def test_temporary_weights_go_with_the_model(
    save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = save(**SHAPE)
    llm = LLM(folder, device="cpu", device_map="auto", max_memory={"cpu": BUDGET})
    (spool,) = tmp_path.glob("llama-infer-*")
    assert list(spool.glob("*.dat"))
    del llm
    gc.collect()  # hooks and modules hold each other
    assert not spool.exists()


def test_the_command_says_what_went_where(save: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--model", str(save(**SHAPE)), "--device", "cpu", "--prompt", "hello", "--max-tokens", "4"]
    arguments += ["--temperature", "0", "--device-map", "auto", "--max-memory"]
    assert cli.main([*arguments, f"cpu={BUDGET}"]) == 0
    assert "MB on disk (" in capsys.readouterr().err
    assert cli.main([*arguments, "gpu:3"]) == 2
    assert "--max-memory wants cpu=SIZE or GPU=SIZE" in capsys.readouterr().err


def test_refusals(save: Callable[..., Path], model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save()
    with pytest.raises(ValueError, match="give its path, not a Llama"):
        LLM(model, device_map="auto")
    given: dict[str, Any]
    for given, words in (
        ({"device_map": "sequential"}, "device_map must be 'auto' or None, got 'sequential'"),
        ({"max_memory": {"cpu": "1GB"}}, "are of device_map='auto'; add it"),
        ({"device_map": "auto", "quantization": "int8"}, "leave quantization and tensor_parallel_size out"),
        ({"device_map": "auto", "max_memory": {"cpu": "much"}}, "max_memory {'cpu': 'much'} is not understood"),
        ({"device_map": "auto", "max_memory": {"cpu": 1000}}, "no room on cpu for the embedding of 34,816 bytes"),
    ):
        with pytest.raises(ValueError, match=words):
            LLM(folder, device="cpu", **given)
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "accelerate":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"install llama-infer\[offload\]"):
        LLM(folder, device="cpu", device_map="auto")


@pytest.mark.slow
def test_the_embedded_model_in_200_megabytes(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    whole = LLM(device="cpu", kernels="plain").generate("The capital of France is", params)[0]
    spread = LLM(device="cpu", kernels="plain", device_map="auto", max_memory={"cpu": "200MB"})
    held = sum(p.nbytes for p in spread.model.parameters() if not p.is_meta)
    assert 150e6 < held <= 200e6
    output = spread.generate("The capital of France is", params)[0]
    assert output.token_ids == whole.token_ids
    assert "Paris" in output.text
