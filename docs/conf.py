"""The site: `nox -s docs` builds it, with every warning an error."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

project = "Llama, from the matrix product to the cluster"
html_title = project
project_copyright = "Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "public_api"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_show_sourcelink = False

myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_use_ivar = True  # attributes named in a class's docstring are not described a second time
default_role = "code"  # docstrings are written as Markdown: `x` is code

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>(?:\.\./)+[^)#\s]+)(?:#[^)\s]*)?\)")


def name_files_outside(app: Any, name: str, source: list[str]) -> None:
    """Links from a page to files outside docs/ become the file's path, and must exist.

    Pages are also read in a checkout, where such links work. The site holds no copy of the source tree.
    """
    folder = (ROOT / "docs" / name).parent

    def replace(match: re.Match[str]) -> str:
        target = (folder / match["target"]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return match[0]
        if not target.exists():
            raise FileNotFoundError(f"docs/{name} links to {match['target']}, which does not exist")
        path = f"`{target.relative_to(ROOT).as_posix()}`"
        return path if match["text"].strip("`") in path else f"{match['text']} ({path})"

    source[0] = LINK.sub(replace, source[0])


def list_other_pages(app: Any, name: str, source: list[str]) -> None:
    """The table of contents names every page: those that it does not order itself come after the others."""
    if name == "index":
        others = sorted(page for page in app.env.found_docs - {name} if f"\n{page}\n" not in source[0])
        source[0] = source[0].replace("%other pages%", "\n".join(others))


def setup(app: Any) -> None:
    app.connect("source-read", name_files_outside)
    app.connect("source-read", list_other_pages)
