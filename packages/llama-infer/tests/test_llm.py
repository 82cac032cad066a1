"""LLM against `generate_naive` on single prompts; cases B18, B21 and B24; refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from llama_core import Attend, Llama, Tokenizer, generate_naive
from llama_infer import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
MakeModel = Callable[..., Llama]


def naive(model: Llama, prompt: list[int], **settings: Any) -> list[int]:
    return generate_naive(lambda tokens: model.logits(model(tokens)), prompt, **settings)


@pytest.fixture(scope="module")
def llm(model: Llama, tokenizer: Tokenizer) -> LLM:
    return LLM(model, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def bare(model: Llama) -> LLM:
    """Without a tokenizer: token ids only, no end token."""
    return LLM(model)


# --- greedy and sampled tokens equal the oracle's


@pytest.mark.parametrize("max_num_seqs", [1, 2, 32])
def test_batches_of_many_lengths_equal_the_oracle(model: Llama, max_num_seqs: int) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = (7, 1, 30, 7, 13, 2, 63, 50)
    prompts = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]
    outputs = LLM(model, max_num_seqs=max_num_seqs).generate(prompts, SamplingParams(temperature=0.0, max_tokens=20))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert output.token_ids == naive(model, prompt, max_new_tokens=min(20, 64 - len(prompt)))
        assert output.finish_reason == "length"


def test_a_seeded_request_draws_the_same_alone_and_among_others(model: Llama, bare: LLM) -> None:
    params = [
        SamplingParams(temperature=1.0, seed=5, max_tokens=12),
        SamplingParams(temperature=0.0, max_tokens=9),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, seed=5, max_tokens=12),
    ]
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    outputs = bare.generate(prompts, params)
    for prompt, each, output in zip(prompts, params, outputs, strict=True):
        assert output.token_ids == bare.generate(prompt, each)[0].token_ids
        settings = {name: getattr(each, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
        assert output.token_ids == naive(model, prompt, max_new_tokens=each.max_tokens, **settings)


def test_unseeded_requests_draw_differently(bare: LLM) -> None:
    outputs = bare.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=10))
    assert len({tuple(output.token_ids) for output in outputs}) == 4


def test_the_model_of_a_folder_is_the_saved_one(save: Callable[..., Path], model: Llama) -> None:
    llm = LLM(save(), device="cpu")
    assert llm.generate([[5, 6, 7]], GREEDY)[0].token_ids == naive(
        model, [5, 6, 7], max_new_tokens=8, eos_ids=llm.tokenizer.eos_ids if llm.tokenizer else ()
    )


# --- text


def test_text_of_text(llm: LLM, tokenizer: Tokenizer) -> None:
    output = llm.generate("hello", GREEDY)[0]
    assert output.prompt == "hello"
    assert output.prompt_token_ids == tokenizer.encode("hello")
    assert output.text == tokenizer.decode([i for i in output.token_ids if i < tokenizer.vocab_size])


def test_chat_is_the_encoded_template(llm: LLM, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    outputs = llm.chat([messages, messages], GREEDY)
    assert outputs == llm.chat(messages, GREEDY) * 2
    assert outputs[0].prompt_token_ids == tokenizer.encode_chat(messages)


@pytest.mark.parametrize("seed", range(6))
def test_stream_is_generate_in_pieces(llm: LLM, seed: int) -> None:
    params = SamplingParams(seed=seed, max_tokens=40, stop=("e", "\x00\x01"))
    output = llm.generate("hello", params)[0]
    chunks = list(llm.stream("hello", params))
    assert "".join(chunk.text for chunk in chunks) == output.text
    assert [chunk.token_id for chunk in chunks] == output.token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [output.finish_reason]


def test_a_stop_string_ends_and_is_not_shown(llm: LLM) -> None:
    full = llm.generate("hello", SamplingParams(seed=3, max_tokens=40))[0]
    stop = full.text[7:9]
    cut = llm.generate("hello", SamplingParams(seed=3, max_tokens=40, stop=(stop,)))[0]
    assert cut.finish_reason == "stop"
    assert cut.text == full.text[: full.text.index(stop)]
    assert cut.token_ids == full.token_ids[: len(cut.token_ids)]


# --- case B18: left padding changes the answer


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_b18_a_short_row_gives_what_it_gives_alone(model: Llama, bare: LLM, order: tuple[int, int]) -> None:
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3]]
    outputs = bare.generate([prompts[i] for i in order], GREEDY)
    for i, output in zip(order, outputs, strict=True):
        assert output.token_ids == naive(model, prompts[i], max_new_tokens=8)


# --- case B21: several end ids, and rows that end at different steps


class Scripted(Llama):
    """Its next token depends on the position alone; the rows' prompts have different lengths, so each has a script."""

    script: ClassVar = {1: (5, 7, 9, 9, 9, 9), 21: (5, 5, 5, 3, 9, 9)}
    passes = 0

    def forward(self, tokens: Tensor, positions: Tensor | None = None, attend: Attend | None = None) -> Tensor:
        self.passes += 1
        assert positions is not None
        table = torch.zeros(64, self.config.vocab_size)
        for length, ids in self.script.items():
            for step, token_id in enumerate(ids):
                table[length - 1 + step, token_id] = 1
        return table[positions].expand(len(tokens), -1, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden.clone()


def scripted(save: Callable[..., Path], config_eos: int | list[int] = 258) -> tuple[LLM, Scripted]:
    from llama_core import load_tokenizer

    folder = save({"eos_token_id": [3, 7]}, eos_token_id=config_eos)
    tokenizer = load_tokenizer(folder)
    assert {3, 7} <= set(tokenizer.eos_ids)
    model = Scripted(LLM(folder, device="cpu").model.config)
    return LLM(model, tokenizer=tokenizer), model


PROMPTS = [[7], [7] * 20 + [1]]  # an end id in the prompt ends nothing


@pytest.mark.parametrize("config_eos", [3, [3]])
def test_b21_rows_end_each_at_its_own_end_id(save: Callable[..., Path], config_eos: int | list[int]) -> None:
    llm, model = scripted(save, config_eos)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=6))
    assert [output.token_ids for output in outputs] == [[5, 7], [5, 5, 5, 3]]
    assert [output.finish_reason for output in outputs] == ["stop", "stop"]
    assert model.passes == 4  # the prompts, and three steps


