"""Everything that is checked, one session each: `nox -l` lists them, plain `nox` runs the starred ones.

uv makes the environments; what goes into them is an explicit `session.install`. Run from this folder, `uv pip` obeys
the root pyproject's constraint (the one tested torch) and overrides (the embedded model without its two heavy needs);
`minimums` and `build` leave those out where they must see what a user's resolver sees.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import nox

nox.needs_version = ">=2025.10.16"
nox.options.default_venv_backend = "uv"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False  # 3.12 and 3.13 are tested where they are present

ROOT = Path(__file__).parent
WORKSPACE = nox.project.load_toml(ROOT / "pyproject.toml")
UV_SETTINGS = WORKSPACE["tool"]["uv"]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
PYTHONS = nox.project.python_versions(WORKSPACE)
FLOOR = PYTHONS[0]

# Workers times threads is the number of cores. A fifth worker costs another import of torch and saves little.
WORKERS = str(min(4, os.cpu_count() or 1))


# --- what goes into an environment -----------------------------------------------------------------------------------


def project(package: str, root: Path = ROOT) -> dict[str, Any]:
    """The member's pyproject.toml."""
    return nox.project.load_toml(root / "packages" / package / "pyproject.toml")


def group(*names: str) -> tuple[str, ...]:
    """Requirements of dependency groups of the root."""
    return nox.project.dependency_groups(WORKSPACE, *names)


def needs_of_tests(package: str, root: Path = ROOT) -> tuple[str, ...]:
    """Requirements of the member's own test group."""
    return nox.project.dependency_groups(project(package, root), "test")


def closure(package: str, *extra: str, root: Path = ROOT) -> list[str]:
    """The package, then every sibling that its dependencies or the `extra` requirements reach, each once.

    Siblings are followed through `[project].dependencies` only: their test groups are their own business.
    """
    members = {path.parent.name for path in root.glob("packages/*/pyproject.toml")}
    found = [package]
    wanted = [*project(package, root)["project"]["dependencies"], *extra]
    while wanted:
        name = re.split(r"[^A-Za-z0-9._-]", wanted.pop(0).strip(), maxsplit=1)[0]
        name = re.sub(r"[-_.]+", "-", name).lower()
        if name in members and name not in found:
            found.append(name)
            wanted += project(name, root)["project"]["dependencies"]
    return found


def editable(*packages: str) -> list[str]:
    """Options that install members from the tree."""
    return [word for package in packages for word in ("-e", f"packages/{package}")]


def check_torch(session: nox.Session, release: str) -> None:
    """Stop unless the session tests the torch that it says it tests."""
    code = f"import torch; print('torch', torch.__version__); assert torch.__version__.startswith({release!r})"
    session.run("python", "-c", code)


def pytest(session: nox.Session, *args: str) -> None:
    """Run pytest under the root's settings (errors for warnings, strict markers), wherever the tests live."""
    # Tests that start uv or nox of their own must not be sent back into this session's environment.
    env = {"OMP_NUM_THREADS": "1", "UV_PROJECT_ENVIRONMENT": None, "UV_PYTHON": None, "VIRTUAL_ENV": None}
    session.run("pytest", "-c", "pyproject.toml", "--rootdir=.", *args, *session.posargs, env=env)


# --- sessions that plain `nox` runs ----------------------------------------------------------------------------------


