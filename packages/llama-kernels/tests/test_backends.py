"""backends(): what is there and why not; and the README's example."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import llama_kernels
from llama_kernels import backends


def test_cpu_says_why_not():
    rows = backends("cpu")
    assert "GPU" in rows["triton"]
    assert "GPU" in rows["fp8"]
    assert rows["attention: plain"] is None
    assert rows["attention: flash_cpu"] is None
    assert "CUDA" in rows["attention: cudnn"]


@pytest.mark.gpu
def test_gpu_has_triton():
    rows = backends()
    assert rows["triton"] is None
    assert rows["attention: triton"] is None


def test_prints_a_table():
    code = "import runpy; runpy.run_module('llama_kernels.backends', run_name='__main__')"
    # The module is imported by its package before it runs as a script; Python remarks on that.
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(backends())
    assert re.match(r"triton +(available|not: )", lines[0])


def test_readme_example():
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"torch": torch})


def test_which_backend_serves_is_known_from_shapes() -> None:
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "length": 128}
    assert llama_kernels.attention_backend("cpu", torch.float32, **sizes) == "flash_cpu"
    assert llama_kernels.attention_backend("cpu", torch.float64, **sizes) == "plain"
    assert llama_kernels.attention_backend("cpu", torch.float64, backend="plain", **sizes) == "plain"
    with pytest.raises(ValueError, match="'cudnn' cannot serve this call: cudnn: it needs a CUDA device"):
        llama_kernels.attention_backend("cpu", torch.float32, backend="cudnn", **sizes)
    with pytest.raises(ValueError, match="backend 'cuda' is unknown; choose one of None, 'sdpa', 'flash'"):
        llama_kernels.attention_backend("cpu", torch.float32, backend="cuda", **sizes)


@pytest.mark.gpu
def test_which_backend_serves_on_a_gpu() -> None:
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "length": 128}
    assert llama_kernels.attention_backend("cuda", torch.bfloat16, **sizes) in ("flash4", "cudnn")
    assert llama_kernels.attention_backend("cuda", torch.float32, **sizes) == "triton"
