"""What `import llama_core` offers, and what it does not import before it is asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import llama_core


def _imported(nodes: list[ast.stmt]) -> dict[str, str]:
    found = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module is not None:
            for alias in node.names:
                assert alias.asname == alias.name
                found[alias.name] = node.module
    return found


def test_names_for_type_checkers_are_those_that_are_found_later() -> None:
    tree = ast.parse(Path(str(llama_core.__file__)).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    assert _imported(block.body) == llama_core._LATER
    for name in llama_core._LATER:
        assert getattr(llama_core, name) is not None
        assert name in dir(llama_core)
    assert llama_core.Llama.__module__ == "llama_core.model"
    with pytest.raises(AttributeError, match="module 'llama_core' has no attribute 'Lama'"):
        llama_core.Lama  # noqa: B018


def test_tokenizing_does_not_wait_for_torch(tmp_path: Path) -> None:
    program = """
import sys
import llama_core
assert not {"torch", "numpy", "tokenizers", "jinja2"} & set(sys.modules)
from llama_core import CheckpointError, LlamaConfig, load_tokenizer, preset
from llama_core.embedded import find_embedded
preset("llama-3-8b")
find_embedded()
try:
    load_tokenizer(sys.argv[1])
except CheckpointError:
    pass
assert "torch" not in sys.modules
from llama_core import Llama
assert "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120)
