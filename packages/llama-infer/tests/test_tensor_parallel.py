"""One model on several ranks: the oracle's tokens, whatever the mix; and every rank ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_core import Llama, LlamaConfig, Tokenizer, generate_naive, save_model
from llama_infer import LLM, SamplingParams, cli
from llama_infer.quantize import QuantizedLinear
from llama_infer.rounding import QUANTIZATIONS
from llama_infer.shared_model import share_of
from llama_parallel.testing import RankError, run_ranks

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], list(range(30)), [1], [5, 6, 7, 8]]


def on_ranks(folder: Path, size: int, work: Callable[[LLM], Any], **settings: Any) -> Any:
    """What `work` returns on rank 0."""

    def each(rank: int) -> Any:
        try:
            llm = LLM(folder, device="cpu", tensor_parallel_size=size, **settings)
        except SystemExit as end:
            return end.code  # checked below
        assert rank == 0
        result = work(llm)
        llm.close()
        return result

    first, *others = run_ranks(each, size)
    assert others == [0] * (size - 1)
    return first


def naive(model: Llama, prompt: list[int], count: int) -> list[int]:
    return generate_naive(lambda tokens: model.logits(model(tokens)), prompt, max_new_tokens=count)


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, {}),
        (4, {}),  # 2 key/value heads: two ranks hold the same one
        (2, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "vocab_size": 271}),
        (2, {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 65}),  # uneven
        (3, {"num_attention_heads": 6, "num_key_value_heads": 2}),  # more ranks than key/value heads, and uneven
    ],
)
def test_greedy_tokens_are_the_oracles(
    save: Callable[..., Path], make_model: Callable[..., Llama], size: int, changes: dict[str, Any]
) -> None:
    """Chunks, pre-emption and sharing in a tiny cache; the sizes of all ranks differ from the whole's."""
    folder, model = save(**changes), make_model(**changes)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    def work(llm: LLM) -> Any:
        outputs = llm.generate(PROMPTS, params)
        again = [llm.generate(PROMPTS[2:3], params)[0] for _ in range(2)][1]
        llm.engine.scheduler.pool.check()
        return [o.token_ids for o in outputs], again.token_ids, again.cached_tokens, llm.engine.scheduler.preemptions

    bytes_per_token = 2 * 2 * 8 * 4 * -(-model.config.kv_heads // size)  # keys and values, layers, width, float32
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 9, "block_size": 4}
    memory = 48 * bytes_per_token
    tokens, again, cached, preempted = on_ranks(
        folder, size, work, max_model_len=48, kv_cache_memory_bytes=memory, **settings
    )
    for prompt, got in zip(PROMPTS, tokens, strict=True):
        assert got == naive(model, prompt, 12)
    assert again == tokens[2]
    assert cached >= 28
    assert preempted > 0


def test_guesses_logprobs_and_seeds_are_those_of_one_process(
    make_model: Callable[..., Llama], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model, folder = make_model(), tmp_path / "repeating"
    for layer in model.model.layers:  # a model that soon goes round in circles
        layer.self_attn.o_proj.weight.mul_(0.05)
        layer.mlp.down_proj.weight.mul_(0.05)
    save_model(model, folder)
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    ]

    def work(llm: LLM) -> Any:
        outputs = llm.generate([[1, 2, 1, 2, 1, 2, 1], PROMPTS[1]], params)
        flat = [entry.logprob for step in outputs[1].logprobs or [] for entry in step.values()]
        flat += [e.logprob for step in outputs[1].prompt_logprobs or [] if step is not None for e in step.values()]
        return [o.token_ids for o in outputs], flat, llm.engine.guessed

    alone = work(LLM(folder, device="cpu", speculative_tokens=3, tokenizer=tokenizer))
    shared = on_ranks(folder, 2, work, speculative_tokens=3, tokenizer=tokenizer)
    assert shared[0] == alone[0]
    assert shared[1] == pytest.approx(alone[1], abs=1e-4)  # sums in another order
    assert alone[2] > 0


