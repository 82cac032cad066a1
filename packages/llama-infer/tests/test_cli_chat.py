"""`llama-infer chat`: turns, commands, and what Ctrl-C does."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llama_infer import LLM, SamplingParams, StreamChunk, cli
from llama_infer.cli_chat import Conversation

Save = Callable[..., Path]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def talk(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, typed: str, *argv: str
) -> tuple[str, str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
    flags = ["--device", "cpu", "--temperature", "0", "--max-tokens", "6"]
    assert cli.main(["chat", "--model", str(folder), *flags, *argv]) == 0
    out, err = capfd.readouterr()
    return out, err


def answers(folder: Path, *turns: str, system: str | None = None) -> list[str]:
    """What a chat of these turns should print, each answer in the light of all before it."""
    llm, texts = LLM(folder, device="cpu"), []
    messages = [] if system is None else [{"role": "system", "content": system}]
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        texts.append(llm.chat(messages, GREEDY)[0].text)
        messages.append({"role": "assistant", "content": texts[-1]})
    return texts


@pytest.fixture
def folder(save: Save) -> Path:
    return save(max_position_embeddings=256)


def test_turns_build_on_one_another(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    out, err = talk(capfd, monkeypatch, folder, "hi\n\n  and you?  \n", "--system", "be kind")
    assert out == "".join(text + "\n" for text in answers(folder, "hi", "and you?", system="be kind"))
    assert "model, float32 on cpu, kernels auto, attention sdpa" in err
    speeds = re.findall(r"^(\d) tokens, first after [\d.]+ s, then [\d.]+ tokens/s, at the limit$", err, re.MULTILINE)
    assert speeds == ["6", "6"]


def test_reset_forgets(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    out, err = talk(capfd, monkeypatch, folder, "hi\n/reset\nhi\n/exit\nnot read\n")
    assert out == (answers(folder, "hi")[0] + "\n") * 2
    assert "the conversation is forgotten" in err


def test_help_and_unknown_commands(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    out, err = talk(capfd, monkeypatch, folder, "/help\n/rest\n/xyz\n")
    assert out == ""
    for command in ("/help", "/reset", "/exit"):
        assert re.search(rf"^{command} +\w", err, re.MULTILINE)
    assert "no command '/rest'; did you mean /reset?" in err
    assert "no command '/xyz'; /help lists them" in err


def test_a_turn_that_does_not_fit_is_said_and_undone(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    out, err = talk(capfd, monkeypatch, folder, f"hi\n{'x' * 300}\nand you?\n")
    assert out == "".join(text + "\n" for text in answers(folder, "hi", "and you?"))
    assert re.search(r"no longer fits \(\d+ tokens, the context is 256\); /reset begins anew", err)


def test_a_model_without_a_chat_template_is_an_error(capfd: pytest.CaptureFixture[str], save: Save) -> None:
    folder = save()
    (folder / "chat_template.jinja").unlink()
    assert cli.main(["chat", "--model", str(folder), "--device", "cpu"]) == 2
    assert "the model has no chat template" in capfd.readouterr().err


def test_control_c_stops_the_answer_and_keeps_its_beginning(
    capfd: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(folder, device="cpu")
    conversation = Conversation(llm, GREEDY, None)
    stream = llm.stream

    def interrupted(*arguments: object) -> Iterator[StreamChunk]:
        for index, chunk in enumerate(stream(*arguments)):  # type: ignore[arg-type]
            if index == 3:
                raise KeyboardInterrupt
            yield chunk

    monkeypatch.setattr(llm, "stream", interrupted)
    conversation.answer("hi")
    out, err = capfd.readouterr()
    beginning = out.removesuffix("\n")
    assert beginning
    assert answers(folder, "hi")[0].startswith(beginning)
    assert "tokens/s, stopped" in err
    assert conversation.messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": beginning},
    ]
    monkeypatch.undo()
    conversation.answer("go on")
    expected = llm.chat([*conversation.messages[:2], {"role": "user", "content": "go on"}], GREEDY)[0].text
    assert conversation.messages[-1] == {"role": "assistant", "content": expected}