def test_b21_with_room_for_two(save: Callable[..., Path]) -> None:
    llm, _ = scripted(save)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=2))
    assert [output.token_ids for output in outputs] == [[5, 7], [5, 5]]
    assert [output.finish_reason for output in outputs] == ["stop", "length"]


def test_ignore_eos_goes_on_but_not_past_stop_token_ids(save: Callable[..., Path]) -> None:
    llm, _ = scripted(save)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, stop_token_ids=(3,))
    assert [output.token_ids for output in llm.generate(PROMPTS, params)] == [[5, 7, 9, 9, 9, 9], [5, 5, 5, 3]]


def test_min_tokens_keeps_end_tokens_away(save: Callable[..., Path]) -> None:
    llm, _ = scripted(save)
    params = SamplingParams(temperature=0.0, max_tokens=6, min_tokens=2, ignore_eos=False)
    first, second = llm.generate(PROMPTS, params)
    assert first.token_ids[0] == 5
    assert first.token_ids[1] != 7  # forbidden there; and the script offers no other end
    assert second.token_ids == [5, 5, 5, 3]


def test_min_tokens_keeps_stop_strings_away(llm: LLM) -> None:
    full = llm.generate("hello", SamplingParams(seed=3, max_tokens=20, min_tokens=20))[0]
    late = llm.generate("hello", SamplingParams(seed=3, max_tokens=20, min_tokens=20, stop=(full.text[2],)))[0]
    assert late.text == full.text


# --- case B24: one over-long prompt in a batch breaks the result list


@pytest.fixture
def short(make_model: MakeModel) -> LLM:
    return LLM(make_model(max_position_embeddings=32))


def test_b24_one_error_names_the_prompt_before_any_work(short: LLM) -> None:
    prompts = [[1] * 4, [1] * 100, [1] * 5]
    with pytest.raises(ValueError, match="prompt 1 has 100 tokens; the context is 32"):
        short.generate(prompts, SamplingParams(max_tokens=4))


def test_b24_generation_ends_with_the_context(short: LLM) -> None:
    for _ in range(2):
        output = short.generate([[1] * 30], SamplingParams(temperature=0.0, max_tokens=8))[0]
        assert len(output.token_ids) == 2
        assert output.finish_reason == "length"


def test_b24_no_room_at_all_is_an_error(short: LLM) -> None:
    with pytest.raises(ValueError, match="prompt 0 has 32 tokens; the context is 32, so a prompt may have at most 31"):
        short.generate([[1] * 32])


def test_b24_an_empty_prompt_is_an_error_or_a_begin_token(short: LLM, llm: LLM) -> None:
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        short.generate([[1], []])
    assert llm.generate("", GREEDY)[0].prompt_token_ids == [256]


