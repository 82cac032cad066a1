"""Generating with Llama models: engine, command line and server."""

from typing import TYPE_CHECKING

from .outputs import FinishReason as FinishReason
from .outputs import Logprob as Logprob
from .outputs import RequestOutput as RequestOutput
from .outputs import Sample as Sample
from .outputs import StreamChunk as StreamChunk
from .outputs import Timings as Timings
from .sampling_params import SamplingParams as SamplingParams
from .structured_outputs import StructuredOutputsParams as StructuredOutputsParams

if TYPE_CHECKING:
    from .async_llm import AsyncLLM as AsyncLLM
    from .llm import LLM as LLM


def __getattr__(name: str) -> object:
    # LLM needs torch, which takes seconds to import; the command line's help must not wait for it.
    if name == "LLM":
        from .llm import LLM

        return LLM
    if name == "AsyncLLM":
        from .async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
