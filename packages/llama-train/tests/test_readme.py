"""Every command and example of README.md runs; the quickstart is shortened by flags, but for the slow test."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from llama_parallel.testing import run_ranks
from llama_train import TrainConfig, load_config
from llama_train.cli import main
from llama_train.config_file import dump_config
from llama_train.tokenizer_training import save_tokenizer, train_tokenizer

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
# The section on models that exist has a file of its own, test_readme_lora.py.
_BEFORE, _, _AFTER = README.partition("## From a model that exists\n")
BLOCKS = [(m["language"], m["code"]) for m in FENCE.finditer(_BEFORE + _AFTER[_AFTER.index("\n## ") + 1 :])]
COMMANDS = [line for language, code in BLOCKS if language == "bash" for line in code.splitlines()]
# What makes a run short: few steps over little text.
SHORT = {"schedule.warmup_steps": 1, "schedule.steps": 2, "data.source": "my-text", "data.vocab_size": 1024}
EXAMPLE = Path(__file__).parents[3] / "examples" / "quickstart.toml"


def _code(language: str) -> str:
    (code,) = [code for found, code in BLOCKS if found == language]
    return code


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the README tells its reader to have."""
    (tmp_path / "quickstart.toml").write_text(_code("toml"), encoding="utf-8")
    (tmp_path / "my-text").mkdir()
    random = Random(0)
    for name in ("a.txt", "b.md", "c.txt"):
        words = ["".join(random.choices("aeioulmnrst", k=random.randint(2, 9))) for _ in range(3000)]
        (tmp_path / "my-text" / name).write_text(" ".join(words), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_file_shown_is_the_example() -> None:
    assert EXAMPLE.read_text(encoding="utf-8") == _code("toml")


def test_every_command_is_run_below() -> None:
    programs = ("llama-train", "llama-infer", "torchrun", "accelerate")
    assert {line.split()[0] for line in COMMANDS} == set(programs)
    assert len(COMMANDS) == 26


BRANCHES = [line for line in COMMANDS if "--schedule.shape wsd" in line]


def test_commands_of_a_branch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shortened two hundredfold."""
    short = ["--schedule.warmup-steps", "1", "--checkpoint.every", "4", "--data.source", "my-text"]
    short += ["--data.vocab-size", "1024", "--evaluation.sample-tokens", "1", "--evaluation.max-tokens", "500"]
    trunk, branch = BRANCHES
    assert main([*shlex.split(trunk)[1:], *short, "--schedule.steps", "8"]) == 0
    branch = branch.replace("00000800", "00000004").replace("1000", "5").replace("200", "1")
    capsys.readouterr()
    assert main([*shlex.split(branch)[1:], *short]) == 0
    out = capsys.readouterr().out
    assert "resumed    step 4, from runs/trunk/checkpoints/step-00000004" in out
    assert "step 5/5" in out


SHARDS = [line for line in COMMANDS if "prepare " in line or "--data.sources" in line]

MANAGING = [line for line in COMMANDS if re.match(r"llama-train (init|plot|collect|submit|bench sweep)", line)]


def test_commands_that_manage_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In their order, after two short runs; the sweep, which starts processes, is shortened to one case."""
    for name in ("quickstart", "mine"):
        assert main(["run", "quickstart.toml", *_short(), "--name", name, "--device", "cpu"]) == 0
    (folder / "experiments").mkdir()
    shutil.copy("quickstart.toml", "experiments")
    one_case = shlex.split("--micro-batch 2 --activation-checkpointing none --steps 1 --warmup 1 --device cpu")
    for line in MANAGING:
        arguments = shlex.split(line)[1:]
        assert main([*arguments, *(one_case if arguments[:2] == ["bench", "sweep"] else [])]) == 0, line
    out = capsys.readouterr().out
    assert "4 rows × 16 accumulated × 1 data-parallel = 64 rows of 512 tokens = 32.77K tokens a step" in out
    assert load_config("small.toml").model.num_hidden_layers == 6
    assert (folder / "curves.html").is_file()
    assert (folder / "runs" / "runs.csv").read_text(encoding="utf-8").count("finished") == 2
    assert (folder / "sweep" / "sweep.csv").is_file()
    assert "#SBATCH --partition=gpu" in out
    assert "experiments/quickstart.toml" in out.splitlines()[-1]


def test_commands_of_prepared_shards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = train_tokenizer([(folder / "my-text" / "a.txt").read_text(encoding="utf-8")], 300)
    save_tokenizer(tokenizer, folder / "runs" / "quickstart" / "hf", 10**30)
    record = json.dumps({"prompt": "How? ", "completion": "So."})
    (folder / "questions.jsonl").write_text(f"{record}\n" * 20, encoding="utf-8")
    prepare, run = SHARDS
    assert main(shlex.split(prepare)[1:]) == 0
    assert "23 documents" in capsys.readouterr().out
    assert main([*shlex.split(run)[1:], *_short()]) == 0
    assert "step 2/2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [line for line in COMMANDS if line.startswith("llama-train") and line not in SHARDS + MANAGING + BRANCHES],
)
def test_command(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process: the ways to start the program have tests of their own in test_cli and test_torchrun."""
    arguments = shlex.split(command)[1:]
    if "--help" in arguments:
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
        assert "--optimizer.learning-rate" in capsys.readouterr().out or arguments[0] != "run"
        return
    if arguments[0] == "plan":
        assert main([*arguments, "--micro-batch", "1"]) == 0
        assert "Recommended: " in capsys.readouterr().out
        return
    if arguments[0] == "bench":
        assert main([*arguments, "--hidden-size", "32", "--layers", "1", "--steps", "1"]) == 0
        assert (folder / "scaling.svg").is_file()
        return
    if arguments[0] == "parity":
        assert main([*arguments, "--steps", "1"]) == 0
        assert "equal to one process" in capsys.readouterr().out
        return
    assert main([*arguments, *_short()]) == 0
    assert "step 2/2" in capsys.readouterr().out
    (run,) = (folder / "runs").iterdir()
    assert (run / "hf" / "model.safetensors").is_file()


@pytest.mark.parametrize("command", [line for line in COMMANDS if " run " in line and line.split()[0] != "llama-train"])
def test_command_of_several_processes(command: str, folder: Path) -> None:
    """What follows `run`, on as many forked ranks as the command starts; test_torchrun starts them for real."""
    count = re.search(r"(?:--nproc-per-node|--num_processes) (\d+)", command)
    assert count is not None
    words = shlex.split(command)
    arguments = [str(EXAMPLE.parent.parent / word) if "/" in word else word for word in words[words.index("run") :]]

    def work(rank: int) -> int:
        return main([*arguments, *_short(), "--device", "cpu"])

    assert run_ranks(work, int(count[1]), timeout=200) == [0] * int(count[1])
    (run,) = (folder / "runs").iterdir()
    assert (run / "hf" / "model.safetensors").is_file()


def _short() -> list[str]:
    return [word for key, value in SHORT.items() for word in (f"--{key}", str(value))]


def test_python_example(folder: Path, change: Callable[..., TrainConfig], capsys: pytest.CaptureFixture[str]) -> None:
    short = load_config("quickstart.toml")
    for key, value in SHORT.items():
        short = change(short, **{key: value})
    (folder / "quickstart.toml").write_text(dump_config(short), encoding="utf-8")
    exec(compile(_code("python"), "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines()[-1].endswith("hf")


@pytest.mark.slow
def test_the_quickstart_in_full(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Issue 2: held-out loss under 54% of ln(vocabulary); then the model that was written continues a line.

    The loss curve is the golden one: means of 200 steps, over the library of Python 3.11. A mean of 200 losses that
    scatter by 0.2 is good to 0.4%; another Python's library differs in some of its files. 3% holds both, and a run
    whose moments, data order or schedule are wrong does not stay within it (test_golden has the fine comparison).
    """
    assert main(["run", "quickstart.toml", "--logging.every", "1"]) == 0
    output = capsys.readouterr().out
    lines = (folder / "runs" / "quickstart" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if record["kind"] == "train"]
    means = [sum(losses[first : first + 200]) / 200 for first in range(0, 1600, 200)]
    assert means == pytest.approx([6.037, 4.845, 4.410, 4.140, 3.920, 3.793, 3.685, 3.618], rel=0.03)
    share = re.search(r"([\d.]+)% of ln\(2048\)", output)
    assert share is not None
    assert float(share[1]) < 54.0
    infer = pytest.importorskip("llama_infer.cli", reason="llama-infer is no dependency of llama-train")
    (command,) = [line for line in COMMANDS if line.startswith("llama-infer")]
    assert infer.main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out.strip()