@nox.session(python=FLOOR)
def lint(session: nox.Session) -> None:
    """Ruff: rules and format of every file."""
    session.install(*group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(python=FLOOR)
def boundaries(session: nox.Session) -> None:
    """Imports flow one way and name only what is declared; a planted violation is seen."""
    session.install(*group("boundaries"))
    session.install("--no-deps", *editable(*PACKAGES))
    session.run("lint-imports", "--no-cache")
    pytest(session, "tests/test_boundaries.py")


@nox.session(python=FLOOR)
def types(session: nox.Session) -> None:
    """Mypy, strict, on the source of all packages."""
    session.install(*group("types"), *editable(*PACKAGES), "llama-infer[guided,serve,bench]")
    session.run("mypy", *(f"packages/{package}/src" for package in PACKAGES))


@nox.session
@nox.parametrize(
    "python,package",
    [
        nox.param(python, package, id=package if python == FLOOR else f"{package}-{python}", tags=[package])
        for python in PYTHONS
        for package in PACKAGES
    ],
)
def tests(session: nox.Session, package: str) -> None:
    """One package with what it declares and nothing else. Every Python that is present: nox -t PACKAGE."""
    needs = needs_of_tests(package)
    session.install(*editable(*closure(package, *needs)), *needs)
    check_torch(session, pinned("torch"))
    # Tests of parallel code fork ranks of their own, which xdist's workers would only crowd.
    workers = "0" if package == "llama-parallel" else WORKERS
    pytest(session, f"packages/{package}/tests", "-m", "not gpu and not slow and not browser", "-n", workers)


@nox.session(python=FLOOR)
def browser(session: nox.Session) -> None:
    """The server's chat page in a real browser: Debian's Chromium, or another on PATH."""
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        # CI has installed one; elsewhere nobody should need a browser to work on the rest.
        (session.error if "CI" in os.environ else session.skip)("no Chromium on PATH; Debian: apt-get install chromium")
    needs = needs_of_tests("llama-infer")
    session.install(*editable(*closure("llama-infer", *needs)), *needs, *group("browser"))
    pytest(session, "packages/llama-infer/tests", "-m", "browser")


@nox.session(python=FLOOR)
def build(session: nox.Session) -> None:
    """Wheels: each installed from wheels in a clean environment outside the workspace, and imported."""
    with tempfile.TemporaryDirectory(prefix="llama-wheels-") as folder:
        session.run("uv", "build", "--all-packages", "--no-sources", "-q", "-o", f"{folder}/dist")
        wheels = {path.name.split("-")[0].replace("_", "-"): path for path in Path(folder).glob("dist/*.whl")}
        if sorted(wheels) != PACKAGES:
            session.error(f"built wheels of {sorted(wheels)}, not of {PACKAGES}")
        shutil.copy(ROOT / "tests" / "installed.py", folder)
        python = str(Path(session.bin) / "python")
        for package in PACKAGES:
            siblings = closure(package)
            # By path: a stranger's package of a sibling's name has no way in.
            paths = [str(wheels[name]) for name in siblings]
            venv = f"{folder}/{package}"
            with session.chdir(folder):
                session.run("uv", "venv", "-q", "-p", python, venv)
                session.run("uv", "pip", "install", "-q", "-p", venv, *paths)
                session.run(f"{venv}/bin/python", "-I", "installed.py", *siblings, external=True)
            shutil.rmtree(venv)


@nox.session(python=FLOOR)
def docs(session: nox.Session) -> None:
    """The site, from docs/ and docstrings, into build/docs; every warning is an error."""
    session.install(*group("docs"), *editable(*PACKAGES))
    session.run("python", "-m", "doctest", "docs/public_api.py")
    pytest(session, "packages/llama-parallel/tests/test_docs.py")
    env = {"OMP_NUM_THREADS": "1"}
    session.run("sphinx-build", "-q", "-E", "-W", "--keep-going", "-d", "build/doctrees", "docs", "build/docs", env=env)
    session.log("see build/docs/index.html")


@nox.session(python=FLOOR)
def workspace(session: nox.Session) -> None:
    """Versions and ranges resolve from built wheels; the commands of READMEs and docs do what they say."""
    session.install(*group("workspace"))
    pytest(session, "tests", "--ignore=tests/test_boundaries.py", "-m", "not gpu and not slow")


# --- sessions that are asked for by name -----------------------------------------------------------------------------


@nox.session(python=FLOOR, default=False)
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def minimums(session: nox.Session, package: str) -> None:
    """The tests on the oldest release of every direct dependency (torch 2.11)."""
    # --no-config leaves the root's constraints out; its overrides come back by hand.
    overrides = Path(session.create_tmp()) / "overrides.txt"
    overrides.write_text("\n".join(UV_SETTINGS["override-dependencies"]) + "\n")
    needs = needs_of_tests(package)
    oldest = ["--no-config", "--resolution=lowest-direct", f"--overrides={overrides}"]
    session.install(*oldest, *editable(*closure(package, *needs)), *needs)
    check_torch(session, "2.11.")
    workers = "0" if package == "llama-parallel" else WORKERS
    pytest(session, f"packages/{package}/tests", "-m", "not gpu and not slow and not browser", "-n", workers)


@nox.session(python=FLOOR, default=False)
def slow(session: nox.Session) -> None:
    """Tests that take minutes: the README's quickstart, comparisons with other programs."""
    needs = {requirement for package in PACKAGES for requirement in needs_of_tests(package)}
    session.install(*editable(*PACKAGES), *sorted(needs), *group("workspace", "embedded"))
    pytest(session, "packages", "tests", "-m", "slow and not gpu")


@nox.session(venv_backend="none", default=False)
def gpu(session: nox.Session) -> None:
    """Tests marked gpu, in the Python that runs nox: installs nothing, takes the packages from the tree."""
    sources = os.pathsep.join(str(ROOT / "packages" / package / "src") for package in PACKAGES)
    env = {"PYTHONPATH": sources}
    seen = "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'no CUDA device is visible here')"
    session.run("python3", "-c", seen)
    folders = [f"packages/{package}/tests" for package in PACKAGES]
    command = ["python3", "-m", "pytest", "-c", "pyproject.toml", "--rootdir=.", *folders, "-m", "gpu"]
    session.run(*command, *session.posargs, env=env)


def pinned(name: str) -> str:
    """The release that the root's constraints pin."""
    (pin,) = (line for line in UV_SETTINGS["constraint-dependencies"] if line.startswith(f"{name}=="))
    return pin.removeprefix(f"{name}==")
