"""Every command that a README or a page of the docs tells people to type is typed here, in a fresh copy of the tree.

Fenced blocks marked `bash` or `console` (lines after `$ `) and `python` are run, in order, from the top of the copy,
with only the environment that the README's first command has made. A comment before a block says when it is run
elsewhere: `<!-- runs: slow -->` in the slow session, `<!-- runs: .ci/run -->` as a line of that file. Blocks without a
comment in the README of a package that has a `tests/test_readme.py` are run by that one. No other excuse is known, and
a block whose language is not named is an error: say `text` for what nobody should type.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN_HERE, SLOW, CI, OWN_TEST = "here", "slow", ".ci/run", "the package's test_readme.py"
SHELL, PYTHON = ("bash", "console"), ("python",)

MARKER = r"^<!-- runs: (?P<runs>[^\n]+?) -->\n+"
FENCE = re.compile(rf"(?ms)(?:{MARKER})?^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<body>.*?)^(?P=indent)```$")


@dataclass(frozen=True)
class Block:
    """One fenced block of a document that is to be run."""

    language: str
    code: str
    runs: str


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a Markdown text that are to be run, in order. ValueError for what the rules above do not allow."""
    matches = list(FENCE.finditer(text))
    outside = FENCE.sub("", text)
    if "```" in outside:
        raise ValueError("a fence that is not closed, or not on a line of its own")
    if stray := re.search(r"<!-- runs:.*", outside):
        raise ValueError(f"{stray[0]!r} stands before no block")
    for match in matches:
        language, runs = match["language"].strip(), match["runs"] or RUN_HERE
        if not language:
            raise ValueError(f"name the language of the block that begins {match['body'][:40]!r}")
        if runs not in (RUN_HERE, SLOW, CI):
            raise ValueError(f"runs: {runs!r} is neither {SLOW!r} nor {CI!r}")
        if language not in SHELL + PYTHON:
            continue
        indent = len(match["indent"])
        code = "".join(line[indent:] for line in match["body"].splitlines(keepends=True))
        if language == "console":
            code = "".join(line[2:] for line in code.splitlines(keepends=True) if line.startswith("$ "))
        if not code.strip():
            raise ValueError(f"an empty {language} block")
        yield Block(language, code, runs)


def tracked_files() -> list[Path]:
    """Files of the repository, those not yet committed included, without what git ignores."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in names.split("\0") if name and os.path.lexists(ROOT / name)]


def own_test(document: Path) -> Path:
    return ROOT / document.parent / "tests" / "test_readme.py"


def read(document: Path) -> list[Block]:
    try:
        found = list(blocks((ROOT / document).read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{document}: {error}") from None
    if document.name == "README.md" and own_test(document).exists() and document.parent != Path():
        found = [replace(block, runs=OWN_TEST) if block.runs == RUN_HERE else block for block in found]
    return found


DOCUMENTS = {str(path): read(path) for path in tracked_files() if path.suffix == ".md"}
(SET_UP, *_) = DOCUMENTS["README.md"]


@dataclass(frozen=True)
class Checkout:
    """A fresh copy of the tree in which the README's first command has been run."""

    path: Path
    printed: str

    def run(self, block: Block, timeout: float) -> None:
        # Nothing but .venv is put on PATH: what a reader has after `source .venv/bin/activate`.
        environ = bare_environment(self.path / ".venv" / "bin", REPO=self.path.as_uri())
        if block.language in SHELL:
            command = ["bash", "-euo", "pipefail", "-c", block.code]
        else:
            command = ["python", "-c", block.code]
        subprocess.run(command, cwd=self.path, env=environ, check=True, timeout=timeout, stdin=subprocess.DEVNULL)


def bare_environment(*first: Path, **more: str) -> dict[str, str]:
    """What a person has who opened a terminal: nothing of the session that runs these tests, nor of this folder."""
    hidden = ("UV_", "NOX_", "PYTEST_", "VIRTUAL_ENV", "PYTHON", "OMP_NUM_THREADS", "COVERAGE_")
    ours = ("UV_CACHE_DIR", "UV_DEFAULT_INDEX", "UV_INDEX_URL")  # where packages come from is the machine's business
    environ = {name: value for name, value in os.environ.items() if name in ours or not name.startswith(hidden)}
    session = Path(sys.executable).parent
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep) if folder]
    others = [folder for folder in folders if folder != session and not folder.is_relative_to(ROOT)]
    base = Path(sys._base_executable).resolve().parent  # type: ignore[attr-defined]
    environ["PATH"] = os.pathsep.join(map(str, [*first, base, *others]))
    return {**environ, **more}


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    path = tmp_path_factory.mktemp("fresh") / "llama"
    for name in tracked_files():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, path / name, follow_symlinks=False)
    git = ["git", "-c", "user.name=reader", "-c", "user.email=reader@localhost", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "fresh"]):
        subprocess.run([*git, *arguments], cwd=path, check=True)
    command = ["bash", "-euo", "pipefail", "-c", SET_UP.code]
    done = subprocess.run(
        command, cwd=path, env=bare_environment(), stdout=subprocess.PIPE, text=True, check=True, timeout=900
    )
    return Checkout(path, done.stdout)