def test_a_cancelled_request_frees_its_blocks_and_the_others_go_on(save: Callable[..., Path], model: Llama) -> None:
    def work(llm: LLM) -> Any:
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        stream = llm.stream(PROMPTS[0], params)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        pool = llm.engine.scheduler.pool
        assert pool.free == pool.num_blocks
        return llm.generate(PROMPTS[1:2], params)[0].token_ids

    assert on_ranks(save(), 2, work) == naive(model, PROMPTS[1], 20)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_rounded_weights(save: Callable[..., Path], make_model: Callable[..., Llama], quantization: str) -> None:
    """Near the model that was rounded: a rank's part of o and down has scales of its own."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}
    folder, model = save(**shape), make_model(**shape)

    def work(llm: LLM) -> Any:
        return llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=0))

    outputs = on_ranks(folder, 2, work, quantization=quantization)
    expected = torch.tensor([(model.logits(model(torch.tensor([p]))))[0].log_softmax(-1)[i, p[i + 1]]
                             for p in PROMPTS for i in range(len(p) - 1)])  # fmt: skip
    got = torch.tensor([next(iter(e.values())).logprob for o in outputs for e in o.prompt_logprobs or [] if e])
    error = (got - expected).norm() / (expected - expected.mean()).norm()
    assert 0 < error < {"int8": 0.04, "fp8": 0.16, "int4": 0.5}[quantization]  # twice those of test_quantize


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_a_rounded_folder_gives_what_it_gives_undivided(save: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    """The scales are the file's; int4's groups do not end where o_proj is cut, so that its part is decoded."""
    source, target = save(hidden_size=128, intermediate_size=256, num_attention_heads=4, head_dim=32), tmp_path / "out"
    assert cli.main(["convert", str(source), str(target), "--quantization", kind]) == 0
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)

    def work(llm: LLM) -> Any:
        rounded = sum(isinstance(module, QuantizedLinear) for module in llm.model.modules())
        return rounded, [output.token_ids for output in llm.generate(PROMPTS, params)]

    rounded, tokens = on_ranks(target, 2, work)
    assert rounded == (6 if kind == "int4" else 8)
    assert tokens == work(LLM(target, device="cpu"))[1]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(9, 3, 2), (9, 3, 3), (9, 3, 6), (32, 8, 8), (32, 8, 16), (8, 1, 3), (5, 5, 4)]
)
def test_every_head_is_somewhere_and_reads_its_key(heads: int, kv_heads: int, size: int) -> None:
    config = LlamaConfig(
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=8, hidden_size=72, vocab_size=1000
    )
    shares = [share_of(config, size, rank) for rank in range(size)]
    assert [h for share in shares for h in share.queries] == list(range(heads))
    assert [r for share in shares for r in share.inner] == list(range(config.intermediate_size))
    assert [r for share in shares for r in share.vocabulary] == list(range(1000))
    for share in shares:
        group = len(share.queries) // len(share.kv)
        for index, head in enumerate(share.queries):
            assert share.kv[index // group] == head // (heads // kv_heads)


def test_refusals(save: Callable[..., Path], model: Llama) -> None:
    folder = save()
    with pytest.raises(ValueError, match="tensor_parallel_size 2 needs 2 processes, here are 1; start them with"):
        LLM(folder, tensor_parallel_size=2)
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match="tensor_parallel_size must be a whole number of at least 1"):
            LLM(folder, tensor_parallel_size=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give its path, not a Llama"):
        LLM(model, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="so it may be at most 4"):
        share_of(model.config, 5, 0)


def test_a_failing_rank_ends_all_with_its_traceback(save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save()

    def each(rank: int) -> None:
        from llama_infer.runner import ModelRunner

        if rank == 1:
            monkeypatch.setattr(ModelRunner, "run", lambda self, batch: 1 / 0)
        LLM(folder, device="cpu", tensor_parallel_size=2).generate([[1, 2, 3]])

    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 raised.*ZeroDivisionError.*rank 1 of 2 has failed"):
        run_ranks(each, 2, timeout=30)


def test_under_torchrun_the_command_prints_once(save: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--model", str(save()), "--device", "cpu", "--prompt", "hello", "--temperature", "0"]
    arguments += ["--max-tokens", "8", "--ignore-eos", "--json"]
    assert cli.main(arguments) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    shared = subprocess.run(
        [*torchrun, "-m", "llama_infer", *arguments, "--tensor-parallel-size", "2"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert shared.returncode == 0, shared.stderr
    assert shared.stdout == capsys.readouterr().out
