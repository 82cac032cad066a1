"""`llama-infer generate`: prompts from the command line, standard input or a file of JSON lines, continued."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from .batch_file import Journal, Task, errors_in, open_journal, read_tasks
from .cli_options import ModelOptions, SamplingOptions

if TYPE_CHECKING:
    from .llm import LLM
    from .outputs import FinishReason, RequestOutput
    from .sampling_params import SamplingParams

MAX_TOKENS = 512
"""Where neither the command line nor the model says when to stop."""


@dataclass(frozen=True, kw_only=True)
class Generate(SamplingOptions, ModelOptions):
    """Continue prompts. One is printed as it comes; --input and --output do a file of them, and go on after a stop."""

    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """The text to continue; - reads it from standard input, less one newline at its end. May be given several times."""
    input: str | None = None
    """A file with a JSON object on each line: "prompt" (a text), "messages" (a chat) or "prompt_token_ids"; beside it
    an "id", and sampling settings of its own under the names of SamplingParams. - reads standard input."""
    output: Path | None = None
    """Where the results go, a JSON object for each line; it appears when all are done. Killed and started again, the
    same command goes on. Without --output they are printed as each is done."""
    chat: bool = False
    """Take a prompt as the user's turn of a chat, in the model's chat format."""
    system: str | None = None
    """A system message before it; needs --chat."""
    json: bool = False
    """Print one JSON object for each prompt at the end instead of text as it comes."""

    def run(self) -> int:
        if self.system is not None and not self.chat:
            raise ValueError("--system is a message of a chat; add --chat")
        settings = self.explicit()
        if self.input is not None:
            return self._file(settings)
        if self.output is not None:
            raise ValueError("--output belongs to --input; a single result is printed")
        prompts = [_standard_input() if prompt == "-" else prompt for prompt in self.prompt]
        if not prompts:
            raise ValueError(
                "nothing to continue; give --prompt TEXT, --prompt - and text on standard input, or --input"
            )
        if not all(prompts):
            raise ValueError("the prompt is empty; give --prompt TEXT, or --prompt - and text on standard input")
        llm = self._model(settings)
        params = llm.sampling_params(**_limited(llm, settings))
        encoded = [self._encode(llm, prompt) for prompt in prompts]
        if self.json or len(prompts) > 1:
            outputs = llm.generate(encoded, params)
            for prompt, output in zip(prompts, outputs, strict=True):
                print(json.dumps(_result(prompt, output), ensure_ascii=False) if self.json else output.text, flush=True)
            reasons: list[FinishReason | None] = [output.finish_reason for output in outputs]
        else:
            reasons = [_stream(llm, encoded[0], params)]
        if llm.acceptance_rate is not None and not self.json:
            print(f"llama-infer: {llm.acceptance_rate:.0%} of the guesses were right", file=sys.stderr)
        if "length" in reasons and not self.json:
            print("llama-infer: stopped at the limit (--max-tokens, or the model's context)", file=sys.stderr)
        return 0

    def _model(self, settings: dict[str, Any]) -> LLM:
        llm = self.load()
        for notice in llm.model_sampling.notices(settings):
            print(f"llama-infer: {notice}", file=sys.stderr)
        return llm

    def _encode(self, llm: LLM, prompt: str) -> list[int]:
        if self.chat:
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            return llm.encode_chat([*system, {"role": "user", "content": prompt}])
        assert llm.tokenizer is not None
        return llm.tokenizer.encode(prompt)

    # --- a file

    def _file(self, settings: dict[str, Any]) -> int:
        if self.prompt:
            raise ValueError("--prompt and --input are two ways to say what to continue; give one")
        # Whatever decides a result, but not where it runs and how fast.
        model = ("model", "dtype", "quantization", "kv_cache_dtype", "draft", "max_model_len", "generation_config")
        names = (*model, "chat", "system")
        decisive = {**{name: getattr(self, name) for name in names}, "settings": settings}
        if self.input == "-":
            tasks = list(read_tasks(sys.stdin.buffer, decisive))
        else:
            assert self.input is not None
            with open(self.input, "rb") as file:
                tasks = list(read_tasks(file, decisive))
        if not tasks:
            raise ValueError(f"--input {self.input} has no lines")
        wrong = None if self.output is None else errors_in(self.output, tasks)
        if wrong is not None:
            print(f"llama-infer: {self.output} is complete", file=sys.stderr)
        else:
            wrong = self._run(tasks, settings)
        if wrong:
            print(f"llama-infer: {wrong} of {len(tasks)} lines have errors", file=sys.stderr)
        return 2 if wrong else 0

    def _run(self, tasks: Sequence[Task], settings: dict[str, Any]) -> int:
        """Do the tasks that have not been done before; returns how many had errors."""
        if self.output is None:
            return self._run_left(tasks, settings, None)
        with open_journal(self.output) as journal:
            left = [task for task in tasks if task not in journal]
            if len(left) < len(tasks):
                print(f"llama-infer: {len(tasks) - len(left)} of {len(tasks)} were done before", file=sys.stderr)
            wrong = self._run_left(left, settings, journal) if left else 0
            journal.finish(tasks, self.output)
        return wrong

    def _run_left(self, left: Sequence[Task], settings: dict[str, Any], journal: Journal | None) -> int:
        """Do these tasks; returns how many had errors."""
        llm = self._model(settings)
        from .batch_run import run_tasks

        wrong = 0
        with _bar(len(left)) as tell:
            for task, result in run_tasks(llm, left, _limited(llm, settings), self.system, self.chat):
                if journal is None:
                    print(json.dumps(result, ensure_ascii=False), flush=True)
                else:
                    journal.add(task, result)
                if "error" in result:
                    wrong += 1
                    print(f"llama-infer: {self.input}, line {task.line}: {result['error']}", file=sys.stderr)
                tell(result)
        return wrong


def _limited(llm: LLM, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with a limit where nobody gives one."""
    given = llm.sampling_params(**settings).max_tokens
    return settings if given is not None else {**settings, "max_tokens": MAX_TOKENS}


def _stream(llm: LLM, ids: list[int], params: SamplingParams) -> FinishReason | None:
    reason: FinishReason | None = None
    for chunk in llm.stream(ids, params):
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
        reason = chunk.finish_reason
    print(flush=True)
    return reason


def _standard_input() -> str:
    data = sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 at byte {error.start}") from None
    # echo and editors end a text with a newline that is no part of the sentence to continue
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")


def _result(prompt: str, output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(output.token_ids),
    }


@contextmanager
def _bar(total: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("lines"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("lines", total=total)
        yield lambda result: bar.advance(task)