# --- refusals


def test_no_prompts_no_outputs(bare: LLM) -> None:
    assert bare.generate([]) == []


@pytest.mark.parametrize("bad", [-1, 272, True, "x"])
def test_unknown_ids_are_errors(bare: LLM, bad: object) -> None:
    with pytest.raises(ValueError, match=f"prompt 1 holds {bad!r}; token ids are Python integers from 0 to 271"):
        bare.generate([[1], [1, bad]])  # type: ignore[list-item]


def test_params_must_fit_the_prompts(bare: LLM) -> None:
    with pytest.raises(ValueError, match="got 3 params for 2 prompts"):
        bare.generate([[1], [2]], [GREEDY] * 3)


def test_text_without_a_tokenizer_is_an_error(bare: LLM) -> None:
    with pytest.raises(ValueError, match="a text prompt needs a tokenizer"):
        bare.generate("hello")
    with pytest.raises(ValueError, match="a chat needs a tokenizer"):
        bare.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match="a stop string needs a tokenizer"):
        bare.generate([[1]], SamplingParams(stop=("x",)))


def test_stream_refuses_at_once(short: LLM) -> None:
    with pytest.raises(ValueError, match="prompt 0 has 40 tokens"):
        short.stream([1] * 40)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_model_len": 65}, "max_model_len must be from 2 to the model's context 64, got 65"),
        ({"max_model_len": 1}, "got 1"),
        ({"max_model_len": 2.5}, "max_model_len must be a whole number of at least 1, got 2.5"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a whole number of at least 1, got 0"),
        ({"block_size": True}, "block_size must be a whole number of at least 1, got True"),
        ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization must be in \(0, 1\], got 0"),
        ({"enforce_eager": 1}, "enforce_eager must be True or False, got 1"),
        ({"kernels": "fast"}, "kernels must be 'auto' or 'plain', got 'fast'"),
        ({"attention": "ring"}, "attention must be one of auto, sdpa, flash, triton, plain, got 'ring'"),
        ({"kv_cache_memory_bytes": 4096, "max_model_len": 64}, "holds 16 tokens, the context is 64; lower"),
        ({"generation_config": "vllm"}, "must be 'auto' or 'off', got 'vllm'"),
    ],
)
def test_bad_arguments_are_errors(model: Llama, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LLM(model, **arguments)


def test_a_path_with_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        LLM(tmp_path / "none")


# --- defaults of the model


def test_generation_config_gives_defaults_and_explicit_values_win(save: Callable[..., Path]) -> None:
    folder = save({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 257})
    llm = LLM(folder, device="cpu")
    assert llm.default_params == SamplingParams(temperature=0.6, top_p=0.9)
    assert llm.sampling_params(temperature=0.0) == SamplingParams(temperature=0.0, top_p=0.9)
    assert LLM(folder, device="cpu", generation_config="off").default_params == SamplingParams()
    with pytest.raises(ValueError, match="no sampling setting 'temprature'"):
        llm.sampling_params(temprature=1.0)


def test_a_broken_generation_config_is_a_remark(save: Callable[..., Path]) -> None:
    llm = LLM(save("{,}"), device="cpu")
    assert llm.default_params == SamplingParams()
    (notice,) = llm.model_sampling.notices()
    assert "going on without generation_config.json" in notice


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts are of type NoneType"),
        (5, "prompts are of type int"),
        ([[1], None], "prompt 1 is None; a text or a list of token ids is wanted"),
        ([0.5], "prompt 0 is 0.5"),
    ],
)
def test_prompts_of_other_kinds_are_refused(bare: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bare.generate(prompts)


def test_end_ids_outside_the_vocabulary(make_model: MakeModel, tokenizer: Tokenizer, bare: LLM) -> None:
    with pytest.raises(ValueError, match="stop_token_ids hold 99999; token ids are from 0 to 271"):
        bare.generate([1], SamplingParams(stop_token_ids=99999))  # type: ignore[arg-type]
    small = LLM(make_model(vocab_size=200), tokenizer=tokenizer)  # its end token, 257, has no row in this model
    assert len(small.generate([1], SamplingParams(min_tokens=2, max_tokens=2))[0].token_ids) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_of_nan_is_an_error_and_no_text(make_model: MakeModel, temperature: float) -> None:
    model = make_model()
    model.model.layers[0].mlp.up_proj.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="prompt 0: the largest logit is nan"):
        LLM(model).generate([1, 2], SamplingParams(temperature=temperature, max_tokens=2))
