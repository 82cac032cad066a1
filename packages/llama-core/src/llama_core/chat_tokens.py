"""A rendered chat to token ids, and which of them the assistant wrote.

Only what the template writes becomes a special token. Each text of the messages that holds a special token's text, or
could complete one together with its neighbours, is broken up with a mark before rendering; special tokens are looked
for while the marks are in place, and the marks go before the text is encoded (`special_text.py`).
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from .chat import ChatTemplate
from .special_text import MarkedText, SpecialText
from .text import shared_front, unused_chars

Span = tuple[int, int]


def _texts(value: Any) -> list[str]:
    """All texts inside plain data, keys too."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in (key, *_texts(item))]
    return [text for item in value for text in _texts(item)] if isinstance(value, list) else []


def _broken_up(value: Any, special: SpecialText, mark: str, key: str = "") -> Any:
    if isinstance(value, str):
        # templates compare and branch on roles and types, so those are marked only if they hold a whole token
        whole = key in ("role", "type") and not any(token in value for token in special.specials)
        return value if whole else special.break_up(value, mark)
    if isinstance(value, dict):
        return {special.break_up(name, mark): _broken_up(item, special, mark, name) for name, item in value.items()}
    return [_broken_up(item, special, mark, key) for item in value] if isinstance(value, list) else value


class ChatEncoder:
    """Renders and encodes one chat.

    Args:
        template: the compiled template.
        special: the tokenizer's special tokens.
        fixed: variables from the tokenizer itself (`bos_token`, …).
        variables: plain data from the caller (`messages`, `tools`, …), already checked.
    """

    def __init__(
        self, template: ChatTemplate, special: SpecialText, fixed: Mapping[str, str], variables: dict[str, Any]
    ) -> None:
        now = datetime.datetime.now()  # one time for all renderings of this chat: they are compared
        self.template, self.special = template, special
        self.fixed = {"strftime_now": lambda layout: now.strftime(layout), **fixed}
        self.plain = variables
        marks = unused_chars([template.source, *fixed.values(), *_texts(variables)], 3, last=True)
        self.break_mark, self.open, self.close = marks
        self._no_marks = dict.fromkeys(map(ord, marks))
        self.marked = {name: _broken_up(value, special, self.break_mark) for name, value in variables.items()}

    def _render(self, marks: tuple[str, str] | None = None, **changed: Any) -> str:
        return self.template.render({**self.fixed, **self.marked, **changed}, marks)

    def rendered(self, marks: tuple[str, str] | None = None) -> str:
        """The text with marks in it, checked to be the right text once they are gone."""
        text = self._render(marks)
        if marks is None and self.marked == self.plain:
            return text
        if text.translate(self._no_marks) != self.template.render({**self.fixed, **self.plain}):
            raise ValueError(
                "the chat template measures or changes a text that holds special tokens, so they can't be kept apart "
                "from the template's own; render_chat and encode(..., parse_special=True) read all of them as tokens"
            )
        return text

    def ids(self) -> list[int]:
        """Token ids of the rendered chat. No BOS is added: a template that wants one writes it."""
        marked = self.special.mark(self.rendered(), self.break_mark)
        return self.special.read(marked)[0]

    def ids_and_mask(self, end_tokens: frozenset[str]) -> tuple[list[int], list[bool]]:
        """Token ids, and for each whether the assistant wrote it, including the end token of each turn."""
        if self.template.has_generation:
            text = self.rendered((self.open, self.close))
            spans = self._generation_spans(text)
        else:
            text = self.rendered()
            spans = self._prefix_spans(text)
        marked = self.special.mark(text, self.break_mark + self.open + self.close)
        spans = [self._to_end_token(span, text, marked, end_tokens) for span in spans]
        places = [(marked.position(start), marked.position(end)) for start, end in spans]
        ids, encoding = self.special.read(marked)
        mask = [False] * len(ids)
        index = 0
        for token, (start, end) in enumerate(encoding.offsets):
            while index < len(places) and start >= places[index][1]:
                index += 1
            if index < len(places):
                mask[token] = end > places[index][0]
        return ids, mask

    def _generation_spans(self, text: str) -> list[Span]:
        starts = [i for i, char in enumerate(text) if char == self.open]
        ends = [i for i, char in enumerate(text) if char == self.close]
        return [(start + 1, end) for start, end in zip(starts, ends, strict=True)]

    def _prefix_spans(self, text: str) -> list[Span]:
        """Where each assistant turn lies, found by rendering the chat up to it and with it."""
        messages = self.marked["messages"]
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages=messages[:index], add_generation_prompt=False) if index else ""
            prompt = self._render(messages=messages[:index], add_generation_prompt=True) if index else ""
            after = self._render(messages=messages[: index + 1], add_generation_prompt=False)
            start = shared_front(prompt, after)
            if start < len(before) or not text.startswith(after):
                raise ValueError(
                    f"the assistant's turn messages[{index}] can't be found: the chat template renders earlier turns "
                    "in another way once later ones follow. Put {% generation %} around the assistant's text in it"
                )
            spans.append((start, len(after)))
        return spans

    def _to_end_token(self, span: Span, text: str, marked: MarkedText, end_tokens: frozenset[str]) -> Span:
        """The span up to and with the turn's end token: what follows it (a line break) the assistant doesn't write, and
        a model that is never shown its end token never stops."""
        start, end = span
        inside = [found for found in marked.found if start <= found[0] and found[1] <= end]
        if inside and not text[inside[-1][1] : end].translate(self._no_marks).strip():
            end = inside[-1][1]
        elif not inside or inside[-1][1] != end:
            rest = end
            while rest < len(text) and text[rest] in (self.open, self.close, self.break_mark):
                rest += 1
            end = next((f[1] for f in marked.found if f[0] == rest and f[2] in end_tokens), end)
        return start, end
