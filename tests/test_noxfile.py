"""The helper that decides what goes into a package's environment."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def noxfile() -> ModuleType:
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(root: Path, package: str, dependencies: list[str], test: list[str]) -> None:
    folder = root / "packages" / package
    folder.mkdir(parents=True)
    text = f"[project]\nname = {package!r}\ndependencies = {dependencies}\n[dependency-groups]\ntest = {test}\n"
    (folder / "pyproject.toml").write_text(text)


def test_closures_of_this_workspace(noxfile: ModuleType) -> None:
    assert noxfile.closure("llama-core") == ["llama-core"]
    assert noxfile.closure("llama-kernels") == ["llama-kernels"]
    assert set(noxfile.closure("llama-parallel")) == {"llama-parallel", "llama-core", "llama-kernels"}
    for application in ("llama-train", "llama-infer"):
        assert set(noxfile.closure(application)) == {application, "llama-parallel", "llama-core", "llama-kernels"}


def test_closure_follows_extras_ranges_markers_and_spellings(noxfile: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "one", ["Two_Under[extra]>=1.0,<2", "torch>=2.11"], [])
    write(tmp_path, "two-under", ["three>=1.0 ; sys_platform == 'linux'"], ["four"])
    write(tmp_path, "three", ["one"], [])  # a cycle must not go round for ever
    write(tmp_path, "four", [], [])
    assert noxfile.closure("one", root=tmp_path) == ["one", "two-under", "three"]


def test_closure_adds_what_the_test_group_names(noxfile: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "kernels", ["torch"], ["pytest", "core>=1.0"])
    write(tmp_path, "core", ["base"], [])
    write(tmp_path, "base", [], [])
    assert noxfile.closure("kernels", root=tmp_path) == ["kernels"]
    needs = noxfile.needs_of_tests("kernels", tmp_path)
    assert noxfile.closure("kernels", *needs, root=tmp_path) == ["kernels", "core", "base"]


def test_pinned_torch_is_one_that_the_packages_accept(noxfile: ModuleType) -> None:
    from packaging.requirements import Requirement

    for package in noxfile.PACKAGES:
        (torch,) = (
            Requirement(line)
            for line in noxfile.project(package)["project"]["dependencies"]
            if Requirement(line).name == "torch"
        )
        assert str(torch.specifier) == "<2.16,>=2.11"
        assert noxfile.pinned("torch") in torch.specifier
