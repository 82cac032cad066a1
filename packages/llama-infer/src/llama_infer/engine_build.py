"""From settings to an engine: how much memory the cache gets, and which attention reads it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from llama_core import Llama, Tokenizer

from .block_pool import BlockPool
from .draft import build_drafter, check_draft
from .engine import Engine
from .fp8_cache import measured_scales
from .logprobs import LogprobWriter
from .paged_cache import PagedKVCache, block_bytes
from .placement import attention_for
from .runner import ModelRunner
from .sampler import Sampler
from .scheduler import Scheduler
from .tensor_parallel import LeadingRunner

if TYPE_CHECKING:
    from .ranks import Ranks

CPU_CACHE_BYTES = 4 * 2**30
"""Of the cache on a CPU, where one whole context fits into less; memory is taken as it is first written."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings of `LLM` that concern its engine, described there."""

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    kernels: str = "auto"
    attention: str = "auto"
    speculative_tokens: int = 0
    num_speculative_tokens: int = 4
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {share!r}")
        for name in ("enable_prefix_caching", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        guesses = self.speculative_tokens
        if isinstance(guesses, bool) or not isinstance(guesses, int) or guesses < 0:
            raise ValueError(f"speculative_tokens must be a whole number of at least 0, got {guesses!r}")
        drafted = self.num_speculative_tokens
        if isinstance(drafted, bool) or not isinstance(drafted, int) or drafted < 1:
            raise ValueError(f"num_speculative_tokens must be a whole number of at least 1, got {drafted!r}")
        if self.kv_cache_dtype not in ("auto", "fp8"):
            raise ValueError(f"kv_cache_dtype must be 'auto' or 'fp8', got {self.kv_cache_dtype!r}")
        if self.kernels not in ("auto", "plain"):
            raise ValueError(f"kernels must be 'auto' or 'plain', got {self.kernels!r}")


@dataclass(frozen=True)
class BuiltEngine:
    engine: Engine
    max_model_len: int
    attention: str
    """The name of the attention that was taken, "auto" resolved."""
    remarks: tuple[str, ...]
    """What the user should know."""


def build_engine(
    model: Llama,
    tokenizer: Tokenizer | None,
    settings: EngineSettings,
    ranks: Ranks | None = None,
    draft: Llama | None = None,
) -> BuiltEngine:
    """An engine for a model, its cache sized to the memory there is.

    Args:
        ranks: where several share the model, each of which builds an engine: rank 0's leads, the others' runners
            `follow` it.
        draft: a model that guesses ahead.

    Raises:
        ValueError: a context that the model or the memory is too small for, or an attention that cannot run here.
    """
    weight = next(model.parameters())
    device, dtype = weight.device, weight.dtype
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the model is on the device {device.type!r}; it must be on 'cpu' or 'cuda'")
    context = model.config.max_position_embeddings
    wanted = context if settings.max_model_len is None else settings.max_model_len
    if not 2 <= wanted <= context:
        raise ValueError(f"max_model_len must be from 2 to the model's context {context}, got {wanted}")
    remarks: tuple[str, ...] = ()
    if draft is not None:
        check_draft(draft, model)
        shorter = draft.config.max_position_embeddings
        if wanted > shorter:
            if settings.max_model_len is not None:
                raise ValueError(f"max_model_len must be from 2 to the draft model's context {shorter}, got {wanted}")
            remarks, wanted = (
                (f"the draft model's context is {shorter}, the model's {context}: the shorter counts",),
                shorter,
            )
    attend_rows = attention_for(settings.attention, settings.kernels, model.config, device, dtype)
    max_num_seqs = settings.max_num_seqs or (256 if device.type == "cuda" else 32)
    most_tokens = max(settings.max_num_batched_tokens, max_num_seqs)  # a token for each that generates

    size = settings.block_size
    cache_dtype = torch.float8_e4m3fn if settings.kv_cache_dtype == "fp8" else dtype
    each = block_bytes(model.config, size, cache_dtype)
    if draft is not None:
        each += block_bytes(draft.config, size, next(draft.parameters()).dtype)
    enough = max_num_seqs * -(-wanted // size)
    memory = settings.kv_cache_memory_bytes
    if memory is None:
        memory = (
            _measured(model, most_tokens, max_num_seqs, settings, draft)
            if device.type == "cuda"
            else _cpu_memory(-(-wanted // size) * each)
        )
    num_blocks = min(enough, memory // each)
    if ranks is not None:
        num_blocks = ranks.least(num_blocks)
    capacity = num_blocks * size
    if capacity < wanted:
        told = f"memory for keys and values holds {capacity} tokens, the context is {wanted}"
        if settings.max_model_len is not None or capacity < 2:
            raise ValueError(f"{told}; lower max_model_len, or give it more than {memory:,} bytes")
        remarks = (*remarks, f"{told}: going on with {capacity}")
        wanted = capacity

    cuda = device.type == "cuda"
    guesses = settings.speculative_tokens if draft is None else settings.num_speculative_tokens
    sharing = settings.enable_prefix_caching
    pool = BlockPool(num_blocks, size, prefix_caching=sharing, contiguous=attend_rows is not None)
    scales = measured_scales(model) if settings.kv_cache_dtype == "fp8" else None
    make_runner = partial(LeadingRunner, ranks) if ranks is not None and ranks.is_first else ModelRunner
    runner = make_runner(
        model,
        PagedKVCache(model.config, num_blocks, size, cache_dtype, device, scales),
        max_num_seqs,
        wanted,
        attend_rows,
        graphs=cuda and attend_rows is None and not settings.enforce_eager,
    )
    drafter = None
    if draft is not None:
        drafter = build_drafter(draft, settings, num_blocks, max_num_seqs, wanted)
    engine = Engine(
        Scheduler(pool, max_num_seqs, most_tokens, guesses, drafted=draft is not None),
        runner,
        Sampler(fast=cuda and settings.kernels == "auto"),
        LogprobWriter(model, tokenizer, runner.logits_of),
        overlap=cuda and attend_rows is None and not guesses,
        drafter=drafter,
    )
    automatic = "triton" if attend_rows is None else "sdpa"
    attention = automatic if settings.attention == "auto" else settings.attention
    return BuiltEngine(engine, wanted, attention, remarks)


def _cpu_memory(one_context: int) -> int:
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not every system tells
        physical = 2 * CPU_CACHE_BYTES
    return min(max(CPU_CACHE_BYTES, one_context), physical // 2)


@torch.inference_mode()
def _measured(model: Llama, tokens: int, rows: int, settings: EngineSettings, draft: Llama | None = None) -> int:
    """Bytes that a GPU has for the cache: its share of the whole, less what is used and what the largest step takes."""
    device = next(model.parameters()).device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    width = min(tokens, model.config.max_position_embeddings)
    count = -(-tokens // width)
    hidden = model(torch.zeros(count, width, dtype=torch.int64, device=device)).flatten(0, 1)
    logits = model.logits(hidden[:rows])
    logits.float().softmax(-1)
    del hidden, logits
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    if draft is not None:  # distributions of all guesses, of both models, with their sums (`speculative`)
        peak += rows * (1 + settings.num_speculative_tokens) * model.config.vocab_size * 24
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(settings.gpu_memory_utilization * total) - (total - free) - peak)
