"""TOML to the configuration tree and back. A wrong key, type or value is one clear error."""

from __future__ import annotations

import difflib
import json
import tomllib
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .config import TrainConfig

C = TypeVar("C")


def load_config(path: str | Path) -> TrainConfig:
    """Read a TOML file.

    Raises:
        ValueError: no such file, not TOML, an unknown key (the nearest one is named), a wrong type or value.
    """
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Windows editors mark UTF-8
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError, or a number of thousands of digits
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    try:
        return from_mapping(TrainConfig, data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def from_mapping(cls: type[C], data: Mapping[str, Any], section: str = "") -> C:
    """Build a configuration dataclass from plain values; `section` is the dotted name used in messages."""
    hints = get_type_hints(cls)
    values = {}
    for key, value in data.items():
        if key not in hints:
            raise ValueError(_unknown(key, section, list(hints)))
        values[key] = _convert(value, hints[key], section + key)
    return cls(**values)


def dump_config(config: TrainConfig) -> str:
    """TOML text that `load_config` reads back to an equal configuration; unset keys are left out."""
    return "\n".join(_dump_section(config, "")).lstrip("\n") + "\n"


def _unknown(key: str, section: str, known: list[str]) -> str:
    where = f"in [{section[:-1]}]" if section else "at the top level"
    # A key under the wrong heading is as common as a misspelt one, so the whole tree is searched, here first.
    near = [section + name for name in difflib.get_close_matches(key, known, n=1)]
    near = near or _elsewhere(key)
    hint = f"; did you mean {near[0]}?" if near else f"; the keys there are {', '.join(known)}"
    return f"unknown key {key!r} {where}{hint}"


def _elsewhere(key: str) -> list[str]:
    for cutoff in (0.99, 0.6):
        for name, dotted in _all_keys(TrainConfig, ""):
            if difflib.SequenceMatcher(None, key, name).ratio() >= cutoff:
                return [dotted]
    return []


def _all_keys(cls: type, section: str) -> list[tuple[str, str]]:
    found = []
    for name, hint in get_type_hints(cls).items():
        found.append((name, section + name))
        if is_dataclass(hint):
            found += _all_keys(hint, f"{section}{name}.")  # type: ignore[arg-type]  # is_dataclass also admits instances
    return found


def _convert(value: Any, hint: Any, name: str) -> Any:
    """The value as the hinted type, where TOML's type allows it: a whole number is a fine float, no more."""
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} is {value!r}; it is a section: write [{name}] with keys below it")
        return from_mapping(hint, value, name + ".")  # type: ignore[arg-type]
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (hint,) = [arg for arg in args if arg is not type(None)]  # only `X | None` occurs; TOML has no null
        return _convert(value, hint, name)
    if origin is Literal:
        if value not in args:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, args))}")
        return value
    if origin is tuple:
        length = None if args[-1] is Ellipsis else len(args)
        if not isinstance(value, list) or (length is not None and len(value) != length):
            raise ValueError(f"{name} is {value!r}; it must be a list" + (f" of {length}" if length else ""))
        return tuple(_convert(item, args[0], f"{name}[{index}]") for index, item in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(
                f"{name} is a whole number of {len(str(value))} digits; that is beyond every float"
            ) from None
    if type(value) is not hint:  # exact: True is no number
        raise ValueError(f"{name} is {value!r}; it must be {_WORDS[hint]}")
    return value


_WORDS = {str: "text in quotes", int: "a whole number", float: "a number", bool: "true or false"}


def _dump_section(config: Any, section: str) -> list[str]:
    lines = [f"\n[{section}]"] if section else []
    inner: list[str] = []
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            inner += _dump_section(value, f"{section}.{item.name}" if section else item.name)
        elif value is not None:
            lines.append(f"{item.name} = {dump_value(value)}")
    if len(lines) == 1 and section:
        lines = []
    return lines + inner


def dump_value(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, tuple):
        return "[" + ", ".join(dump_value(item) for item in value) + "]"
    if isinstance(value, float):
        return repr(value)
    # JSON's strings, numbers and booleans are TOML's, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
