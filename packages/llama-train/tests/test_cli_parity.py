"""`llama-train parity`: what it prints where a layout equals one process, and what where it does not."""

from __future__ import annotations

import pytest
import torch

from llama_parallel import collectives
from llama_train.cli import main


@pytest.mark.parametrize(
    "flags",
    [
        "--world 4 --dp 2 --tp 2",
        "--dp-replicate 2 --dtype float32",
        "--pp 2 --schedule interleaved_1f1b --model tiny-tied",
        "--cp 2 --context ulysses --steps 1",
        "--tp 2 --no-sequence-parallel --accumulation 1",
        "",
    ],
)
def test_equal(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", *flags.split()]) == 0
    out, err = capsys.readouterr()
    assert "equal to one process: the largest difference is" in out
    assert "model.layers.1.mlp.down_proj.weight" in out
    assert "replicas   equal to the bit" in out
    assert err == ""


def test_four_dimensions_on_sixteen_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "--world", "16", "--dp", "2", "--tp", "2", "--pp", "2", "--cp", "2", "--steps", "1"]) == 0
    assert "dp_shard 2 cp 2 tp 2 pp 2: 16 processes" in capsys.readouterr().out


def test_an_all_reduce_that_is_missing_is_found_and_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that sums norm weights' gradients over tp; without it each rank has those of its own tokens."""

    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None

    monkeypatch.setattr(collectives._AllReduceGradient, "backward", staticmethod(backward))
    assert main(["parity", "--tp", "2"]) == 1
    out, err = capsys.readouterr()
    assert "NOT equal to one process" in out
    assert "replicas   differ" in out
    assert err.startswith("llama-train: gradient of model.layers.0.input_layernorm.weight differs by ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--world 8 --dp 2 --tp 2", "= 4 processes, but 8 were started"),
        ("--dp 100000", "the sizes make 100000 processes; on one CPU they must make 1 to 256"),
        ("--tp 3", "4 attention heads do not divide over tp 3"),
        ("--model tinny", "did you mean 'tiny'"),
        ("--steps 0", "--steps is 0; it must be at least 1"),
        ("--tp 2 --device cuda", "torchrun --nproc-per-node"),
    ],
)
def test_mistakes(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["parity", *flags.split()])
    except SystemExit as error:  # tyro's own way out
        status = int(str(error.code))
    assert status == 2
    out, err = capsys.readouterr()
    assert message in " ".join(err.replace("│", " ").split())
    assert out == ""
