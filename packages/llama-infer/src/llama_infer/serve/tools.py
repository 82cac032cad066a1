"""Calls of tools: from the text that a model writes to OpenAI's `tool_calls`.

What Llamas and their kin were taught to write: Llama 3.1's `{"name": …, "parameters": {…}}` (several joined by `;`),
with or without `<|python_tag|>` before it, and `<function=NAME>{…}</function>`; Hermes' `<tool_call>{…}</tool_call>`
with words around it; Llama 3.2's `[name(key=value), …]`. What names none of the request's tools is text.
"""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

PYTHON_TAG, TAG, END = "<|python_tag|>", "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"<function=([\w.-]+)>(.*?)</function>", re.DOTALL)
_OPENINGS = (PYTHON_TAG, "<function=", "{", "[")
"""How an answer begins that may be calls and nothing else."""
LONGEST = 200_000
"""Characters of an answer that is looked at."""


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str
    """A JSON object, as text."""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def parse(text: str, names: Collection[str]) -> tuple[str, list[Call]]:
    """The words of an answer, and the calls in it."""
    bare = text.strip().removeprefix(PYTHON_TAG).strip()
    if TAG in text:
        return _tagged(text, names)
    if len(bare) > LONGEST:
        return text, []
    calls = _functions(bare, names) or _objects(bare, names) or _python(bare, names)
    return ("", calls) if calls else (text, [])


def _call(value: Any, names: Collection[str]) -> Call | None:
    """`value` as a call, if it is one of a known tool."""
    if not isinstance(value, dict):
        return None
    value = value["function"] if isinstance(value.get("function"), dict) else value
    name, arguments = value.get("name"), value.get("parameters", value.get("arguments", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if name not in names or not isinstance(arguments, dict):
        return None
    try:
        return Call(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (ValueError, TypeError):  # Python's NaN, or a set
        return None


def _objects(text: str, names: Collection[str]) -> list[Call]:
    """One JSON object, several joined by semicolons or newlines, or a list of them; nothing else around."""
    reader, at, calls = json.JSONDecoder(), 0, []
    while at < len(text):
        try:
            value, at = reader.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        for item in value if isinstance(value, list) else [value]:
            if (call := _call(item, names)) is None:
                return []
            calls.append(call)
        while at < len(text) and text[at] in "; \n\r\t":
            at += 1
    return calls


def _functions(text: str, names: Collection[str]) -> list[Call]:
    if _FUNCTION.sub("", text).strip():
        return []
    found = [_call({"name": name, "parameters": _object(body)}, names) for name, body in _FUNCTION.findall(text)]
    calls = [call for call in found if call is not None]
    return calls if len(calls) == len(found) else []


def _object(text: str) -> Any:
    try:
        return json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return None


def _tagged(text: str, names: Collection[str]) -> tuple[str, list[Call]]:
    words, *parts = text.split(TAG)
    calls = []
    for part in parts:
        body, _, after = part.partition(END)
        call = _call(_object(body), names)
        if call is None:
            return text, []
        calls.append(call)
        words += after
    return words.strip(), calls


def _python(text: str, names: Collection[str]) -> list[Call]:
    """`[f(a=1), g(b="x")]`, as Python writes it; constants only."""
    if not (text.startswith("[") and text.endswith("]")):
        return []
    try:
        tree = ast.parse(text, mode="eval").body
        assert isinstance(tree, ast.List)
        calls = []
        for node in tree.elts:
            if not isinstance(node, ast.Call) or node.args:
                return []
            arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
            call = _call({"name": ast.unparse(node.func), "parameters": arguments}, names)
            if call is None:
                return []
            calls.append(call)
        return calls
    except (SyntaxError, ValueError, TypeError, AssertionError, RecursionError, MemoryError):
        return []


class ToolStream:
    """Of a text that comes in pieces: shows what are words at once, and holds back what may be calls."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._words = False  # it has begun as words; only a tag can follow

    def push(self, text: str) -> str:
        """Take the next piece; returns what can be shown."""
        self._held += text
        if not self._words:
            start = self._held.lstrip()
            if not start or any(start.startswith(o) or o.startswith(start) for o in (*_OPENINGS, TAG)):
                return ""
            self._words = True
        if TAG in self._held:
            shown, _, _ = self._held.partition(TAG)
        else:
            lengths = range(min(len(self._held), len(TAG) - 1), 0, -1)
            keep = next((length for length in lengths if TAG.startswith(self._held[-length:])), 0)
            shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown

    def finish(self) -> tuple[str, list[Call]]:
        """What was held back: words, and calls."""
        words, calls = parse(self._held, self._names)
        self._held = ""
        return words, calls
