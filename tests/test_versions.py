"""Versions of the five packages: what is built says them, and resolvers take ours and nobody else's.

A package called llama-core, versions 0.1 to 0.4, is on the public index and is not ours. Ours start at 1.0.0 and ask
for each other as >=1.0,<2, so that no resolver can take the other one.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
UV = str(Path(sys.executable).parent / "uv")
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
DEPENDENTS_OF_CORE = ["llama-infer", "llama-parallel", "llama-train"]


def copy_of_tree(to: Path) -> Path:
    to.mkdir()
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, to)
    ignored = shutil.ignore_patterns("__pycache__", "tests", ".*_cache")
    shutil.copytree(ROOT / "packages", to / "packages", symlinks=True, ignore=ignored)
    return to


def build(tree: Path) -> Path:
    """Wheels of all five, without the workspace's sources: what would be published."""
    command = [UV, "build", "--all-packages", "--no-sources", "--wheel", "-q", "-o", tree / "dist"]
    subprocess.run(command, cwd=tree, check=True)
    return tree / "dist"


def set_version(tree: Path, package: str, version: str) -> None:
    path = tree / "packages" / package / "pyproject.toml"
    text, count = re.subn(r'(?m)^version = ".*"$', f'version = "{version}"', path.read_text())
    assert count == 1
    path.write_text(text)


def resolve(requirement: str, *wheels: Path) -> subprocess.CompletedProcess[str]:
    """What uv makes of a requirement, given folders of wheels and the public index, knowing nothing of a workspace."""
    links = [word for folder in wheels for word in ("--find-links", str(folder))]
    command = [UV, "pip", "compile", "--no-config", "--no-header", "--no-annotate", *links, "-"]
    result = subprocess.run(command, input=requirement, cwd=wheels[0], capture_output=True, text=True, check=False)
    if re.search("error sending request|dns error", result.stderr):
        pytest.fail(f"the package index cannot be reached: {result.stderr}")
    return result


def resolved(result: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert result.returncode == 0, result.stderr
    return dict(re.findall(r"(?m)^(llama-[a-z]+)==(\S+)", result.stdout))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(copy_of_tree(tmp_path_factory.mktemp("built") / "tree"))


def test_wheels_say_their_versions_and_ranges(wheels: Path) -> None:
    found = {}
    for path in wheels.glob("*.whl"):
        with zipfile.ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            found[path.name.partition("-")[0].replace("_", "-")] = Parser().parsestr(archive.read(name).decode())
    assert sorted(found) == PACKAGES
    for metadata in found.values():
        assert Version("1.0.0") <= Version(metadata["Version"]) < Version("2")
        assert metadata["Requires-Python"] == ">=3.11"
        assert metadata["License-Expression"] == "Apache-2.0"
        for requirement in map(Requirement, metadata.get_all("Requires-Dist")):
            if requirement.name in PACKAGES:
                # A later floor is fine, a floor below 1 or another ceiling is not.
                assert "2.0" not in requirement.specifier
                assert "0.4" not in requirement.specifier
                assert found[requirement.name]["Version"] in requirement.specifier


def test_changelogs_and_versions_agree() -> None:
    for package in PACKAGES:
        folder = ROOT / "packages" / package
        version = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"]
        newest = re.search(r"(?m)^## (\S+)", (folder / "CHANGELOG.md").read_text())
        assert newest
        assert newest[1] == version, f"{package}: the changelog's first entry is not the version that is built"


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_resolves_from_wheels(wheels: Path, package: str) -> None:
    found = resolved(resolve(package + ">=1.0,<2", wheels))
    assert package in found
    assert all(version.startswith("1.") for version in found.values()), found
    if package in ("llama-core", "llama-kernels"):
        assert list(found) == [package], "a package of the lowest layer brought a sibling"


@pytest.mark.parametrize("package", DEPENDENTS_OF_CORE)
def test_other_peoples_llama_core_is_never_taken(wheels: Path, tmp_path: Path, package: str) -> None:
    for path in wheels.glob("*.whl"):
        if not path.name.startswith("llama_core-"):
            shutil.copy(path, tmp_path)
    result = resolve(package, tmp_path)
    assert result.returncode != 0, f"resolved without our llama-core:\n{result.stdout}"
    assert "llama-core" in result.stderr
    assert "unsatisfiable" in result.stderr


def test_pip_takes_ours(wheels: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", tmp_path, "--find-links", wheels]
    subprocess.run([*pip, "llama-core>=1.0,<2"], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.read_bytes() == (wheels / wheel.name).read_bytes()


def test_next_minor_version_reaches_its_dependents(wheels: Path, tmp_path: Path) -> None:
    tree = copy_of_tree(tmp_path / "tree")
    set_version(tree, "llama-core", "1.99.0")
    newer = build(tree)
    for package in DEPENDENTS_OF_CORE:
        found = resolved(resolve(package + ">=1.0,<2", wheels, newer))
        assert found["llama-core"] == "1.99.0"
        assert found[package] != "1.99.0", "packages are versioned one by one"
    # Who asks for the new one by name gets it, and a package that does not depend on it stays as it was.
    assert resolved(resolve("llama-core==1.99.0", newer)) == {"llama-core": "1.99.0"}
    assert "llama-core" not in resolved(resolve("llama-kernels>=1.0", newer))


def test_next_major_version_does_not(wheels: Path, tmp_path: Path) -> None:
    tree = copy_of_tree(tmp_path / "tree")
    set_version(tree, "llama-core", "2.0.0")
    newer = build(tree)
    for package in DEPENDENTS_OF_CORE:
        assert resolved(resolve(package + ">=1.0,<2", wheels, newer))["llama-core"].startswith("1.")
        result = resolve(package + ">=1.0,<2", newer)
        assert result.returncode != 0, f"{package} took llama-core 2.0.0:\n{result.stdout}"
        assert "llama-core" in result.stderr
