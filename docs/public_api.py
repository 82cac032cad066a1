"""Sphinx: the directive `public-api`, which documents what a package re-exports, and docstrings that are Markdown."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective


def re_exports(source: str) -> list[str]:
    """Names that a package's `__init__.py` imports as themselves (`X as X`), those loaded later included, in order."""
    found = [
        alias.asname
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    ]
    return sorted(dict.fromkeys(found), key=str.lower)


class PublicApi(SphinxDirective):
    """`.. public-api:: package`"""

    required_arguments = 1
    has_content: ClassVar[bool] = False

    def run(self) -> list[nodes.Node]:
        package = import_module(self.arguments[0])
        assert package.__file__ is not None
        self.env.note_dependency(package.__file__)
        lines, members = [], ("   :members:", "   :special-members: __call__")
        for name in re_exports(Path(package.__file__).read_text(encoding="utf-8")):
            value = getattr(package, name)
            # A type alias or a table has no docstring of its own, and would show that of its type.
            kind = "autoclass" if inspect.isclass(value) else "autofunction" if inspect.isroutine(value) else "py:data"
            lines += [f".. {kind}:: {package.__name__}.{name}", *(members if kind == "autoclass" else ()), ""]
        node = nodes.container()
        self.state.nested_parse(StringList(lines, self.arguments[0]), self.content_offset, node)
        return node.children


def plain_text(app: Any, what: str, name: str, value: object, options: Any, lines: list[str]) -> None:
    """Docstrings hold Markdown's `code` and plain text; what reStructuredText would read into the rest is escaped."""
    lines[:] = [line if line.lstrip().startswith(">>>") else escaped(line) for line in lines]


def escaped(line: str) -> str:
    """
    >>> escaped("x * y, **more, |x|, last_ and `a * b_`")
    'x \\\\* y, \\\\*\\\\*more, \\\\|x\\\\|, last\\\\_ and `a * b_`'
    """
    parts = re.split(r"(``.+?``|`[^`]+`)", line)
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(r"([*|])", r"\\\1", parts[index])
        parts[index] = re.sub(r"(?<=\w)_(?!\w)", r"\\_", parts[index])
    return "".join(parts)


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("public-api", PublicApi)
    app.connect("autodoc-process-docstring", plain_text, priority=400)  # before napoleon, which reads Args: and Raises:
    return {"parallel_read_safe": True, "parallel_write_safe": True}
