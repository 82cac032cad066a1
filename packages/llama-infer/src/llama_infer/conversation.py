"""A conversation: its turns, how the next one is answered, and what of it goes to a file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .llm import LLM

ROOM = 256
"""Tokens that an answer should have room for, or a quarter of a small context; turns are left out for it."""
FORBIDDEN = {"n": "a chat has one answer", "prompt_logprobs": "a chat shows no log-probabilities"}


class Conversation:
    """The turns so far.

    Args:
        llm: who answers.
        settings: by names of SamplingParams; the model's own defaults fill the rest.
        system: what it is told before the conversation.

    Attributes:
        messages: all turns, also those that no longer fit into the context.
    """

    def __init__(self, llm: LLM, settings: Mapping[str, Any], system: str | None) -> None:
        self.llm = llm
        self.settings = dict(settings)
        self.params = llm.sampling_params(**settings)
        self.system = system
        self.messages: list[dict[str, str]] = []

    def reset(self) -> None:
        self.messages = []

    def answer(self, text: str) -> None:
        """Stream the answer to standard output. A turn that can't be answered leaves no trace."""
        self._answer([*self.messages, {"role": "user", "content": text}])

    def retry(self) -> None:
        """Answer the last turn again, in place of its answer.

        Raises:
            ValueError: nothing has been asked.
        """
        asked = self.messages[:-1] if self.messages and self.messages[-1]["role"] == "assistant" else self.messages
        if not asked:
            raise ValueError("nothing to try again: no question yet")
        if self.params.seed is not None:  # the same seed would say the same
            self.set("seed", self.params.seed + 1)
        self._answer(asked)

    def set(self, name: str, value: Any) -> None:
        """Change a setting: `system`, or one of SamplingParams; None goes back to the default.

        Raises:
            ValueError: no such setting, or a value outside its range; nothing has changed.
        """
        if name in FORBIDDEN:
            raise ValueError(f"{name} cannot be set: {FORBIDDEN[name]}")
        if name == "system":
            if value is not None and not isinstance(value, str):
                raise ValueError(f"system must be a text, got {value!r}")
            self.system = value
            return
        settings = {**self.settings, name: value}
        if value is None:
            del settings[name]
            if name not in self.settings:
                self.llm.sampling_params(**{name: None})  # is there such a setting?
        self.params = self.llm.sampling_params(**settings)
        self.settings = settings

    def save(self, path: Path) -> None:
        """Write all turns and settings as JSON; complete, or not at all.

        Raises:
            ValueError: there is a file that is no conversation.
            OSError: the system refuses.
        """
        if path.exists():
            read_conversation(path)
        hidden = path.with_name(f".{path.name}.tmp")
        content = {"system": self.system, "settings": self.settings, "messages": self.messages}
        try:
            hidden.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
            os.replace(hidden, path)
        except BaseException:
            hidden.unlink(missing_ok=True)
            raise

    def load(self, path: Path) -> None:
        """Go on with a saved conversation, in place of this one.

        Raises:
            ValueError: no conversation, or settings that are none; nothing has changed.
            OSError: the system refuses.
        """
        found = read_conversation(path)
        self.params = self.llm.sampling_params(**found["settings"])
        self.settings, self.system, self.messages = found["settings"], found["system"], found["messages"]

    def _answer(self, messages: list[dict[str, str]]) -> None:
        try:
            ids, left_out = self._fitting(messages)
            if left_out:
                tell(
                    f"the context of {self.llm.max_model_len} tokens is full: the oldest {left_out} turns are left out"
                )
            answer = self._stream(ids)
        except ValueError as error:
            tell(str(error))
            return
        if answer:
            self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _fitting(self, messages: list[dict[str, str]]) -> tuple[list[int], int]:
        """Token ids of as many of the newest turns as leave room for an answer, and how many old ones are left out."""
        context = self.llm.max_model_len
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        for first in range(0, len(messages), 2):  # a question goes with its answer
            ids = self.llm.encode_chat([*before, *messages[first:]])
            if len(ids) + min(ROOM, context // 4) <= context:
                return ids, first
        if len(ids) < context:
            return ids, first
        raise ValueError(f"this turn does not fit: {len(ids)} tokens, the context is {context}")

    def _stream(self, ids: list[int]) -> str:
        engine = self.llm.engine
        answer, times, reason = "", [time.perf_counter()], None
        guessed, accepted = engine.guessed, engine.accepted
        stream = self.llm.stream(ids, self.params)
        with contextlib.suppress(KeyboardInterrupt), contextlib.closing(stream), stoppable() as is_stopped:
            for chunk in stream:
                times.append(time.perf_counter())
                answer += chunk.text
                reason = chunk.finish_reason
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
                if is_stopped():
                    break
        print(flush=True)
        parts = [_speed(times)]
        if engine.guessed > guessed:
            parts.append(f"{(engine.accepted - accepted) / (engine.guessed - guessed):.0%} of guesses right")
        parts += {None: ["stopped"], "length": ["at the limit"]}.get(reason, [])
        if len(ids) + len(times) - 1 >= self.llm.max_model_len:
            parts.append("the context is full")
        tell(", ".join(parts))
        return answer


def read_conversation(path: Path) -> dict[str, Any]:
    """What `Conversation.save` has written.

    Raises:
        ValueError: something else.
        OSError: the system refuses.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        system, settings, messages = found["system"], found["settings"], found["messages"]
        sound = isinstance(settings, dict) and (system is None or isinstance(system, str))
        turns = [(message["role"], message["content"]) for message in messages]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"{path} is no saved conversation") from None
    if not sound or not all(isinstance(part, str) for turn in turns for part in turn):
        raise ValueError(f"{path} is no saved conversation")
    return {"system": system, "settings": settings, "messages": [{"role": r, "content": c} for r, c in turns]}


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Within, a first Ctrl-C is only noted, so that it never falls into the middle of a step; a second interrupts."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed = False

    def note(*_: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)  # None: not set from Python


def tell(text: str) -> None:
    """Say something about the conversation, apart from it."""
    dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{dim}{text}{plain}", file=sys.stderr, flush=True)


def _speed(times: list[float]) -> str:
    """Of an answer whose tokens came at times[1:], asked for at times[0]."""
    if len(times) < 2:
        return "no answer yet"
    parts = [f"{len(times) - 1} tokens", f"first after {times[1] - times[0]:.2f} s"]
    if len(times) > 2:
        parts.append(f"then {(len(times) - 2) / max(times[-1] - times[1], 1e-9):.1f} tokens/s")
    return ", ".join(parts)
