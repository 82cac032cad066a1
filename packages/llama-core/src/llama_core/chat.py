"""Chat templates, rendered as the transformers package renders them, in a sandbox.

A template is untrusted code from a model's folder. It runs in Jinja's ImmutableSandboxedEnvironment on plain JSON
values only. Same settings as transformers (`utils/chat_template_utils.py`): trim_blocks, lstrip_blocks, loop controls,
`raise_exception`, `strftime_now`, a `tojson` that doesn't escape HTML, and the `{% generation %}` block.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]

_MARKS = "generation marks"  # context name of the two characters put around generated text; no template can spell it


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}`: the text that the assistant wrote."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark", [nodes.ContextReference()])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, context: jinja2.runtime.Context, caller: Callable[[], str]) -> str:
        start, end = context.get(_MARKS) or ("", "")
        return f"{start}{caller()}{end}"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def plain(value: Any, what: str) -> Any:
    """The value rebuilt from plain JSON types, so that no object with methods reaches a template.

    Raises:
        ValueError: a type that JSON doesn't have; the message says where it stands.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{what}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{what}[{index}]") for index, item in enumerate(value)]
    raise ValueError(f"{what} is a {type(value).__name__}; allowed are text, numbers, booleans, None, lists and dicts")


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as plain dicts. Keys whose value is None are left out, as transformers does: APIs send
    `content: null`, and templates would print "None".

    Raises:
        ValueError: not a list of dicts with a text `role`; the message says which.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages must be a list of dicts with 'role' and 'content', got {type(messages).__name__}")
    if not messages:
        raise ValueError("messages is empty; a chat needs at least one message")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{index}] must be a dict with 'role' and 'content', got {message!r}")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{index}] needs a 'role' that is text, got {message.get('role')!r}")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list | tuple):
            raise ValueError(f"messages[{index}]['content'] must be text or a list of parts, got {content!r}")
        clean = plain(message, f"messages[{index}]")
        checked.append({key: value for key, value in clean.items() if value is not None})
    return checked


class ChatTemplate:
    """One compiled chat template.

    Raises:
        ValueError: the source is not a valid template; the message gives the line.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.environment.filters["tojson"] = _to_json
        self.environment.globals["raise_exception"] = _raise_exception
        self.environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = self.environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja, line {error.lineno}: {error.message}") from None
        except Exception as error:  # Python's own compiler refuses what is nested too deep
            raise ValueError(f"the chat template can't be compiled: {type(error).__name__}: {error}") from None
        self.has_generation = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None

    def render(self, variables: Mapping[str, Any], marks: tuple[str, str] | None = None) -> str:
        """Renders with the given variables (`messages`, `tools`, `add_generation_prompt`, `bos_token`, …).

        Args:
            marks: two characters to put before and after the text of each `{% generation %}` block.
        Raises:
            ValueError: the template refused the messages (`raise_exception`), or failed on them.
        """
        try:
            return self._template.render({**variables, _MARKS: marks})
        except jinja2.exceptions.SecurityError as error:
            raise ValueError(f"the chat template tried something the sandbox forbids: {error}") from None
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refused the messages: {error}") from None
        except RecursionError:
            raise ValueError("the chat template recurses without end") from None
        except Exception as error:  # a template is someone's program and may fail in any way
            raise ValueError(f"the chat template failed: {type(error).__name__}: {error}") from error


class ChatTemplates:
    """A tokenizer's templates by name; "default" is the ordinary one."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = dict(sources)
        self._compiled: dict[str, ChatTemplate] = {}

    def choose(self, wanted: str | None, has_tools: bool) -> ChatTemplate:
        """The template of that name or with that source; without either, "tool_use" where tools are given, else
        "default".

        Raises:
            ValueError: there is no template, no default among them, or it is not valid.
        """
        source = self._source(has_tools) if wanted is None else self.sources.get(wanted, wanted)
        if source not in self._compiled:
            self._compiled = {source: ChatTemplate(source)}
        return self._compiled[source]

    def _source(self, has_tools: bool) -> str:
        if has_tools and "tool_use" in self.sources:
            return self.sources["tool_use"]
        if "default" in self.sources:
            return self.sources["default"]
        if self.sources:
            raise ValueError(
                f"none of the chat templates {sorted(self.sources)} is named 'default'; pass chat_template="
            )
        raise ValueError(
            "this tokenizer has no chat template (looked for chat_template.jinja, chat_template in "
            "tokenizer_config.json, and tokenizer.chat_template in a GGUF file); use plain text, an instruct model's "
            "tokenizer, or lay a chat_template.jinja beside it (in Python: pass chat_template=)"
        )


def chat_variables(messages: Any, add_generation_prompt: bool, tools: Any, others: Mapping[str, Any]) -> dict[str, Any]:
    """What a template sees of the caller's data, as plain JSON types.

    Raises:
        ValueError: messages of another form, or data that JSON can't hold.
    """
    data = {name: plain(value, name) for name, value in others.items()}
    return data | {
        "messages": check_messages(messages),
        "tools": plain(tools, "tools"),
        "documents": data.get("documents"),
        "add_generation_prompt": bool(add_generation_prompt),
    }
