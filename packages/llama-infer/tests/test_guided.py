"""Guided output: whatever is drawn has the form that was asked for, alone and in every company."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from llama_core import Llama, Tokenizer, generate_naive
from llama_infer import LLM, SamplingParams, StructuredOutputsParams, embedded

needs_model = pytest.mark.skipif(embedded.find_embedded() is None, reason=f"not installed: {embedded.INSTALL}")
MakeModel = Callable[..., Llama]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def is_person(text: str) -> bool:
    """The schema by hand."""
    found = json.loads(text)
    return (
        list(found) == ["name", "age", "tags"]
        and isinstance(found["name"], str)
        and len(found["name"]) <= 6
        and type(found["age"]) is int
        and 0 <= found["age"] <= 150
        and len(found["tags"]) <= 2
        and set(found["tags"]) <= {"a", "b"}
    )


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


FORMS: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"json": PERSON, "whitespace_pattern": ""}, is_person),
    ({"json": json.dumps(PERSON), "whitespace_pattern": " ?"}, is_person),
    ({"regex": "[0-9]{3}-[a-z]{2,5}"}, matches("[0-9]{3}-[a-z]{2,5}")),
    ({"regex": "^[äß☃😀]{2,4}$"}, matches("[äß☃😀]{2,4}")),  # characters of 2, 3 and 4 bytes, each byte a token
    ({"choice": ["yes", "no", "yes, but", "schön 😀"]}, lambda text: text in ("yes", "no", "yes, but", "schön 😀")),
    ({"grammar": 'root ::= pair | "-"\npair ::= "(" root root ")"'}, lambda text: balanced(text)),
    ({"grammar": 'start: "a" | "(" start ")"'}, matches(r"\(*a\)*")),
]


def balanced(text: str) -> bool:
    while "(--)" in text:
        text = text.replace("(--)", "-")
    return text == "-"


@pytest.fixture(scope="module")
def long_model(make_model: MakeModel) -> Llama:
    return make_model(max_position_embeddings=256)


@pytest.fixture(scope="module")
def llm(long_model: Llama, tokenizer: Tokenizer) -> LLM:
    return LLM(long_model, tokenizer=tokenizer, max_num_seqs=8)


def sentencepiece() -> Tokenizer:
    """Pieces with the space at their beginning, and bytes as `<0x..>`."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    for piece in ("▁", "a", "▁a", "b", "y", "e", "s", "▁yes", '{"', '":', "1", "0"):
        vocab[piece] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return Tokenizer(backend, named={"bos_token": "<s>", "eos_token": "</s>"}, add_bos=True)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "no end token"])
def test_whatever_is_drawn_has_the_form(long_model: Llama, tokenizer: Tokenizer, kind: str) -> None:
    """A model of random weights at a high temperature draws nearly any token that it may."""
    if kind == "sentencepiece":
        tokenizer = sentencepiece()
    elif kind == "no end token":
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(tokenizer.to_json()), add_bos=False)
        assert tokenizer.eos_ids == ()
    llm = LLM(long_model, tokenizer=tokenizer, max_num_seqs=8)
    params = [
        SamplingParams(n=6, temperature=2.0, seed=7 * i, max_tokens=200, structured_outputs=form)
        for i, (form, _) in enumerate(FORMS)
    ]
    ended = 0
    for (form, fits), output in zip(FORMS, llm.generate(["go:"] * len(FORMS), params), strict=True):
        for sample in output.samples:
            assert sample.error is None
            if sample.finish_reason == "stop":
                assert fits(sample.text), (form, sample.text)
                ended += 1
            else:  # nested for ever
                assert "grammar" in form
    assert ended >= 6 * (len(FORMS) - 2)


def test_greedy_equals_the_masked_oracle(long_model: Llama, llm: LLM, tokenizer: Tokenizer) -> None:
    """Among the tokens that continue a choice, the one of the largest raw logit."""
    choices = ["yes", "no", "yes, but", "never"]
    prompt = tokenizer.encode("well:")
    output = llm.generate([prompt], SamplingParams(temperature=0.0, structured_outputs={"choice": choices}))[0]
    ids: list[int] = []
    while True:
        text = tokenizer.decode(ids)
        may = {ord(choice[len(text)]) for choice in choices if choice.startswith(text) and choice != text}
        by_byte = {tokenizer.token_bytes(i): i for i in range(256)}
        allowed = {by_byte[bytes([byte])] for byte in may} | set(tokenizer.eos_ids if text in choices else ())
        if not may:
            break
        logits = long_model.logits(long_model(torch.tensor([prompt + ids])))[0, -1]
        ids.append(max(allowed, key=lambda i: logits[i].item()))
        if ids[-1] in tokenizer.eos_ids:
            break
    assert output.token_ids == ids
    assert output.finish_reason == "stop"


