"""`llama-infer chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import difflib
import io
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .cli_options import ModelOptions, SamplingOptions
from .embedded import NAME

if TYPE_CHECKING:
    from .llm import LLM
    from .sampling_params import SamplingParams

COMMANDS = {
    "/help": "show this list",
    "/reset": "forget the conversation",
    "/exit": "leave (or Ctrl-D)",
}


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
        conversation = Conversation(llm, llm.sampling_params(**settings), self.system)
        name = NAME if self.model is None else Path(self.model).name
        weight = next(llm.model.parameters())
        dtype = str(weight.dtype).removeprefix("torch.")
        _tell(f"{name}, {dtype} on {weight.device}, kernels {llm.kernels}, attention {llm.attention}")
        for notice in llm.model_sampling.notices(settings):
            _tell(notice)
        _tell("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends")
        for line in _lines():
            if line.startswith("/"):
                if line == "/exit":
                    break
                _tell(_obey(line, conversation))
            elif line:
                conversation.answer(line)
        return 0


class Conversation:
    """The turns so far, and how the next one is answered."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self.llm = llm
        self.params = params
        self.beginning = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.beginning)

    def reset(self) -> None:
        self.messages = list(self.beginning)

    def answer(self, text: str) -> None:
        """Stream the answer to standard output. A turn that can't be answered leaves no trace."""
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            ids = self.llm.encode_chat(messages)
            if len(ids) >= self.llm.max_model_len:
                size = f"{len(ids)} tokens, the context is {self.llm.max_model_len}"
                raise ValueError(f"the conversation no longer fits ({size}); /reset begins anew")
            answer = self._stream(ids)
        except ValueError as error:
            _tell(str(error))
            return
        if answer:
            self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _stream(self, ids: list[int]) -> str:
        answer, times, reason = "", [time.perf_counter()], None
        with contextlib.suppress(KeyboardInterrupt):
            for chunk in self.llm.stream(ids, self.params):
                times.append(time.perf_counter())
                answer += chunk.text
                reason = chunk.finish_reason
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
        print(flush=True)
        _tell(_speed(times) + {None: ", stopped", "length": ", at the limit", "stop": ""}[reason])
        return answer


def _speed(times: list[float]) -> str:
    """Of an answer whose tokens came at times[1:], asked for at times[0]."""
    if len(times) < 2:
        return "no answer yet"
    parts = [f"{len(times) - 1} tokens", f"first after {times[1] - times[0]:.2f} s"]
    if len(times) > 2:
        parts.append(f"then {(len(times) - 2) / max(times[-1] - times[1], 1e-9):.1f} tokens/s")
    return ", ".join(parts)


def _obey(command: str, conversation: Conversation) -> str:
    if command == "/reset":
        conversation.reset()
        return "the conversation is forgotten"
    if command == "/help":
        return "\n".join(f"{name:8} {meaning}" for name, meaning in COMMANDS.items())
    near = difflib.get_close_matches(command, COMMANDS, n=1)
    return f"no command {command!r}" + (f"; did you mean {near[0]}?" if near else "; /help lists them")


def _lines() -> Iterator[str]:
    """What the user types, line by line, until the end of input."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a wrong byte must not end the conversation
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - arrow keys and history in input()
    while True:
        try:
            yield input("> " if terminal else "").strip()
        except EOFError:
            if terminal:
                print()
            return
        except KeyboardInterrupt:
            print()
            _tell("Ctrl-D or /exit ends")


def _tell(text: str) -> None:
    """Say something about the conversation, apart from it."""
    dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{dim}{text}{plain}", file=sys.stderr, flush=True)
