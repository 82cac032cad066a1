"""Latency and throughput of the engine over sizes of batches and lengths of prompts, beside the device's roofline.

The roof of a part of the work is the longer of two times (Williams et al. 2009, https://doi.org/10.1145/1498765.1498785):
its arithmetic at the device's measured matrix rate, and the bytes that it must read at the measured copy rate. A prompt
is nearly all arithmetic; a step that draws a token for each sequence reads all weights and every key and value.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from llama_core import Llama, LlamaConfig

from .device_rates import DeviceRates
from .llm import LLM
from .sampling_params import SamplingParams


@dataclass(frozen=True)
class Point:
    """A batch of prompts of one length."""

    batch: int
    prompt: int
    new: int
    """Tokens that each produced."""
    first_token: float
    """Seconds from asking to the first token, the mean over the batch."""
    prompts: float
    """Seconds until all had their first token."""
    step: float
    """Seconds of a step that draws a token for each, or several where tokens are guessed; the median."""
    slowest_step: float
    decode_rate: float
    """New tokens per second once all prompts are read."""
    total: float
    """Seconds of everything."""
    prompts_roof: float
    step_roof: float

    @property
    def output_rate(self) -> float:
        """New tokens per second over everything."""
        return self.batch * self.new / self.total


def bench_engine(
    llm: LLM,
    rates: DeviceRates,
    batches: Sequence[int],
    prompts: Sequence[int],
    new: int,
    tell: Callable[[Point], None] = lambda point: None,
) -> list[Point]:
    """Measure every size of batch with every length of prompts, each twice; the second counts.

    Args:
        new: tokens to produce, at least 2.
        tell: called with each point.

    Raises:
        ValueError: what does not fit the engine.
    """
    if max(prompts) + new > llm.max_model_len:
        raise ValueError(f"{max(prompts)} prompt and {new} new tokens are more than the context of {llm.max_model_len}")
    if max(batches) > llm.engine.scheduler.max_num_seqs:
        raise ValueError(f"a batch of {max(batches)} is more than max_num_seqs {llm.engine.scheduler.max_num_seqs}")
    weights = weight_bytes(llm.model)
    cache = llm.engine.runner.cache.memory
    token_bytes = cache.nbytes // (cache.shape[2] * cache.shape[3])
    known = llm.model.config.vocab_size if llm.tokenizer is None else llm.tokenizer.vocab_size
    known = min(known, llm.model.config.vocab_size)
    generator = torch.Generator().manual_seed(0)
    points = []
    for prompt in prompts:
        for batch in batches:
            for _ in range(2):  # kernels are compiled and graphs captured in the first
                ids = torch.randint(known, (batch, prompt), generator=generator).tolist()
                first, read, steps, rate, total = _run(llm, ids, new)
            held = batch * (prompt + new / 2)
            roofs = (
                roof(prompt_flops(llm.model.config, batch, prompt), weights, rates),
                roof(step_flops(llm.model.config, batch, held), weights + held * token_bytes, rates),
            )
            points.append(
                Point(batch, prompt, new, first, read, statistics.median(steps), max(steps), rate, total, *roofs)
            )
            tell(points[-1])
    return points


def _run(llm: LLM, prompts: list[list[int]], new: int) -> tuple[float, float, list[float], float, float]:
    """Mean seconds to the first token, seconds until all have one, of each step from there on as long as all generate,
    tokens per second of these, and seconds of everything."""
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    start = time.perf_counter()
    requests = [llm.requests.request(None, ids, params) for ids in prompts]
    sequences = [sequence for request in requests for sequence in request.sequences]
    times = [start]
    read = None
    steps: list[float] = []
    produced: list[int] = []
    for _ in llm.engine.run(sequences):
        times.append(time.perf_counter())
        if read is not None and not any(sequence.has_ended() for sequence in sequences):
            steps.append(times[-1] - times[-2])
        elif read is None and all(sequence.token_ids for sequence in sequences):
            read = times[-1]
        produced.append(sum(len(sequence.token_ids) for sequence in sequences))
    total = times[-1] - start
    assert read is not None
    firsts = [
        timings.first_token - start
        for request in requests
        for sample in request.output().samples
        if (timings := sample.timings) is not None and timings.first_token is not None
    ]
    if not steps:  # the last step of some was the first of others
        return statistics.mean(firsts), read - start, [times[-1] - times[-2]], produced[-1] / total, total
    begin = times.index(read)
    drawn = produced[begin - 1 + len(steps)] - produced[begin - 1]
    return statistics.mean(firsts), read - start, steps, drawn / sum(steps), total


def roof(flops: float, read: float, rates: DeviceRates) -> float:
    """Seconds that the device needs at least."""
    return max(flops / rates.matmul, read / rates.copy)


def prompt_flops(config: LlamaConfig, batch: int, prompt: int) -> float:
    """Of reading so many prompts, and the logits of their last tokens."""
    pairs = batch * prompt * (prompt + 1) / 2
    return batch * (prompt * _layers_flops(config) + _head_flops(config)) + pairs * _pair_flops(config)


def step_flops(config: LlamaConfig, batch: int, held: float) -> float:
    """Of a token for each sequence, with so many tokens in the cache together."""
    return batch * (_layers_flops(config) + _head_flops(config)) + held * _pair_flops(config)


def _layers_flops(config: LlamaConfig) -> float:
    """Of one token through all projections: a multiplication and an addition for each weight."""
    hidden, width = config.hidden_size, config.head_width
    attention = hidden * width * (2 * config.num_attention_heads + 2 * config.kv_heads)
    return 2.0 * config.num_hidden_layers * (attention + 3 * hidden * config.intermediate_size)


def _head_flops(config: LlamaConfig) -> float:
    return 2.0 * config.hidden_size * config.vocab_size


def _pair_flops(config: LlamaConfig) -> float:
    """Of one query against one key, and its share of the value."""
    return 4.0 * config.num_hidden_layers * config.num_attention_heads * config.head_width


def weight_bytes(model: Llama) -> int:
    """Bytes of weights that a step reads: all but the embedding, where the head does not use it too. Rounded weights
    count as they are stored, and memory that two layers share once."""
    tensors = [*model.model.layers.parameters(), *model.model.layers.buffers()]
    head = model.lm_head
    assert head is not None
    tensors += [*head.parameters(), *head.buffers()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
