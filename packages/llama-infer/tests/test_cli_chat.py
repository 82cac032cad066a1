"""`llama-infer chat`: turns, commands, files, and what Ctrl-C does, in a pipe and in a terminal."""

from __future__ import annotations

import io
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llama_infer import LLM, SamplingParams, StreamChunk, cli
from llama_infer.cli_chat import obey
from llama_infer.conversation import Conversation

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
    out, err = talk(capfd, monkeypatch, folder, "/help\n/rest\n/xyz\n/reset all\n/save\n/set temperature\n/retry\n")
    assert out == ""
    for command in ("/help", "/reset", "/retry", "/save FILE", "/load FILE", "/set", "/exit"):
        assert re.search(rf"^{command} +\w", err, re.MULTILINE)
    assert "no command '/rest'; did you mean /reset?" in err
    assert "no command '/xyz'; /help lists them" in err
    assert "/reset takes nothing behind it, got 'all'" in err
    assert "/save wants the name of a file" in err
    assert "/set temperature wants a value" in err
    assert "nothing to try again: no question yet" in err


def test_a_turn_that_does_not_fit_is_said_and_undone(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    out, err = talk(capfd, monkeypatch, folder, f"hi\n{'x' * 300}\nand you?\n")
    assert out == "".join(text + "\n" for text in answers(folder, "hi", "and you?"))
    assert re.search(r"this turn does not fit: \d+ tokens, the context is 256", err)


def test_a_model_without_a_chat_template_is_an_error(capfd: pytest.CaptureFixture[str], save: Save) -> None:
    folder = save()
    (folder / "chat_template.jinja").unlink()
    assert cli.main(["chat", "--model", str(folder), "--device", "cpu"]) == 2
    assert "the model has no chat template" in capfd.readouterr().err


def test_control_c_stops_the_answer_and_keeps_its_beginning(
    capfd: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(folder, device="cpu")
    conversation = Conversation(llm, {"temperature": 0.0, "max_tokens": 6}, None)
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


def test_several_lines_are_one_turn(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    typed = 'one \\\n two\\\nthree\n"""a\n  /help b\n\nc"""\n"""d"""\n"""\nlast'
    out, _ = talk(capfd, monkeypatch, folder, typed)
    turns = ["one \n two\nthree", "a\n  /help b\n\nc", "d", "last"]
    assert out == "".join(text + "\n" for text in answers(folder, *turns))


def test_a_conversation_goes_to_a_file_and_on_from_there(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    file, other = tmp_path / "talk.json", tmp_path / "letter.txt"
    other.write_text("dear")
    talk(capfd, monkeypatch, folder, f"hi\n/set max-tokens 4\n/save {file}\n", "--system", "be kind")
    out, err = talk(capfd, monkeypatch, folder, f"x\n/load {file}\nand you?\n/save {other}\n/load {tmp_path}/none\n")
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    messages.append({"role": "assistant", "content": answers(folder, "hi", system="be kind")[0]})
    messages.append({"role": "user", "content": "and you?"})
    fewer = SamplingParams(temperature=0.0, max_tokens=4)  # the file's setting, in place of the command line's
    assert out.endswith(LLM(folder, device="cpu").chat(messages, fewer)[0].text + "\n")
    assert f"going on after 2 turns from {file}" in err
    assert f"{other} is no saved conversation" in err
    assert other.read_text() == "dear"
    assert "none: No such file or directory" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["letter.txt", "model", "talk.json"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"system": 1, "settings": {}, "messages": []}', "[" * 99999])
def test_what_is_no_conversation_changes_nothing(folder: Path, tmp_path: Path, content: str) -> None:
    conversation = Conversation(LLM(folder, device="cpu"), {}, "be kind")
    (tmp_path / "bad").write_text(content)
    with pytest.raises(ValueError, match="bad is no saved conversation"):
        conversation.load(tmp_path / "bad")
    (tmp_path / "worse").write_text('{"system": null, "settings": {"temperature": -1}, "messages": []}')
    with pytest.raises(ValueError, match="temperature must be"):
        conversation.load(tmp_path / "worse")
    assert conversation.system == "be kind"


def test_retry_answers_again(capfd: pytest.CaptureFixture[str], folder: Path) -> None:
    llm = LLM(folder, device="cpu")
    conversation = Conversation(llm, {"temperature": 1.0, "seed": 5, "max_tokens": 6}, None)
    conversation.answer("hi")
    conversation.retry()
    question = {"role": "user", "content": "hi"}
    texts = [llm.chat([question], SamplingParams(seed=s, max_tokens=6))[0].text for s in (5, 6)]
    assert capfd.readouterr().out == "".join(text + "\n" for text in texts)
    assert conversation.messages == [question, {"role": "assistant", "content": texts[1]}]


def test_settings_are_changed_shown_and_refused(folder: Path) -> None:
    conversation = Conversation(LLM(folder, device="cpu"), {"temperature": 0.5}, None)
    assert obey("/set temperature 0.2", conversation) == "temperature 0.2"
    assert obey("/set top-k 5", conversation) == "top_k 5"
    assert obey("/set stop x y", conversation) == 'stop ["x y"]'
    assert obey("/set system Be brief", conversation) == 'system "Be brief"'
    assert conversation.params == SamplingParams(temperature=0.2, top_k=5, stop="x y")
    assert obey("/set", conversation).splitlines() == [
        'system "Be brief"', "temperature 0.2", "top_k 5", "seed null", 'stop ["x y"]',
    ]  # fmt: skip
    assert obey("/set temperature null", conversation) == "temperature 1.0"
    assert obey("/set system null", conversation) == "system null"
    before = conversation.params
    assert obey("/set temperature -1", conversation).startswith("temperature must be a finite number of at least 0")
    assert obey("/set temperature warm", conversation).startswith("temperature must be a finite number")
    assert obey("/set temprature 1", conversation).startswith("no sampling setting 'temprature'")
    assert obey("/set temprature null", conversation).startswith("no sampling setting 'temprature'")
    assert obey("/set n 2", conversation) == "n cannot be set: a chat has one answer"
    assert conversation.params == before


def test_a_full_context_leaves_out_the_oldest_turns_and_says_so(
    capfd: pytest.CaptureFixture[str], folder: Path
) -> None:
    llm = LLM(folder, device="cpu")
    conversation = Conversation(llm, {"temperature": 0.0, "max_tokens": 6}, "be kind")
    for index in range(6):
        conversation.answer(f"{index} " + "x" * 40)
    err = capfd.readouterr().err
    assert "the context of 256 tokens is full: the oldest 2 turns are left out" in err
    assert len(conversation.messages) == 12  # all are kept, for the file
    llm = LLM(folder, device="cpu")
    kept = [{"role": "system", "content": "be kind"}, *conversation.messages[-6:-1]]
    while len(llm.encode_chat(kept)) > 256 - 64:
        del kept[1:3]
    assert conversation.messages[-1]["content"] == llm.chat(kept, GREEDY)[0].text


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_in_a_terminal(save: Save, tmp_path: Path) -> None:
    """Ctrl-C stops the answer and nothing else; at the prompt it says how to leave."""
    import pty

    folder = save(max_position_embeddings=100_000)
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "llama_infer", "chat", "--model", str(folder), "--device", "cpu", "--ignore-eos"]
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, start_new_session=True)
    os.close(follower)
    seen = ""

    def wait_for(text: str, since: int = 0) -> int:
        nonlocal seen
        deadline = time.monotonic() + 60
        while text not in seen[since:]:
            assert time.monotonic() < deadline, seen
            assert select.select([leader], [], [], 60)[0], seen
            seen += os.read(leader, 65536).decode(errors="replace")
        return seen.index(text, since) + len(text)

    try:
        at = wait_for("> ")
        os.write(leader, b"hello\n")
        at = wait_for("\r\n", at)
        wait_for("", at)
        while len(seen) < at + 50:  # the answer is on its way
            seen += os.read(leader, 65536).decode(errors="replace")
        os.kill(process.pid, signal.SIGINT)
        at = wait_for("tokens/s, stopped", at)
        at = wait_for("> ", at)
        while "Ctrl-D or /exit ends" not in seen[at:]:  # once may be too early: the prompt is shown before it is read
            os.kill(process.pid, signal.SIGINT)
            if select.select([leader], [], [], 0.5)[0]:
                seen += os.read(leader, 65536).decode(errors="replace")
        at = wait_for("Ctrl-D or /exit ends", at)
        at = wait_for("> ", at)
        os.write(leader, b"/set max_tokens 3\n")
        at = wait_for("max_tokens 3", wait_for("/set max_tokens 3", at))
        os.write(leader, b"a \\\nb\n")
        at = wait_for(". ", at)  # the prompt of a line that goes on
        at = wait_for("3 tokens, first after", at)
        at = wait_for("> ", at)
        os.write(leader, b"\x04")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)