def test_company_changes_nothing(long_model: Llama, tokenizer: Tokenizer) -> None:
    """Guided and free requests in one batch, pre-empted for want of memory, with and without guesses: as each alone."""
    dice = random.Random(3)
    prompts = ["abcab" * dice.randrange(1, 8) for _ in range(10)]
    params = [
        SamplingParams(
            temperature=1.0 if i % 3 else 0.0,
            seed=i,
            max_tokens=40,
            structured_outputs=None if i % 2 else FORMS[i % len(FORMS)][0],
            repetition_penalty=1.2 if i % 5 == 0 else 1.0,
        )
        for i in range(10)
    ]
    alone = [
        LLM(long_model, tokenizer=tokenizer, enable_prefix_caching=False).generate(prompt, each)[0]
        for prompt, each in zip(prompts, params, strict=True)
    ]
    block = 2 * 2 * 16 * 2 * 8 * 4  # bytes
    for guess in (0, 3):
        llm = LLM(
            long_model, tokenizer=tokenizer, max_model_len=128, max_num_seqs=6, kv_cache_memory_bytes=9 * block,
            speculative_tokens=guess, max_num_batched_tokens=32,
        )  # fmt: skip
        outputs = llm.generate(prompts, params)
        assert [output.text for output in outputs] == [output.text for output in alone]
        assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]
        assert llm.engine.scheduler.preemptions > 0
        if guess:
            assert llm.engine.accepted > 0


