"""`llama-infer generate`: one prompt, its continuation on standard output."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .cli_options import ModelOptions, SamplingOptions

if TYPE_CHECKING:
    from .llm import LLM

MAX_TOKENS = 512
"""Where neither the command line nor the model says when to stop."""


@dataclass(frozen=True, kw_only=True)
class Generate(SamplingOptions, ModelOptions):
    """Continue a prompt, and print the continuation as it comes."""

    prompt: str
    """The text to continue; - reads it from standard input, less one newline at its end."""
    chat: bool = False
    """Take the prompt as the user's turn of a chat, in the model's chat format."""
    system: str | None = None
    """A system message before it; needs --chat."""
    json: bool = False
    """Print one JSON object at the end instead of text as it comes."""

    def run(self) -> int:
        if self.system is not None and not self.chat:
            raise ValueError("--system is a message of a chat; add --chat")
        settings = self.explicit()
        prompt = _standard_input() if self.prompt == "-" else self.prompt
        if not prompt:
            raise ValueError("the prompt is empty; give --prompt TEXT, or --prompt - and text on standard input")
        llm = self.load()
        for notice in llm.model_sampling.notices(settings):
            print(f"llama-infer: {notice}", file=sys.stderr)
        params = llm.sampling_params(**settings)
        if params.max_tokens is None:
            params = llm.sampling_params(**settings, max_tokens=MAX_TOKENS)
        ids = self._encode(llm, prompt)
        if self.json:
            output = llm.generate([ids], params)[0]
            _print_json(prompt, output)
            return 0
        for chunk in llm.stream(ids, params):
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
        print(flush=True)
        if chunk.finish_reason == "length":
            print("llama-infer: stopped at the limit (--max-tokens, or the model's context)", file=sys.stderr)
        return 0

    def _encode(self, llm: LLM, prompt: str) -> list[int]:
        if self.chat:
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            return llm.encode_chat([*system, {"role": "user", "content": prompt}])
        assert llm.tokenizer is not None
        return llm.tokenizer.encode(prompt)


def _standard_input() -> str:
    data = sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 at byte {error.start}") from None
    # echo and editors end a text with a newline that is no part of the sentence to continue
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")


def _print_json(prompt: str, output: Any) -> None:
    result = {
        "prompt": prompt,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(output.token_ids),
    }
    print(json.dumps(result, ensure_ascii=False), flush=True)
