"""`llama-train export`: any checkpoint of any layout as a model in each format, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_core import load_model, load_tokenizer
from llama_core.lora import load_adapter
from llama_parallel.testing import run_ranks
from llama_train import TrainConfig, train
from llama_train.cli import main
from llama_train.config import LoraSettings, ModelConfig, ParallelSettings

Make = Callable[[], Any]
Change = Callable[..., TrainConfig]


@pytest.fixture
def saved(tiny: TrainConfig, change: Change) -> TrainConfig:
    """Checkpoints at steps 3 and 6, all kept."""
    keys = {"checkpoint.every": 3, "checkpoint.keep": 9, "schedule.steps": 6, "model.num_attention_heads": 2}
    return change(tiny, **keys)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in load_model(path).named_parameters()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_every_format_of_the_last_step_is_the_runs_own_export(
    saved: TrainConfig, recorder: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(saved, recorder())
    run = result.folder
    wanted = weights(run / "hf")
    for options, name in (
        ([], "hf-step-00000006"),
        (["--format", "meta"], "meta-step-00000006"),
        (["--format", "gguf"], "step-00000006.gguf"),
    ):
        assert main(["export", str(run), *options]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"exported   {run / name}"
        assert_same(weights(run / name), wanted)
    tokenizer = load_tokenizer(run / "hf")
    for name in ("hf-step-00000006", "step-00000006.gguf"):
        assert load_tokenizer(run / name).encode("def f1(x):") == tokenizer.encode("def f1(x):")
    before = load_model(run / "hf").config
    assert load_model(run / "hf-step-00000006").config == before


def test_an_earlier_step(saved: TrainConfig, tmp_path: Path, recorder: Make) -> None:
    run = train(saved, recorder()).folder
    earlier = replace(saved, folder=str(tmp_path / "short"), schedule=replace(saved.schedule, steps=6))
    assert main(["export", str(run), "--step", "3", "--out", str(tmp_path / "at3")]) == 0
    changed = [not torch.equal(a, b) for a, b in zip(weights(tmp_path / "at3").values(), weights(run / "hf").values())]
    assert any(changed)
    # the weights after three steps, by a run that is stopped there
    from llama_train.trainer import OneProcess

    calls: list[dict[str, torch.Tensor]] = []
    original = OneProcess.step

    def stepping(self: OneProcess, *arguments: Any) -> Any:
        result = original(self, *arguments)
        calls.append({name: weight.clone() for name, weight in self.weights().items()})
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OneProcess, "step", stepping)
        train(earlier, recorder())
    assert_same(weights(tmp_path / "at3"), calls[2])


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_a_run_of_another_layout(layout: dict[str, int], saved: TrainConfig, recorder: Make) -> None:
    parallel = ParallelSettings(**{"dp_shard": 1, **layout})
    config = replace(saved, parallel=parallel, dtype="bfloat16")
    config = replace(config, model=replace(config.model, num_key_value_heads=2, tie_word_embeddings=True))

    def work(rank: int) -> Path:
        return train(config, recorder()).folder

    run = run_ranks(work, 2, timeout=120)[0]
    assert main(["export", str(run)]) == 0
    assert_same(weights(run / "hf-step-00000006"), weights(run / "hf"))
    assert load_model(run / "hf").get_parameter("model.norm.weight").dtype == torch.bfloat16
    # float32: the masters, of which those are the rounded ones
    assert main(["export", str(run), "--dtype", "float32", "--out", str(run / "wide")]) == 0
    masters = weights(run / "wide")
    assert main(["export", str(run), "--dtype", "float16", "--out", str(run / "half")]) == 0
    assert_same(weights(run / "half"), {name: tensor.half() for name, tensor in masters.items()})
    assert_same({name: tensor.bfloat16() for name, tensor in masters.items()}, weights(run / "hf"))
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in masters.values())


def test_adapter_and_merged_model(
    saved: TrainConfig, tmp_path: Path, recorder: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    base = train(replace(saved, folder=str(tmp_path / "base")), recorder())
    config = replace(
        saved, folder=str(tmp_path / "lora"), model=ModelConfig(start_from=str(base.export)), lora=LoraSettings(rank=2)
    )
    run = train(config, recorder()).folder
    assert main(["export", str(run)]) == 0
    assert_same(weights(run / "hf-step-00000006"), weights(run / "hf"))
    assert main(["export", str(run), "--merge", "--step", "3", "--format", "gguf"]) == 0
    assert not torch.equal(
        weights(run / "step-00000003.gguf")["model.layers.0.mlp.up_proj.weight"],
        weights(run / "hf")["model.layers.0.mlp.up_proj.weight"],
    )
    assert main(["export", str(run), "--adapter"]) == 0
    one, other = load_adapter(run / "adapter"), load_adapter(run / "adapter-step-00000006")
    assert one.config == other.config
    for name, (a, b) in one.weights.items():
        assert torch.equal(a, other.weights[name][0])
        assert torch.equal(b, other.weights[name][1])
    capsys.readouterr()
    assert main(["export", str(base.folder), "--adapter"]) == 2
    assert f"--adapter: {base.folder} is no run with [lora]" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["export", str(run), "--adapter", "--format", "gguf"])
    assert "--adapter writes the adapter as it was trained" in " ".join(capsys.readouterr().err.split())


def test_refusals(saved: TrainConfig, tmp_path: Path, recorder: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(saved, recorder()).folder
    for arguments, message in (
        ([str(tmp_path)], "is no run folder: it has no config.toml"),
        ([str(run), "--step", "4"], "--step is 4; the checkpoints of .* are of step 3, 6"),
        ([str(run), "--out", str(run / "hf")], "exists|is taken|not empty"),
    ):
        capsys.readouterr()
        assert main(["export", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("llama-train: ")
        assert error.count("\n") == 1
        assert re.search(message, error), error
    for arguments, message in (
        (["--step", "0"], "--step is 0; it must be at least 1"),
        (["--dtype", "Q8_0"], "--dtype is 'Q8_0'; it must be auto"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["export", str(run), *arguments])
        assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
    before = weights(run / "hf")
    (path,) = (run / "checkpoints" / "step-00000006").glob("*.distcp")
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["export", str(run), "--step", "6"]) == 2
    assert "is no whole checkpoint" in capsys.readouterr().err
    assert main(["export", str(run)]) == 0
    out = capsys.readouterr().out
    assert "warning    " in out
    assert out.endswith("hf-step-00000003\n")
    assert main(["export", str(run), "--out", str(run / "hf"), "--overwrite"]) == 0
    assert any(not torch.equal(a, b) for a, b in zip(before.values(), weights(run / "hf").values()))