def test_first_command_prints_the_embedded_models_answer(checkout: Checkout) -> None:
    assert "llama-infer generate" in SET_UP.code
    assert "France" in SET_UP.code
    assert "Paris" in checkout.printed


def test_second_command_is_what_ci_runs() -> None:
    second = DOCUMENTS["README.md"][1]
    assert second.runs == CI
    assert ".tools/bin/nox" in second.code


@pytest.mark.parametrize("document", DOCUMENTS)
def test_lines_left_to_ci_stand_in_its_file(document: str) -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    for block in DOCUMENTS[document]:
        if block.runs == CI:
            for line in block.code.splitlines():
                assert line in lines, f"{document} says that .ci/run runs it"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_packages_own_tests_know_every_language(document: str) -> None:
    left = {block.language for block in DOCUMENTS[document] if block.runs == OWN_TEST}
    for language in left:
        assert language in own_test(Path(document)).read_text(), f"who runs the {language} blocks of {document}?"


WITH_COMMANDS = [name for name in DOCUMENTS if any(block.runs == RUN_HERE for block in DOCUMENTS[name])]
WITH_SLOW_COMMANDS = [name for name in DOCUMENTS if any(block.runs == SLOW for block in DOCUMENTS[name])]


@pytest.mark.parametrize("document", WITH_COMMANDS)
def test_commands(document: str, checkout: Checkout) -> None:
    for block in DOCUMENTS[document]:
        if block.runs == RUN_HERE and block is not SET_UP:
            checkout.run(block, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("document", WITH_SLOW_COMMANDS)
def test_slow_commands(document: str, checkout: Checkout) -> None:
    """With the quick ones among them: what a document says later may need what it made before."""
    for block in DOCUMENTS[document]:
        if block.runs in (RUN_HERE, SLOW) and block is not SET_UP:
            checkout.run(block, timeout=1800)


# --- the reader of the documents -------------------------------------------------------------------------------------

TICKS = "```"


def test_blocks_are_found_in_order_with_their_markers() -> None:
    text = f"""# Title
{TICKS}bash
one --flag \\
    more
{TICKS}
Words.

<!-- runs: slow -->

{TICKS}console
$ two
its output
$ three
{TICKS}

  {TICKS}python
  if x:
      y()
  {TICKS}
{TICKS}toml
not = "run"
{TICKS}
<!-- runs: .ci/run -->
{TICKS}bash
four
{TICKS}
"""
    assert list(blocks(text)) == [
        Block("bash", "one --flag \\\n    more\n", RUN_HERE),
        Block("console", "two\nthree\n", SLOW),
        Block("python", "if x:\n    y()\n", RUN_HERE),
        Block("bash", "four\n", CI),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{TICKS}\nls\n{TICKS}\n", "name the language"),
        (f"<!-- runs: never -->\n{TICKS}bash\nls\n{TICKS}\n", "'never' is neither"),
        (f"<!-- runs: slow -->\nwords\n\n{TICKS}bash\nls\n{TICKS}\n", "stands before no block"),
        (f"{TICKS}bash\nls\n", "not closed"),
        (f"{TICKS}console\noutput only\n{TICKS}\n", "empty console block"),
    ],
)
def test_what_could_hide_a_command_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(blocks(text))


def test_failing_command_is_seen(tmp_path: Path) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for code in ("false\ntrue\n", "false | true\n", "no-such-command\n", "echo $UNSET_NAME\n"):
        with pytest.raises(subprocess.CalledProcessError):
            Checkout(tmp_path, "").run(Block("bash", code, RUN_HERE), timeout=60)
    Checkout(tmp_path, "").run(Block("bash", "true\n", RUN_HERE), timeout=60)
