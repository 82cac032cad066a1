"""A cache of fp8: exactly attention over rounded keys and values, however requests are mixed, and twice the tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llama_core import Llama, causal_attend, generate_naive
from llama_infer import LLM, SamplingParams
from llama_infer.fp8_cache import ROOM, measured_scales
from llama_kernels.write_kv import from_fp8, to_fp8

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], list(range(30)), [1], [5, 6, 7, 8]]


class RoundedAttend:
    """The oracle: causal attention over keys and values rounded to e4m3."""

    def __init__(self, scales: Tensor) -> None:
        self.scales = scales

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (from_fp8(to_fp8(x, s), s, x.dtype) for x, s in zip((k, v), self.scales[:, layer], strict=True))
        return causal_attend(layer, q, k, v)


def naive(model: Llama, prompt: list[int], count: int) -> list[int]:
    attend = RoundedAttend(measured_scales(model))
    return generate_naive(lambda t: model.logits(model(t, attend=attend)), prompt, max_new_tokens=count)


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 7, "block_size": 4, "blocks": 12}, {"block_size": 3}]
)
def test_tokens_are_those_of_rounded_keys_and_values(
    make_model: Callable[..., Llama], settings: dict[str, int]
) -> None:
    """Chunks and pre-emption too: what the cache returns does not depend on how it was filled."""
    model = make_model()
    blocks = settings.pop("blocks", None)
    if blocks is not None:
        settings["kv_cache_memory_bytes"] = (
            blocks * settings["block_size"] * 2 * 2 * 2 * 8
        )  # two of each, 8 wide, a byte
    llm = LLM(model, kv_cache_dtype="fp8", max_num_seqs=3, max_model_len=48, **settings)  # type: ignore[arg-type]
    assert llm.engine.runner.cache.memory.dtype == torch.float8_e4m3fn
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=15))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.token_ids == naive(model, prompt, 15)
    assert (llm.engine.scheduler.preemptions > 0) == (blocks is not None)
    again = llm.generate(PROMPTS[2:3], SamplingParams(temperature=0.0, max_tokens=15))[0]
    assert again.token_ids == outputs[2].token_ids
    llm.engine.scheduler.pool.check()


def test_through_block_tables_too(make_model: Callable[..., Llama]) -> None:
    """The paged path of llama_kernels, which without a GPU is plain torch."""
    from llama_infer.block_pool import BlockPool
    from llama_infer.engine import Engine
    from llama_infer.logprobs import LogprobWriter
    from llama_infer.paged_cache import PagedKVCache
    from llama_infer.runner import ModelRunner
    from llama_infer.sampler import Sampler
    from llama_infer.scheduler import Scheduler
    from llama_infer.sequence import Sequence

    model = make_model()
    cache = PagedKVCache(model.config, 20, 4, torch.float8_e4m3fn, scales=measured_scales(model))
    runner = ModelRunner(model, cache, 3, 48, attend_rows=None)
    scheduler = Scheduler(BlockPool(20, 4), 3, 9)
    engine = Engine(scheduler, runner, Sampler(False), LogprobWriter(model, None), overlap=False)
    sequences = [Sequence(prompt, SamplingParams(temperature=0.0), 15) for prompt in PROMPTS]
    for _ in engine.run(sequences):
        pass
    for sequence in sequences:
        assert sequence.token_ids == naive(model, sequence.prompt_ids, 15)


def test_twice_the_tokens_of_bfloat16(save: Callable[..., Path]) -> None:
    folder = save()

    def blocks(kind: str) -> int:
        llm = LLM(folder, dtype="bfloat16", device="cpu", kv_cache_memory_bytes=20 * 2048, kv_cache_dtype=kind)
        return llm.engine.scheduler.pool.num_blocks

    assert blocks("fp8") == 2 * blocks("auto") > 0


def test_scales_leave_room_and_follow_each_head(make_model: Callable[..., Llama]) -> None:
    model = make_model()
    before = measured_scales(model)
    assert before.shape == (2, 2, 2)
    model.model.layers[0].self_attn.v_proj.weight[:8] *= 4.0  # the first head's values
    after = measured_scales(model)
    torch.testing.assert_close(after[1, 0, 0], 4 * before[1, 0, 0])
    torch.testing.assert_close(after[1, 0, 1], before[1, 0, 1], rtol=0, atol=0)
    seen: list[Tensor] = []

    def look(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(torch.stack([k, v]).abs().amax(dim=(1, 2, 4)) / (after[:, layer] * 448))
        return causal_attend(layer, q, k, v)

    model(torch.tensor([[3, 1, 4, 1, 5, 9]]), attend=look)
    assert all((share > 0.2 / ROOM).all() and (share < 2 / ROOM).all() for share in seen)


def test_refusal(save: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype must be 'auto' or 'fp8', got 'int8'"):
        LLM(save(), kv_cache_dtype="int8")
