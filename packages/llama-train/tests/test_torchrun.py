"""The real starters. They take seconds each, so what layouts do is tested on forked ranks, in test_on_ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_train import TrainConfig
from llama_train.config_file import dump_config

SCRIPTS = Path(sysconfig.get_path("scripts"))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def config_file(tiny: TrainConfig, tmp_path: Path, change: Callable[..., TrainConfig]) -> Path:
    path = tmp_path / "tiny.toml"
    short = change(tiny, **{"schedule.warmup_steps": 1, "schedule.steps": 3, "data.micro_batch_size": 2})
    path.write_text(dump_config(short), encoding="utf-8")
    return path


def _losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["loss"] for record in map(json.loads, lines) if record["kind"] == "train"]


def _start(command: list[object]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.mark.slow  # two torchruns and a third process import torch: half a minute on a quiet machine
def test_two_agents_stand_for_two_hosts(config_file: Path, tmp_path: Path) -> None:
    """One starts the module, the other the command; the two processes find each other, and one of them prints."""
    port = _free_port()
    agents = []
    for rank, program in enumerate((["-m", "llama_train"], ["--no-python", SCRIPTS / "llama-train"])):
        hosts = ["--nnodes", 2, "--node-rank", rank, "--master-addr", "127.0.0.1", "--master-port", port]
        torchrun = [SCRIPTS / "torchrun", *hosts, "--nproc-per-node", 1, *program]
        agents.append(_start([*torchrun, "run", config_file, "--parallel.dp-shard", 2]))
    (first, errors), (second, _) = (agent.communicate(timeout=300) for agent in agents)
    assert [agent.returncode for agent in agents] == [0, 0], errors
    assert "layout     dp_shard 2: 2 processes" in first
    assert "step 3/3" in first
    assert second == ""
    alone = [sys.executable, "-m", "llama_train", "run", config_file, "--data.micro-batch-size", 4]
    process = _start([*alone, "--folder", tmp_path / "alone"])
    process.communicate(timeout=300)
    assert process.returncode == 0
    # float32, sums in another order; a step multiplies what differs by little
    assert _losses(tmp_path / "run") == pytest.approx(_losses(tmp_path / "alone"), rel=1e-5)
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()


def test_a_mistake_is_told_once_by_one_of_the_processes(config_file: Path, tmp_path: Path) -> None:
    torchrun = [SCRIPTS / "torchrun", "--nproc-per-node", 2, "-m", "llama_train"]
    process = _start([*torchrun, "run", config_file, "--parallel.pp", 2, "--model.num-hidden-layers", 1])
    _, errors = process.communicate(timeout=300)
    assert process.returncode != 0
    lines = errors.splitlines()
    (place,) = [number for number, line in enumerate(lines) if line.startswith("llama-train: ")]
    assert lines[place].startswith("llama-train: pp 2 cannot run this model: 1 layers are fewer than pp 2")
    assert not any("Traceback" in line for line in lines[:place])  # torchrun has one of its own to show, after it
    assert not (tmp_path / "run").exists()


LAUNCH = ["launch", "--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no", "--num_processes", 2]
TORCHRUN = [SCRIPTS / "torchrun", "--nproc-per-node", 2]
ACCELERATE = [SCRIPTS / "accelerate", *LAUNCH, "--multi_gpu"]  # torchrun's launcher, which needs no GPU either
CONSOLE = SCRIPTS / "llama-train"


@pytest.mark.parametrize(
    "starter",
    [
        [*TORCHRUN, "-m", "llama_train"],
        [*TORCHRUN, "--no-python", CONSOLE],
        [*ACCELERATE, "-m", "llama_train"],
        [*ACCELERATE, "--no_python", CONSOLE],
    ],
    ids=["torchrun -m", "torchrun --no-python", "accelerate -m", "accelerate console"],
)
def test_two_ranks_on_a_cpu(starter: list[object], config_file: Path, tmp_path: Path) -> None:
    process = _start([*starter, "run", config_file, "--parallel.tp", 2, "--device", "cpu"])
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "layout     tp 2: 2 processes" in output
    assert output.count("step 3/3") == 1
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()


# A rank that dies once, in the middle of a step, as if its host had gone.
MORTAL = """
import os, signal, sys
from llama_train import loop
from llama_train.cli import main

rate = loop.learning_rate
def mortal(step, *rest):
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and step == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return rate(step, *rest)

loop.learning_rate = mortal
sys.exit(main())
"""


def test_a_rank_that_dies_is_restarted_and_the_run_goes_on_by_itself(
    tiny: TrainConfig, tmp_path: Path, change: Callable[..., TrainConfig]
) -> None:
    """torchrun ends the other rank and starts both again; they take up the newest checkpoint."""
    base = change(tiny, **{"schedule.steps": 8, "checkpoint.every": 2, "data.micro_batch_size": 2})
    (tmp_path / "mortal.py").write_text(MORTAL, encoding="utf-8")
    path = tmp_path / "tiny.toml"
    path.write_text(dump_config(base), encoding="utf-8")
    process = _start([*TORCHRUN, "--max-restarts", 1, tmp_path / "mortal.py", "run", path])
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    # the save of step 4 may have been under way beside step 5 when the rank died in step 6
    (resumed,) = [line for line in output.splitlines() if line.startswith("resumed ")]
    assert resumed.split()[2] in ("2,", "4,")
    assert output.count("step 8/8") == 1
    assert len(_losses(tmp_path / "run")) == 8
