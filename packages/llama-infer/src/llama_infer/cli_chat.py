"""`llama-infer chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cli_options import ModelOptions, SamplingOptions
from .conversation import FORBIDDEN, Conversation, tell
from .embedded import NAME
from .sampling_params import SamplingParams

COMMANDS = {
    "/help": "show this list",
    "/reset": "forget the conversation",
    "/retry": "answer the last question again",
    "/save FILE": "write the conversation and its settings to a file",
    "/load FILE": "go on with a saved conversation",
    "/set": "show the settings",
    "/set NAME VALUE": "change one: /set temperature 0.2, /set system Be brief, /set seed null",
    "/exit": "leave (or Ctrl-D)",
}
QUOTES = '"""'
MULTI_LINE = f"a line that ends with \\ goes on in the next; {QUOTES} begins and ends a text of several lines"


@dataclass(frozen=True, kw_only=True)
class Chat(SamplingOptions, ModelOptions):
    """Talk with a model. Ctrl-C stops an answer; /help lists the commands."""

    system: str | None = None
    """What the model is told before the conversation."""

    def run(self) -> int:
        settings = self.explicit()
        llm = self.load()
        if llm.tokenizer is None or not llm.tokenizer.chat_templates:
            raise ValueError("the model has no chat template; `llama-infer generate` continues plain text")
        conversation = Conversation(llm, settings, self.system)
        name = NAME if self.model is None else Path(self.model).name
        weight = next(llm.model.parameters())
        dtype = str(weight.dtype).removeprefix("torch.")
        tell(f"{name}, {dtype} on {weight.device}, kernels {llm.kernels}, attention {llm.attention}")
        for notice in llm.model_sampling.notices(settings):
            tell(notice)
        tell("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends")
        for text in _texts():
            if text == "/exit":
                break
            try:
                if text.startswith("/") and "\n" not in text:
                    if told := obey(text, conversation):
                        tell(told)
                elif text:
                    conversation.answer(text)
            except KeyboardInterrupt:  # a second one, or before the answer began
                print()
        return 0


def obey(line: str, conversation: Conversation) -> str:
    """Do what a line that begins with / says; returns what to tell about it."""
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    try:
        if command in ("/save", "/load"):
            return _file(command, rest, conversation)
        if command == "/set":
            return _set(rest, conversation)
        if rest and any(command == name for name in COMMANDS):
            return f"{command} takes nothing behind it, got {rest!r}"
        if command == "/retry":
            conversation.retry()
            return ""
    except ValueError as error:
        return str(error)
    if command == "/reset":
        conversation.reset()
        return "the conversation is forgotten"
    if command == "/help":
        return "\n".join([*(f"{name:16} {meaning}" for name, meaning in COMMANDS.items()), MULTI_LINE])
    near = difflib.get_close_matches(command, {name.split()[0] for name in COMMANDS}, n=1)
    return f"no command {command!r}" + (f"; did you mean {near[0]}?" if near else "; /help lists them")


def _file(command: str, name: str, conversation: Conversation) -> str:
    if not name:
        return f"{command} wants the name of a file"
    path = Path(name).expanduser()
    try:
        if command == "/save":
            conversation.save(path)
            return f"{len(conversation.messages)} turns are in {path}"
        conversation.load(path)
        return f"going on after {len(conversation.messages)} turns from {path}"
    except (OSError, RuntimeError) as error:  # also ~nobody
        return f"{path}: {getattr(error, 'strerror', None) or error}"


def _set(rest: str, conversation: Conversation) -> str:
    name, _, text = rest.partition(" ")
    if name and not text.strip():
        return f"/set {name} wants a value; null goes back to the default"
    if name:
        conversation.set(name.replace("-", "_"), _value(text.strip()))
    shown = {"system": conversation.system}
    for field in dataclasses.fields(SamplingParams):
        value = getattr(conversation.params, field.name)
        if field.name not in FORBIDDEN and (name or value != field.default or field.name in ("temperature", "seed")):
            shown[field.name] = value
    if name:
        name = name.replace("-", "_")
        return f"{name} {json.dumps(shown[name], ensure_ascii=False, default=str)}"
    return "\n".join(f"{key} {json.dumps(value, ensure_ascii=False, default=str)}" for key, value in shown.items())


def _value(text: str) -> Any:
    """A number, a list, null, …; or else the text as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _texts() -> Iterator[str]:
    """What the user types, until the end of input; several lines joined where they say so."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a wrong byte must not end the conversation
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - arrow keys and history in input()
    while True:
        try:
            yield _text(terminal)
        except EOFError:
            if terminal:
                print()
            return
        except KeyboardInterrupt:
            print()
            tell("Ctrl-D or /exit ends")


def _text(terminal: bool) -> str:
    first, more = ("> ", ". ") if terminal else ("", "")
    line = input(first).strip()
    if line.startswith(QUOTES):
        lines = [line.removeprefix(QUOTES)]
        while not (lines[-1].endswith(QUOTES) and (len(lines) > 1 or lines[-1])):
            try:
                lines.append(input(more).rstrip())
            except EOFError:  # as if it were closed
                lines.append(QUOTES)
        lines[-1] = lines[-1].removesuffix(QUOTES)
        return "\n".join(lines).strip()
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        try:
            lines.append(input(more).rstrip())
        except EOFError:
            break
    return "\n".join(lines).strip()
