"""A run's settings as TOML that explains itself: every key there is, with its help; defaults as comments."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from llama_train.config import TrainConfig
from llama_train.config_file import dump_value

WIDTH = 116


def commented_toml(config: TrainConfig, heading: str) -> str:
    """TOML text that `load_config` reads back to an equal configuration.

    A key that differs from its default is set; all others stand as comments, ready to be changed.

    Args:
        config: the run.
        heading: what the file begins with, plain text.
    """
    lines = [f"# {line}".rstrip() for line in heading.splitlines()]
    return "\n".join([*lines, "", *_section(config, "")]).rstrip("\n") + "\n"


def field_help(cls: type) -> dict[str, str]:
    """The text below each field of a dataclass, which is its help on the command line too."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for item, below in zip(tree.body, tree.body[1:]):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(below, ast.Expr):
            value = below.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[item.target.id] = " ".join(value.value.split())
    return found


def _section(config: Any, name: str) -> list[str]:
    cls = type(config)
    texts, hints = field_help(cls), get_type_hints(cls)
    lines, inner = [], []
    if name:
        about = " ".join((cls.__doc__ or "").split())
        lines += ["", *_comment(about), f"[{name}]", ""]
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            inner += _section(value, f"{name}.{item.name}" if name else item.name)
            continue
        default = item.default if item.default is not MISSING else None
        lines += _comment(texts.get(item.name, "") + _choices(hints[item.name]))
        if value != default and value is not None:
            lines.append(f"{item.name} = {dump_value(value)}")
        elif default is None:
            lines.append(f"# {item.name} = {_blank(hints[item.name])}")
        else:
            lines.append(f"# {item.name} = {dump_value(default)}")
        lines.append("")
    return lines + inner


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, WIDTH, break_on_hyphens=False)]


def _choices(hint: Any) -> str:
    """What a key with a few possible values may be."""
    if get_origin(hint) is not Literal:
        return ""
    return " One of " + ", ".join(dump_value(value) for value in get_args(hint)) + "."


def _blank(hint: Any) -> str:
    """Something that shows the type, for a key that is not set."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = [arg for arg in get_args(hint) if arg is not type(None)]
    if get_origin(hint) is tuple:
        return f"[{_blank(get_args(hint)[0])}, ...]"
    return {str: '"..."', int: "<whole number>", float: "<number>", bool: "<true or false>"}[hint]
