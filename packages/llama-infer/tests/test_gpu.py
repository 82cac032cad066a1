"""On a GPU: the same tokens as the oracle, with llama_kernels' operations and a cache on the device."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llama_core import Llama, generate_naive
from llama_infer import LLM, SamplingParams

pytestmark = pytest.mark.gpu


def naive(model: Llama, prompt: list[int], **settings: object) -> list[int]:
    return generate_naive(
        lambda tokens: model.logits(model(tokens)),
        prompt,
        device="cuda",
        **settings,  # type: ignore[arg-type]
    )


def test_float32_equals_the_oracle_on_the_cpu(save: Callable[..., Path], model: Llama) -> None:
    llm = LLM(save(), dtype="float32", device="cuda")
    assert next(llm.model.parameters()).is_cuda
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], list(range(40))]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = generate_naive(lambda tokens: model.logits(model(tokens)), prompt, max_new_tokens=12)
        assert output.token_ids == expected


def test_a_seed_draws_the_same_as_on_the_cpu(save: Callable[..., Path]) -> None:
    folder = save()
    params = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=7, max_tokens=20)
    texts = {
        LLM(folder, dtype="float32", device=device, kernels="plain").generate("hello", params)[0].text
        for device in ("cpu", "cuda")
    }
    assert len(texts) == 1


def test_auto_is_bfloat16_and_equals_the_oracle(save: Callable[..., Path]) -> None:
    llm = LLM(save())
    weight = next(llm.model.parameters())
    assert weight.is_cuda
    assert weight.dtype == torch.bfloat16
    # Two logits may be closer than bfloat16 tells apart, so only the first tokens are sure to be the same.
    output = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))[0]
    assert output.token_ids == naive(llm.model, [5, 6, 7], max_new_tokens=3)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("attention", ["auto", "sdpa", "plain"])
@pytest.mark.parametrize("memory", [2**20, 20 * 2**10])
def test_the_engine_equals_the_oracle(
    save: Callable[..., Path], model: Llama, attention: str, eager: bool, memory: int
) -> None:
    """Graphs, overlap, chunks and pre-emption (20 KiB are 80 tokens), float32."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (3, 40, 7, 1, 20, 33, 12, 5, 28)]
    llm = LLM(
        save(),
        dtype="float32",
        device="cuda",
        attention=attention,
        enforce_eager=eager,
        max_num_seqs=5,
        max_num_batched_tokens=24,
        kv_cache_memory_bytes=memory,
    )
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = generate_naive(lambda tokens: model.logits(model(tokens)), prompt, max_new_tokens=20)
        assert output.token_ids == expected
    llm.engine.scheduler.pool.check()


def test_a_seed_holds_among_neighbours_by_the_kernel_too(save: Callable[..., Path]) -> None:
    llm = LLM(save(), dtype="float32", device="cuda")
    params = [SamplingParams(temperature=0.9, top_k=40, seed=seed, max_tokens=16, ignore_eos=True) for seed in range(4)]
    together = llm.generate([[5, 6, 7]] * 4, params)
    assert len({tuple(output.token_ids) for output in together}) > 1
    for each, output in zip(params, together, strict=True):
        assert llm.generate([[5, 6, 7]], each)[0].token_ids == output.token_ids


def test_flash_is_refused_in_float32_and_serves_bfloat16(save: Callable[..., Path]) -> None:
    folder = save()
    with pytest.raises(ValueError, match="float16 and bfloat16"):
        LLM(folder, dtype="float32", device="cuda", attention="flash")
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    tokens = {
        tuple(LLM(folder, device="cuda", attention=name).generate([[5, 6, 7]], params)[0].token_ids)
        for name in ("flash", "triton")
    }
    assert len(tokens) == 1


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("draft_seed", [0, 9])
def test_guesses_change_no_greedy_token(
    save: Callable[..., Path], model: Llama, tmp_path: Path, eager: bool, draft_seed: int
) -> None:
    """A draft that is always right, and one that hardly ever is; guesses from the text. Graphs of several tokens."""
    draft = save(seed=draft_seed).rename(tmp_path / "draft")
    folder = save()
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (3, 40, 7, 1, 20)] + [[7, 8] * 9]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    settings = {"dtype": "float32", "device": "cuda", "enforce_eager": eager, "max_num_seqs": 4}
    for guess in ({"draft": draft, "num_speculative_tokens": 3}, {"speculative_tokens": 3}):
        llm = LLM(folder, **settings, **guess)  # type: ignore[arg-type]
        for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
            expected = generate_naive(lambda tokens: model.logits(model(tokens)), prompt, max_new_tokens=20)
            assert output.token_ids == expected
        if "draft" in guess:
            assert (llm.acceptance_rate == 1.0) == (draft_seed == 0)


def test_a_seed_draws_the_same_with_a_draft_as_on_the_cpu(save: Callable[..., Path], tmp_path: Path) -> None:
    draft = save(seed=9).rename(tmp_path / "draft")
    folder = save()
    params = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=7, max_tokens=20)
    texts = {
        LLM(folder, draft=draft, dtype="float32", device=device).generate("hello", params)[0].text
        for device in ("cpu", "cuda")
    }
    assert len(texts) == 1


def test_guided_output_beside_free_sequences(save: Callable[..., Path]) -> None:
    pytest.importorskip("llguidance")
    llm = LLM(save(), dtype="float32", device="cuda", max_num_seqs=4)
    free = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    alone = llm.generate("hello", free)[0].token_ids
    params = [
        free if i % 2 else SamplingParams(temperature=1.5, seed=i, structured_outputs={"regex": "[a-c]{3,9}-[0-9]{2}"})
        for i in range(8)
    ]
    for each, output in zip(params, llm.generate(["hello"] * 8, params), strict=True):
        if each is free:
            assert output.token_ids == alone
        else:
            assert re.fullmatch("[a-c]{3,9}-[0-9]{2}", output.text)
