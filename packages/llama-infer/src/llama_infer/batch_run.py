"""Tasks of a batch file through the engine: as many at once as it can use, each result as soon as it is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .batch_file import PROMPTS, Task
from .llm import LLM
from .outputs import Sample
from .request import Request


def run_tasks(
    llm: LLM, tasks: Iterable[Task], settings: Mapping[str, Any], system: str | None = None, chat: bool = False
) -> Iterator[tuple[Task, dict[str, Any]]]:
    """Yields each task with its result, in the order in which they end. One that is wrong, or fails, has an `error`.

    Args:
        settings: by names of SamplingParams; a task's own win.
        system, chat: for tasks with a `prompt`: take it as the user's turn of a chat, after a system message.
    """
    waiting = iter(tasks)
    running: dict[Task, Request] = {}
    engine = llm.engine
    most = 2 * engine.scheduler.max_num_seqs  # someone always waits for a place, and memory stays flat
    more = True
    try:
        while running or more:
            while more and sum(len(request.sequences) for request in running.values()) < most:
                task = next(waiting, None)
                if task is None:
                    more = False
                    break
                try:
                    request = _request(llm, task, settings, system, chat)
                except (ValueError, RecursionError) as error:
                    yield task, {**task.head(), "error": str(error)}
                    continue
                running[task] = request
                for sequence in request.sequences:
                    engine.add(sequence)
            if running:
                engine.step()
            for task in [task for task, request in running.items() if all(s.has_ended() for s in request.sequences)]:
                yield task, _result(task, running.pop(task))
    finally:
        for request in running.values():
            for sequence in request.sequences:
                engine.abort(sequence)


def _request(llm: LLM, task: Task, settings: Mapping[str, Any], system: str | None, chat: bool) -> Request:
    if task.error is not None:
        raise ValueError(task.error)
    own = {name: value for name, value in task.fields.items() if name not in ("id", *PROMPTS) and value is not None}
    if isinstance(own.get("logit_bias"), dict):  # JSON's names are texts
        own["logit_bias"] = {int(i) if i.isdecimal() else i: value for i, value in own["logit_bias"].items()}
    params = llm.sampling_params(**{**settings, **own})
    (value,) = (task.fields[name] for name in PROMPTS if name in task.fields)
    if "prompt" in task.fields and chat:
        before = [] if system is None else [{"role": "system", "content": system}]
        value = [*before, {"role": "user", "content": value}]
    if "messages" in task.fields and not all(isinstance(message, dict) for message in value):
        raise ValueError("messages must be a list of objects with role and content")
    if "messages" in task.fields and not value:
        raise ValueError("messages is empty; at least 1 is needed")
    text, ids = llm.requests.encode(value, task.line)
    return llm.requests.request(text, ids, params, task.line)


def _result(task: Task, request: Request) -> dict[str, Any]:
    output = request.output()
    if output.error is not None and len(output.samples) == 1:
        return {**task.head(), "error": output.error}
    result = {**task.head(), "prompt_tokens": len(output.prompt_token_ids)}
    if len(output.samples) == 1:
        return {**result, **_sample(output.samples[0])}
    return {**result, "samples": [_sample(sample) for sample in output.samples]}


def _sample(sample: Sample) -> dict[str, Any]:
    result: dict[str, Any] = {
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "completion_tokens": len(sample.token_ids),
    }
    if sample.logprobs is not None:
        result["logprobs"] = [
            {str(token_id): entry.logprob for token_id, entry in entries.items()} for entries in sample.logprobs
        ]
    if sample.error is not None:
        result["error"] = sample.error
    return result
