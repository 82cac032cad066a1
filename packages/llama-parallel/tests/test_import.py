"""Importing the package is cheap, and every public name is there."""

import subprocess
import sys
from pathlib import Path

import llama_parallel


def test_sizes_need_no_torch() -> None:
    code = "import sys; from llama_parallel import ParallelConfig, read_process; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_every_public_name_is_found_and_no_other() -> None:
    text = Path(llama_parallel.__file__).read_text(encoding="utf-8")
    names = [line.split(" as ")[1] for line in text.splitlines() if " as " in line]
    assert len(names) == len(set(names)) >= 14
    for name in names:
        assert callable(getattr(llama_parallel, name)), name
    assert not hasattr(llama_parallel, "no_such_name")