def test_beside_steps_that_are_sent_ahead(
    long_model: Llama, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where free sequences are a step ahead of the host: guided ones come and go among them."""
    prompts = ["hello", "abc", "hello", "x", "you", "abc"]
    params = [
        SamplingParams(
            temperature=1.0,
            seed=i,
            max_tokens=30 if i % 2 else 8 + i,
            structured_outputs=FORMS[i // 2][0] if i % 2 else None,
        )
        for i in range(6)
    ]
    expected = [LLM(long_model, tokenizer=tokenizer).generate(p, each)[0] for p, each in zip(prompts, params)]
    monkeypatch.setattr("llama_infer.engine_build.attention_for", lambda *_: None)
    llm = LLM(long_model, tokenizer=tokenizer, max_num_seqs=3)
    llm.engine.overlap = True
    for output, wanted in zip(llm.generate(prompts, params), expected, strict=True):
        assert output.token_ids == wanted.token_ids


def test_a_free_neighbour_is_not_masked(llm: LLM, long_model: Llama, tokenizer: Tokenizer) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    guided = SamplingParams(temperature=1.0, structured_outputs={"regex": "x{20}"})
    free, bound = llm.generate(["hello", "hello"], [greedy, guided])
    prompt = tokenizer.encode("hello")
    assert free.token_ids == generate_naive(lambda ids: long_model.logits(long_model(ids)), prompt, max_new_tokens=12)
    assert bound.text == "x" * 20


def test_where_nothing_can_follow_it_ends_by_itself(llm: LLM) -> None:
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 50}, {"max_tokens": 3}):
        params = SamplingParams(structured_outputs={"regex": "abc"}, **more)  # type: ignore[arg-type]
        output = llm.generate("x", params)[0]
        assert (output.text, output.finish_reason, len(output.token_ids)) == ("abc", "stop", 3)


def test_min_tokens_and_ignore_eos_keep_the_choice_to_end_away(llm: LLM) -> None:
    for seed in range(5):
        sampling = {"seed": seed, "temperature": 1.0, "structured_outputs": {"regex": "a{1,30}"}}
        assert len(llm.generate("x", SamplingParams(min_tokens=25, **sampling))[0].text) >= 25
        assert llm.generate("x", SamplingParams(ignore_eos=True, **sampling))[0].text == "a" * 30
    cut = llm.generate("x", SamplingParams(max_tokens=4, structured_outputs={"regex": "a{9}"}))[0]
    assert (cut.text, cut.finish_reason) == ("aaaa", "length")


def test_stop_strings_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(structured_outputs={"regex": "ab--cd"}, stop="--", logprobs=3, temperature=1.0)
    output = llm.generate("x", params)[0]
    assert (output.text, output.finish_reason) == ("ab", "stop")
    free = llm.generate(output.prompt_token_ids, SamplingParams(temperature=0.0, max_tokens=1, logprobs=3))[0]
    assert output.logprobs is not None
    assert free.logprobs is not None
    best = free.token_ids[0]  # log-probabilities are raw: what the form forbids stays the most probable
    assert output.logprobs[0][best].logprob == pytest.approx(free.logprobs[0][best].logprob, abs=1e-5)


def test_streams_and_chats(llm: LLM) -> None:
    params = SamplingParams(structured_outputs={"json": PERSON, "whitespace_pattern": ""}, seed=1)
    messages = [{"role": "user", "content": "who?"}]
    text = llm.chat(messages, params)[0].text
    assert is_person(text)
    assert "".join(chunk.text for chunk in llm.stream(messages, params)) == text


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"json": {"type": "foo"}}, 'json \'{"type": "foo"}\': Invalid type: foo'),
        ({"json": "{"}, "json '{': Expecting property name"),
        ({"json": {"$ref": "#/nope"}}, "'/nope' does not exist"),
        ({"json": {"type": "string", "format": "zork"}}, "Unknown format: zork"),
        ({"json": "[" * 100_000}, "json"),
        ({"regex": "a("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "root ::= foo"}, "Rule 'foo' not found"),
        ({"grammar": "start: foo"}, "foo"),
    ],
)
def test_a_bad_form_is_an_error_of_that_request(llm: LLM, form: dict[str, Any], words: str) -> None:
    good = SamplingParams(temperature=0.0, max_tokens=2)
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        llm.generate(["a", "b"], [good, SamplingParams(structured_outputs=form)])
    assert str(error.value).startswith("prompt 1: structured_outputs: ")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    assert llm.generate("a", good)[0].finish_reason == "length"  # the engine is as it was


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({}, "takes one of json, json_object, regex, choice, grammar; got none of them"),
        ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
        ({"choice": []}, "choice must be a list of texts"),
        ({"choice": "yes"}, "choice must be a list of texts"),
        ({"choice": ["a", 1]}, "choice must be a list of texts"),
        ({"regex": 3}, "regex must be a text, got 3"),
        ({"json": [1]}, "json must be a text, got"),
        ({"json_object": False}, "json_object must be True or left out, got False"),
        ({"regex": "a", "whitespace_pattern": ""}, "whitespace_pattern belongs to json"),
        ({"regexp": "a"}, "has no 'regexp'; there are json, json_object, regex"),
        ("a", "must be StructuredOutputsParams, or a mapping"),
        ({"json": {"x": {1, 2}}}, "is no JSON"),
    ],
)
def test_a_form_that_is_none_is_refused_by_the_parameters(form: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        SamplingParams(structured_outputs=form)


def test_parameters_are_values() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}
    params = SamplingParams(structured_outputs={"json": schema})
    assert params == SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    assert hash(params) == hash(SamplingParams(structured_outputs={"json": json.dumps(schema)}))


def test_without_a_tokenizer_or_the_package_it_says_so(
    long_model: Llama, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(structured_outputs={"regex": "a"})
    with pytest.raises(ValueError, match="structured_outputs needs a tokenizer"):
        LLM(long_model).generate([[1, 2]], params)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=re.escape("pip install llama-infer[guided]")):
        LLM(long_model, tokenizer=tokenizer).generate("a", params)


@needs_model
def test_the_embedded_model_fills_in_forms() -> None:
    """Real tokens of many bytes each, hot, with guesses."""
    llm = LLM(device="cpu", max_model_len=256, speculative_tokens=4)
    forms = FORMS[:4]
    params = [
        SamplingParams(n=2, temperature=1.5, seed=i, max_tokens=80, structured_outputs=form)
        for i, (form, _) in enumerate(forms)
    ]
    outputs = llm.generate(["Ada, aged 36: Ada, aged 36: "] * len(params), params)
    for (_, fits), output in zip(forms, outputs, strict=True):
        for sample in output.samples:
            assert sample.finish_reason == "stop"
            assert fits(sample.text), sample.text
