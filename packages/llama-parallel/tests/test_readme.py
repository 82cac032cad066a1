"""The README's program runs under torchrun, and its other examples by themselves."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llama_parallel.testing import run_ranks

README = Path(__file__).parents[1] / "README.md"
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(block["language"], block["code"]) for block in FENCE.finditer(README.read_text(encoding="utf-8"))]


def code(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def test_every_block_is_known() -> None:
    assert [name for name, _ in BLOCKS] == ["python", "bash", "python", "python", "python", "bash"]


@pytest.mark.parametrize("layout", ["dp_shard=2, tp=2", "pp=2, tp=2"])
def test_the_program_trains_on_four_processes(layout: str, tmp_path: Path) -> None:
    program, command = code("python")[0], code("bash")[0].split()
    program = program.replace("ParallelConfig(dp_shard=2, tp=2)", f"ParallelConfig({layout})")
    assert layout in program
    assert program.startswith(f"# {command[-1]}\n")
    (tmp_path / command[-1]).write_text(program)
    assert command[0] == "torchrun"
    torchrun = [sys.executable, "-m", "torch.distributed.run", *command[1:]]
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(torchrun, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    tokens = 128 if "dp_shard" in layout else 64  # 2 data-parallel ranks of 4 rows of 16, or 1
    assert f", {tokens} tokens" in done.stdout


def test_the_refused_layout_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    block = code("python")[1]
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
    shown = re.search(r"print\(error\)  # (.*?); …", block)
    assert shown is not None
    assert capsys.readouterr().out.startswith(shown[1])


@pytest.mark.parametrize("context", ["ring", "ulysses"])
def test_two_processes_share_long_sequences(context: str) -> None:
    block = code("python")[2].replace('context="ring"', f'context="{context}"')

    def work(rank: int) -> str:
        names: dict[str, object] = {"__name__": "__main__"}
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            exec(compile(block, "README.md", "exec"), names)
        return shown.getvalue()

    first, second = run_ranks(work, 2)
    assert first == second
    assert re.fullmatch(r"loss \d\.\d{4} over 64 tokens\n", first)


def test_layers_and_bubbles_are_as_shown(capsys: pytest.CaptureFixture[str]) -> None:
    block = code("python")[3]
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
    shown = [re.search(r"# (\([\d, ]+\)): ", block), *re.finditer(r"^# (.+)$", block, re.MULTILINE)]
    assert capsys.readouterr().out.splitlines() == [line[1] for line in shown if line is not None]


def test_the_tests_are_where_it_says() -> None:
    folder = code("bash")[1].split()[3]
    assert Path(__file__).parent.samefile(README.parents[2] / folder)
