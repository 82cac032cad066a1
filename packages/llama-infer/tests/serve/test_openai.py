"""OpenAI's own client, unchanged, for every endpoint and every way of asking."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from llama_core import generate_naive
from llama_infer import SamplingParams

from .conftest import NAME, Running

CHAT: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def naive(server: Running, ids: list[int], count: int = 12) -> str:
    model, tokenizer = server.llm.model, server.llm.tokenizer
    assert tokenizer is not None
    found = generate_naive(lambda tokens: model.logits(model(tokens)), ids, max_new_tokens=count)
    assert not set(found) & set(tokenizer.eos_ids)
    return tokenizer.decode([token_id for token_id in found if token_id < tokenizer.vocab_size])


def chat_ids(server: Running) -> list[int]:
    return server.llm.encode_chat(CHAT)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == NAME
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="'gpt-9' does not exist; there is 'tiny'"):
        client.models.retrieve("gpt-9")


def test_chat(client: openai.OpenAI, server: Running) -> None:
    answer = client.chat.completions.create(messages=CHAT, **GREEDY)
    assert answer.choices[0].message.content == naive(server, chat_ids(server))
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(chat_ids(server))
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (12, len(chat_ids(server)) + 12)


def test_chat_streamed(client: openai.OpenAI, server: Running) -> None:
    stream = client.chat.completions.create(
        messages=CHAT, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == naive(server, chat_ids(server))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert len({chunk.id for chunk in [*chunks, last]}) == 1
    assert not last.choices
    assert last.usage is not None
    assert last.usage.completion_tokens == 12
    assert last.usage.prompt_tokens_details is not None
    without = list(client.chat.completions.create(messages=CHAT, stream=True, **GREEDY))
    assert all(chunk.usage is None and chunk.choices for chunk in without)


def test_the_clients_own_stream_helper(client: openai.OpenAI, server: Running) -> None:
    text = naive(server, chat_ids(server))
    with client.chat.completions.stream(messages=CHAT, stop=text[5:7], **GREEDY) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text[: text.index(text[5:7])]


def test_completions(client: openai.OpenAI, server: Running) -> None:
    assert server.llm.tokenizer is not None
    ids = [server.llm.tokenizer.encode(text) for text in ("Once", "Twice")]
    expected = [naive(server, each) for each in ids]
    for prompt in (["Once", "Twice"], ids):
        answer = client.completions.create(prompt=prompt, **GREEDY)  # type: ignore[arg-type]
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1]
    assert client.completions.create(prompt="Once", echo=True, **GREEDY).choices[0].text == "Once" + expected[0]
    texts = ["", ""]
    for chunk in client.completions.create(prompt=["Once", "Twice"], stream=True, echo=True, **GREEDY):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["Once" + expected[0], "Twice" + expected[1]]


@pytest.mark.parametrize("stream", [False, True])
def test_several_samples_with_a_seed(client: openai.OpenAI, server: Running, stream: bool) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": CHAT, "n": 3, "seed": 7, "max_tokens": 8, "temperature": 1.5}
    texts = [""] * 3
    if stream:
        for chunk in client.chat.completions.create(stream=True, **asked):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        texts = [choice.message.content or "" for choice in client.chat.completions.create(**asked).choices]
    params = SamplingParams(temperature=1.5, n=3, seed=7, max_tokens=8)
    expected = server.llm.generate([chat_ids(server)], params)[0].samples
    assert texts == [sample.text for sample in expected]
    assert len(set(texts)) == 3
    client.chat.completions.create(**{**asked, "seed": -1, "n": 1})  # OpenAI's seeds have a sign


def test_stop(client: openai.OpenAI, server: Running) -> None:
    text = naive(server, chat_ids(server))
    middle = text[3:5]
    for stop in (middle, ["never there", middle]):
        answer = client.chat.completions.create(messages=CHAT, stop=stop, **GREEDY)
        assert answer.choices[0].message.content == text[: text.index(middle)]
        assert answer.choices[0].finish_reason == "stop"
        stream = client.chat.completions.create(messages=CHAT, stop=stop, stream=True, **GREEDY)
        assert "".join(c.choices[0].delta.content or "" for c in stream) == text[: text.index(middle)]


def test_logit_bias(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt="x", logit_bias={"65": 100}, **GREEDY)
    assert server_text(answer) == server_text(answer)[0] * 12
    with pytest.raises(openai.BadRequestError, match="token ids are from 0 to 271"):
        client.completions.create(prompt="x", logit_bias={"9999": 1}, **GREEDY)


def server_text(answer: Any) -> str:
    return str(answer.choices[0].text)


def test_logprobs_of_a_chat(client: openai.OpenAI, server: Running) -> None:
    asked: dict[str, Any] = {"messages": CHAT, "logprobs": True, "top_logprobs": 2, **GREEDY}
    whole = client.chat.completions.create(**asked).choices[0].logprobs
    streamed = []
    text = ""
    for chunk in client.chat.completions.create(stream=True, **asked):
        text += chunk.choices[0].delta.content or ""
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert whole is not None
    assert whole.content is not None
    assert [token.token for token in streamed] == [token.token for token in whole.content]
    # Two runs: where others share a step, products of other sizes round other last bits.
    assert [token.logprob for token in streamed] == pytest.approx([token.logprob for token in whole.content], abs=1e-5)
    assert text == naive(server, chat_ids(server))
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2)
    expected = server.llm.generate([chat_ids(server)], params)[0]
    assert expected.logprobs is not None
    for token, token_id, entry in zip(whole.content, expected.token_ids, expected.logprobs, strict=True):
        assert token.logprob == pytest.approx(entry[token_id].logprob, abs=1e-5)
        first, second = token.top_logprobs
        assert first.logprob >= second.logprob
        assert first.token == token.token  # greedy
    joined = b"".join(bytes(token.bytes or ()) for token in whole.content)
    assert joined.decode("utf-8", "replace") == text


def test_logprobs_of_a_text(client: openai.OpenAI, server: Running) -> None:
    asked: dict[str, Any] = {"prompt": "Once", "logprobs": 2, "echo": True, **GREEDY}
    whole = client.completions.create(**asked).choices[0].logprobs
    assert whole is not None
    assert len(whole.tokens or ()) == 5 + 12  # BOS and four bytes
    assert (whole.token_logprobs or ())[0] is None
    assert all(isinstance(logprob, float) for logprob in (whole.token_logprobs or ())[1:])
    streamed: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": [], "top_logprobs": []}
    for chunk in client.completions.create(stream=True, **asked):
        assert chunk.choices[0].logprobs is not None
        for name, values in streamed.items():
            values += getattr(chunk.choices[0].logprobs, name)
    assert streamed["tokens"] == whole.tokens
    assert streamed["text_offset"] == whole.text_offset
    assert streamed["token_logprobs"][1:] == pytest.approx((whole.token_logprobs or ())[1:], abs=1e-5)


def test_json(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["colour", "legs"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema, "strict": True}}
    asked: dict[str, Any] = {"model": NAME, "messages": CHAT, "temperature": 0, "max_tokens": 200}
    answer = client.chat.completions.create(response_format=form, **asked).choices[0]
    assert answer.finish_reason == "stop"
    value = json.loads(answer.message.content or "")
    assert value["colour"] in ("red", "green")
    assert value["legs"] in range(10)
    stream = client.chat.completions.create(response_format=form, stream=True, **asked)
    assert json.loads("".join(chunk.choices[0].delta.content or "" for chunk in stream)) == value
    free: Any = {"type": "json_object"}
    begun = client.chat.completions.create(response_format=free, **{**asked, "max_tokens": 8}).choices[0]
    assert (begun.message.content or "").lstrip().startswith("{")
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(response_format=wrong, **asked)


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Says how it is.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "traffic")
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "traffic"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_must_be_called(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": CHAT, "tools": TOOLS, "tool_choice": choice}
    asked |= {"temperature": 0, "max_tokens": 200}
    if stream:
        with client.chat.completions.stream(**asked) as events:
            answer = events.get_final_completion().choices[0]
    else:
        answer = client.chat.completions.create(**asked).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert not answer.message.content
    (call,) = answer.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name in ("weather", "traffic")
    assert choice == "required" or call.function.name == "traffic"
    assert call.function.arguments in ('{"city": "Rome"}', '{"city": "Oslo"}')
    back = [*CHAT, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    client.chat.completions.create(model=NAME, messages=back, tools=TOOLS, max_tokens=2)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_may_be_called(client: openai.OpenAI, stream: bool) -> None:
    """The tiny model would never call one by itself, so that its output is one of these is asked for."""
    said = 'Let me see.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    for text, words, names in ((said, "Let me see.", ["weather"]), ("Hm, <tool box", "Hm, <tool box", [])):
        asked: dict[str, Any] = {"model": NAME, "messages": CHAT, "tools": TOOLS, "max_tokens": 200}
        asked["extra_body"] = {"structured_outputs": {"choice": [text]}}
        if stream:
            chunks = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **asked)]
            content = "".join(chunk.delta.content or "" for chunk in chunks)
            calls: list[Any] = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
            reason = chunks[-1].finish_reason
            assert len([chunk for chunk in chunks if chunk.delta.content]) > 3  # words don't wait for the end
        else:
            choice = client.chat.completions.create(**asked).choices[0]
            content, calls, reason = choice.message.content or "", list(choice.message.tool_calls or ()), None
            reason = choice.finish_reason
        assert content == words
        assert [call.function.name for call in calls] == names
        assert reason == ("tool_calls" if names else "stop")


def test_tools_are_offered_to_the_model(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"messages": CHAT, **GREEDY}
    without = client.chat.completions.create(**asked).usage
    offered = client.chat.completions.create(tools=TOOLS, **asked).usage
    refused = client.chat.completions.create(tools=TOOLS, tool_choice="none", **asked).usage
    assert without is not None
    assert offered is not None
    assert refused is not None
    assert offered.prompt_tokens > without.prompt_tokens + 200
    assert refused.prompt_tokens == without.prompt_tokens


def test_parts_of_a_message_and_other_roles(client: openai.OpenAI) -> None:
    parts: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [
        {"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]  # fmt: skip
    plain = client.chat.completions.create(messages=CHAT, **GREEDY)
    assert client.chat.completions.create(messages=parts, **GREEDY).choices == plain.choices
    image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(messages=image, **GREEDY)


def test_many_at_once(server: Running) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(at: int) -> str:
                stream = await client.completions.create(prompt=f"{at} and", stream=True, **GREEDY)
                return "".join([chunk.choices[0].text async for chunk in stream])

            found = await asyncio.gather(*(one(at) for at in range(24)))
        assert server.llm.tokenizer is not None
        for at in range(0, 24, 7):
            assert found[at] == naive(server, server.llm.tokenizer.encode(f"{at} and"))

    asyncio.run(main())


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**{**GREEDY, "messages": CHAT, "model": "gpt-9"})
    assert missing.value.code == "model_not_found"
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(prompt="x" * 1100, **GREEDY)
    assert long.value.code == "context_length_exceeded"
    assert "1024 tokens, and the request has 1101" in str(long.value)
    for wrong, words in (
        ({"temperature": 3}, "temperature: Input should be less than or equal to 2"),
        ({"temperature": "1"}, "temperature: Input should be a valid number"),
        ({"extra_body": {"temprature": 1}}, "there is no field 'temprature'; did you mean 'temperature'?"),
        ({"n": 2, "temperature": 0}, "n must be 1 at temperature 0"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "user"}]}, "needs content"),
        ({"top_logprobs": 2}, "top_logprobs belong to logprobs"),
        ({"tool_choice": "required"}, "there are no tools"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**{**GREEDY, "messages": CHAT, **wrong})
        assert words in str(refused.value)
        assert refused.value.type == "invalid_request_error"
