"""The command line as a whole: help at once, mistakes in one line, clean ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from llama_infer import cli, embedded

Save = Callable[..., Path]
COMMAND = [sys.executable, "-m", "llama_infer"]


def fails(capfd: pytest.CaptureFixture[str], *argv: str) -> str:
    """The message of a command line that ends with 2 and prints nothing else."""
    assert cli.main(argv) == 2
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    return out + err


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, time; start = time.process_time(); from llama_infer.cli import main\n"
        "codes = [main(['--help']), main(['generate', '--help']), main(['chat', '--help'])]\n"
        "heavy = {'torch', 'numpy', 'transformers', 'tokenizers', 'jinja2'} & set(sys.modules)\n"
        "print(codes, sorted(heavy), time.process_time() - start)"
    )
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[-1].startswith("[0, 0, 0] [] ")
    assert float(lines[-1].split()[-1]) < 1  # all three, in processor time: a busy machine is no failure
    for flag in ("--model", "--prompt", "--chat", "--temperature", "--top-p", "--stop", "--generation-config"):
        assert any(line.startswith(f"│ {flag}") for line in lines), flag


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["generate", "--prompt", "x", "--temprature", "0"], ["--temprature", "--temperature"]),
        (["generat"], ["generat", "generate, chat"]),
        (["generate"], ["nothing to continue; give --prompt", "--input"]),
        (["generate", "--prompt", "x", "--max-tokens", "many"], ["--max-tokens", "many"]),
        (["generate", "--prompt", "x", "--device", "gpu"], ["gpu", "cuda"]),
    ],
)
def test_wrong_flags_are_explained(capfd: pytest.CaptureFixture[str], argv: list[str], words: list[str]) -> None:
    message = fails(capfd, *argv)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--prompt", "x", "--temperature", "-1"], "temperature must be a finite number of at least 0, got -1.0"),
        (["--prompt", "x", "--top-p", "2"], "top_p must be in (0, 1], got 2.0"),
        (["--prompt", "x", "--model", "nowhere"], "nowhere does not exist; --model wants a model's folder, a"),
        (["--prompt", "x", "--model", "./no/where"], "no/where does not exist; --model wants a model's folder, a"),
        (["--prompt", "x", "--system", "y"], "--system is a message of a chat; add --chat"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x", "--input", "y"], "--prompt and --input are two ways to say what to continue; give one"),
        (["--prompt", "x", "--output", "y"], "--output belongs to --input; a single result is printed"),
        (["--prompt", "x", "--structured-outputs", "{"], "--structured-outputs must be a JSON object: Expecting"),
        (["--prompt", "x", "--structured-outputs", "{}"], "structured_outputs takes one of json, json_object, regex"),
        (["--prompt", "x", "--draft", "nowhere"], "nowhere does not exist; --model wants a model's folder, a"),
        (["--prompt", "x", "--stop", "\udcff"], "stop must hold texts that UTF-8 can hold"),
        (["--prompt", "x", "--model", "m" * 300], f"--model '{'m' * 300}': File name too long"),
        (["--prompt", "x", "--model", "~nobody-has-this-name/m"], "--model '~nobody-has-this-name/m': "),
    ],
)
def test_wrong_values_are_one_line(capfd: pytest.CaptureFixture[str], argv: list[str], line: str) -> None:
    message = fails(capfd, "generate", *argv)
    assert message.startswith(f"llama-infer: {line}")
    assert message.count("\n") == 1


def test_no_model_at_all_is_one_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_embedded", lambda: None)
    for argv in (["generate", "--prompt", "x"], ["chat"]):
        message = fails(capfd, *argv)
        assert message.startswith("llama-infer: no --model given, and SmolLM2-135M-Instruct is not installed")
        assert message.endswith(f"{embedded.INSTALL}\n")
        assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model", None, "no tokenizer found"),
        ("model.gguf", b"GGUF", ""),
        ("model.gguf", b"nonsense", ""),
        ("model.bin", b"nonsense", ""),
    ],
)
def test_a_bad_model_is_a_clean_error(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    path = tmp_path / name
    path.mkdir() if content is None else path.write_bytes(content)
    message = fails(capfd, "generate", "--prompt", "x", "--model", str(path))
    assert message.startswith("llama-infer: ")
    assert name in message
    assert words in message


def test_the_reader_may_go_away(save: Save) -> None:
    argv = ["generate", "--model", str(save(max_position_embeddings=4096)), "--prompt", "x", "--device", "cpu"]
    process = subprocess.Popen(
        [*COMMAND, *argv, "--max-tokens", "2000", "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(timeout=120) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.skipif(os.name != "posix", reason="a pipe without a reader")
def test_the_reader_of_help_may_go_away() -> None:
    reading, writing = os.pipe()
    os.close(reading)  # as `| head` does when it has enough
    with open(writing, "wb") as gone:
        end = subprocess.run([*COMMAND, "generate", "--help"], stdout=gone, stderr=subprocess.PIPE, check=False)
    assert (end.returncode, end.stderr) == (141, b"")


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_control_c_ends_cleanly(save: Save) -> None:
    argv = ["generate", "--model", str(save(max_position_embeddings=100_000)), "--prompt", "x", "--device", "cpu"]
    process = subprocess.Popen(
        [*COMMAND, *argv, "--max-tokens", "99000", "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.read(10)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err == b"\n"


def test_a_terminal_without_the_character(save: Save) -> None:
    argv = ["generate", "--model", str(save()), "--prompt", "ä ☃", "--device", "cpu", "--seed", "1"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*COMMAND, *argv], capture_output=True, env=environment, check=True)
    assert done.stdout.endswith(b"\n")
    assert done.stdout.isascii()


@pytest.mark.skipif(os.name != "posix", reason="closes streams as a shell does")
@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [
        ("--prompt - <&-", 2, "llama-infer: the prompt is empty"),
        ("--prompt x --max-tokens 2 >&-", 0, "llama-infer: stopped at the limit"),
        ("--prompt x --max-tokens 2 2>&-", 0, ""),
        ("--prompt x --max-tokens 2 >/dev/full", 1, "llama-infer: No space left on device"),
    ],
)
def test_closed_and_full_streams(save: Save, redirection: str, code: int, message: str) -> None:
    if "/dev/full" in redirection and not Path("/dev/full").exists():
        pytest.skip("only Linux has /dev/full")
    command = f"exec '{sys.executable}' -m llama_infer generate --model '{save()}' --device cpu --ignore-eos "
    done = subprocess.run(["/bin/sh", "-c", command + redirection], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == (1 if message else 0)


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capfd.readouterr().out == f"llama-infer {version('llama-infer')}\n"
