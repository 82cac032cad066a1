"""The rules on imports hold, and each of them is seen to fail when it is broken in a copy of the tree."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the workspace that a test may break."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ignored = shutil.ignore_patterns("__pycache__", "tests", ".*_cache")
    shutil.copytree(ROOT / "packages", tmp_path / "packages", ignore=ignored)
    return tmp_path


def plant(tree: Path, package: str, code: str) -> None:
    module = package.replace("-", "_")
    (tree / "packages" / package / "src" / module / "planted.py").write_text(code + "\n")


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    # PYTHONPATH comes before the editable installs, so that the copies are what is looked at.
    sources = os.pathsep.join(str(path) for path in tree.glob("packages/*/src"))
    command = [BIN / "lint-imports", "--no-cache", "--config", "pyproject.toml"]
    environ = {**os.environ, "PYTHONPATH": sources}
    return subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True, check=False)


def banned_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [BIN / "ruff", "check", "--no-cache", "--select=TID251", "packages"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)


def test_the_tree_keeps_the_rules(tree: Path) -> None:
    result = lint_imports(tree)
    assert result.returncode == 0, result.stdout
    assert "one way KEPT" in result.stdout
    result = banned_imports(tree)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("package", "imported"),
    [
        ("llama-core", "llama_kernels"),
        ("llama-core", "llama_parallel"),
        ("llama-core", "llama_infer"),
        ("llama-kernels", "llama_core"),
        ("llama-parallel", "llama_train"),
        ("llama-train", "llama_infer"),
        ("llama-infer", "llama_train"),
    ],
)
def test_import_against_the_direction_is_seen(tree: Path, package: str, imported: str) -> None:
    plant(tree, package, f"def late():\n    import {imported}")  # hidden in a function, as such imports are
    result = lint_imports(tree)
    assert result.returncode != 0
    assert "one way BROKEN" in result.stdout
    assert f"{package.replace('-', '_')}.planted -> {imported}" in result.stdout


@pytest.mark.parametrize(
    "code",
    [
        "import triton",
        "from triton import language as tl",
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed.tensor import DTensor",
        "import torch\nrank = torch.distributed.get_rank()",
    ],
)
def test_core_may_not_use_triton_or_torch_distributed(tree: Path, code: str) -> None:
    plant(tree, "llama-core", code)
    result = banned_imports(tree)
    assert result.returncode != 0, "the planted import went unseen"
    assert "planted.py" in result.stdout
    assert "TID251" in result.stdout


def test_the_ban_is_on_core_alone(tree: Path) -> None:
    plant(tree, "llama-kernels", "import triton")
    plant(tree, "llama-parallel", "import torch.distributed")
    result = banned_imports(tree)
    assert result.returncode == 0, result.stdout


def declared(package: str) -> set[str]:
    """Module names of the package's dependencies and extras. Each of ours and theirs is named like its module."""
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    requirements = [*project["dependencies"], *(line for extra in extras for line in extra)]
    names = (re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in requirements)
    return {name.replace("-", "_").lower() for name in names}


def undeclared(package: str, source: str) -> set[str]:
    """Modules that the source imports, though they are neither Python's, nor the package's own, nor declared."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).partition(".")[0])
    return found - set(sys.stdlib_module_names) - declared(package) - {package.replace("-", "_")}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_are_declared(package: str) -> None:
    files = list((ROOT / "packages" / package / "src").rglob("*.py"))
    assert files
    wrong = {path.name: names for path in files if (names := undeclared(package, path.read_text()))}
    assert not wrong, f"{package} imports what its pyproject.toml does not declare"


def test_undeclared_import_is_seen() -> None:
    lines = ["import os", "import torch.nn", "from llama_core import model", "from . import rope"]
    hidden = ["def late():", "    import requests.api"]
    code = "\n".join(lines + hidden)
    assert undeclared("llama-core", code) == {"requests"}
    assert undeclared("llama-kernels", code) == {"requests", "llama_core"}
