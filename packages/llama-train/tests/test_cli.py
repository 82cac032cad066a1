from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

from llama_train.cli import main
from llama_train.config import TrainConfig
from llama_train.config_file import dump_config


@pytest.fixture
def config_file(tiny: TrainConfig, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(dump_config(tiny), encoding="utf-8")
    return path


def _run(command: Sequence[object], **keys: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **keys)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule.step", "3"], "--schedule.steps"),  # the nearest one is named
        (["--schedule.steps", "0"], "schedule.steps is 0; it must be at least 1"),
        (["--optimizer.learning-rate", "fast"], "fast"),
        (["--device", "tpu"], "cpu"),
        (["--model.num-attention-heads", "3"], "multiple of num_attention_heads 3"),
        (["--data.source", "nowhere"], "no such file or folder"),
        (["--data.sequence-length", "1000000"], "training tokens allow at most"),
    ],
)
def test_mistakes_are_a_clean_message_and_status_2(
    arguments: list[str], message: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["run", str(config_file), *arguments])
    except SystemExit as error:  # tyro's own way out
        status = int(str(error.code))
    assert status == 2
    shown = capsys.readouterr().err
    assert message in " ".join(shown.replace("│", " ").split())
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "unknown command 'train'"),
        (["run"], "llama-train run CONFIG.toml"),
        (["run", "none.toml"], "none.toml does not exist"),
    ],
)
def test_wrong_commands(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_the_version_is_the_installed_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"llama-train {version('llama-train')}\n"


def test_flags_override_the_file(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "elsewhere"
    flags = ["--folder", str(folder), "--schedule.steps", "4", "--optimizer.betas", "0.8", "0.9"]
    assert main(["run", str(config_file), *flags]) == 0
    assert "step 4/4" in capsys.readouterr().out
    resolved = (folder / "config.toml").read_text(encoding="utf-8")
    assert "steps = 4" in resolved
    assert "betas = [0.8, 0.9]" in resolved
    assert 'device = "cpu"' in resolved
    assert main(["run", str(folder / "config.toml"), "--resume", "never"]) == 2


def test_divergence_is_status_1(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--optimizer.learning-rate", "1e30", "--optimizer.max-grad-norm", "0"]
    assert main(["run", str(config_file), *flags]) == 1
    assert "training stopped" in capsys.readouterr().err


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from llama_train.cli import main\n"
        "verbs = 'init run submit collect plot parity plan bench'.split()\n"
        "for verb in ('', *verbs, 'bench scaling', 'bench sweep'):\n"
        "    try: main([*verb.split(), '--help'])\n"
        "    except SystemExit as stop: assert stop.code == 0\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'matplotlib', 'llama_core', 'llama_kernels', 'llama_parallel'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = _run([sys.executable, "-c", code])
    assert result.returncode == 0, result.stderr
    for flag in ("--device", "--optimizer.learning-rate", "--schedule.warmup-steps"):
        assert flag in result.stdout


@pytest.mark.skipif(os.name != "posix", reason="a pipe without a reader")
def test_the_reader_of_help_may_go_away() -> None:
    reading, writing = os.pipe()
    os.close(reading)  # as `| head` does when it has enough
    with open(writing, "wb") as gone:
        end = subprocess.run(
            [sys.executable, "-m", "llama_train", "run", "--help"], stdout=gone, stderr=subprocess.PIPE, check=False
        )
    assert (end.returncode, end.stderr) == (141, b"")


def test_help_takes_a_second_of_processor_time_at_most() -> None:
    before = os.times()
    assert _run([sys.executable, "-m", "llama_train", "run", "--help"]).returncode == 0
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1.0


def test_the_installed_command_is_this_function() -> None:
    (entry,) = [entry for entry in entry_points(group="console_scripts") if entry.name == "llama-train"]
    assert entry.load() is main


def test_a_terminal_that_knows_only_ascii(config_file: Path) -> None:
    flags = ["--schedule.steps", "4", "--evaluation.sample-tokens", "1", "--evaluation.sample-prompt", "é文"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    result = _run([sys.executable, "-m", "llama_train", "run", config_file, *flags], env=environment)
    assert result.returncode == 0, result.stderr
    assert "sample     ??" in result.stdout


def test_torchrun_with_one_process(config_file: Path, tmp_path: Path) -> None:
    torchrun = Path(sysconfig.get_path("scripts")) / "torchrun"
    command = [torchrun, "--nproc-per-node", 1, "-m", "llama_train", "run", config_file, "--schedule.steps", 5]
    result = _run(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert "step 5/5" in result.stdout
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()


def test_sigterm_saves_and_exits_0_and_the_same_command_goes_on(config_file: Path, tmp_path: Path) -> None:
    """The real thing: a process of its own, stopped in the middle; the two parts equal an undisturbed run."""
    command = [sys.executable, "-m", "llama_train", "run", config_file, "--schedule.steps", "200"]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        output = ""
        for line in process.stdout:
            output += line
            if line.startswith("step   1/"):
                process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
    assert "stopped    by SIGTERM" in output
    assert "Start the same command again" in output
    assert main([*map(str, command[3:])]) == 0
    assert main([*map(str, command[3:]), "--folder", str(tmp_path / "whole")]) == 0
    parts, whole = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("run", "whole")
    )
    assert [record["loss"] for record in parts] == [record["loss"] for record in whole]
