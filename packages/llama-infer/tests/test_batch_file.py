"""JSON lines to JSON lines: every line its own, nothing half written, killed at any moment it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_infer import LLM, SamplingParams, cli
from llama_infer.batch_file import journal_path, open_journal, read_tasks

Save = Callable[..., Path]
FLAGS = ["--device", "cpu", "--temperature", "0", "--max-tokens", "6"]


def write(path: Path, lines: list[Any]) -> Path:
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return path


def start(folder: Path, source: Path, output: Path | None, *more: str) -> int:
    out = [] if output is None else ["--output", str(output)]
    return cli.main(["generate", "--model", str(folder), "--input", str(source), *out, *FLAGS, *more])


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_line_has_its_own_settings(save: Save, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = save(max_position_embeddings=128)
    chat = [{"role": "user", "content": "hi"}]
    lines: list[Any] = [
        {"prompt": "hello ☃", "id": "first"},
        {"prompt": "abc", "max_tokens": 3, "temperature": 1.0, "seed": 5},
        {"messages": chat, "id": 2},
        {"prompt_token_ids": [1, 2, 3], "n": 2, "temperature": 0.7, "seed": 1, "logprobs": 1},
        b"",
        {"prompt": "abc", "stop": ["a", "e"], "logit_bias": {"97": 5}, "max_tokens": 9},
        {"prompt": "abc", "structured_outputs": {"choice": ["yes", "no"]}},
    ]
    out = tmp_path / "new folder" / "out.jsonl"
    assert start(folder, write(tmp_path / "in.jsonl", lines), out) == 0
    llm = LLM(folder, device="cpu")
    found = results(out)
    assert [result["line"] for result in found] == [1, 2, 3, 4, 6, 7]
    assert [result.get("id") for result in found] == ["first", None, 2, None, None, None]
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    expected = [
        llm.generate("hello ☃", greedy)[0],
        llm.generate("abc", SamplingParams(temperature=1.0, seed=5, max_tokens=3))[0],
        llm.chat(chat, greedy)[0],
        llm.generate([1, 2, 3], SamplingParams(n=2, temperature=0.7, seed=1, max_tokens=6))[0],
        llm.generate("abc", SamplingParams(temperature=0, stop=("a", "e"), logit_bias={97: 5}, max_tokens=9))[0],
        llm.generate("abc", SamplingParams(temperature=0, structured_outputs={"choice": ["yes", "no"]}))[0],
    ]
    for result, output in zip(found, expected, strict=True):
        samples = result.get("samples", [result])
        assert [sample["text"] for sample in samples] == [sample.text for sample in output.samples]
        assert [sample["finish_reason"] for sample in samples] == [sample.finish_reason for sample in output.samples]
        assert result["prompt_tokens"] == len(output.prompt_token_ids)
        assert samples[0]["completion_tokens"] == len(output.token_ids)
    assert found[0]["prompt"] == "hello ☃"
    assert found[2]["messages"] == chat
    assert str(found[3]["samples"][0]["token_ids"][0]) in found[3]["samples"][0]["logprobs"][0]
    assert os.listdir(out.parent) == ["out.jsonl"]
    assert capfd.readouterr().out == ""


WRONG: list[tuple[Any, str]] = [
    (b"{", "no JSON: Expecting property name"),
    (b"\xff{}", "not UTF-8 at byte 0"),
    (b"[1]", "a JSON object is wanted, got [1]"),
    (b"[" * 100_000, ""),
    ({}, "one of prompt, messages, prompt_token_ids is wanted, got none of them"),
    ({"prompt": "a", "messages": []}, "is wanted, got prompt, messages"),
    ({"prompt": 3}, "prompt must be a text, got 3"),
    ({"prompt_token_ids": "a"}, 'prompt_token_ids must be a list, got "a"'),
    ({"messages": []}, "messages is empty"),
    ({"messages": ["a"]}, "messages must be a list of objects"),
    ({"prompt": ""}, "is empty; at least 1 token is needed"),
    ({"prompt_token_ids": []}, "is empty; at least 1 token is needed"),
    ({"prompt_token_ids": [5, 259]}, "holds 259; token ids are Python integers from 0 to 258"),
    ({"prompt_token_ids": [True]}, "holds True"),
    ({"prompt": "x" * 200}, "201 tokens; the context is 64, so a prompt may have at most 63"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ({"prompt": "a", "temperature": -1}, "temperature must be a finite number of at least 0, got -1"),
    ({"prompt": "a", "temperature": "warm"}, "temperature must be a finite number of at least 0, got 'warm'"),
    ({"prompt": "a", "top_k": 1.5}, "top_k must be"),
    ({"prompt": "a", "temprature": 1}, "no sampling setting 'temprature'"),
    ({"prompt": "a", "stop_token_ids": [999]}, "stop_token_ids hold 999"),
    ({"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias"),
    ({"prompt": "a", "structured_outputs": {"regex": "("}}, "unclosed group"),
    ({"prompt": "a\ud800"}, "surrogate"),
]


def test_a_bad_line_is_named_and_the_others_are_done(
    save: Save, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good = {"prompt": "hello"}
    lines = [good]
    for line, _ in WRONG:
        lines += [line, good]
    out, source = tmp_path / "out.jsonl", write(tmp_path / "in.jsonl", lines)
    folder = save()
    # The byte-level tokenizer adds BOS to an empty text; without it the prompt is empty.
    assert start(folder, source, out) == 2
    found = results(out)
    assert [result["line"] for result in found] == list(range(1, len(lines) + 1))
    text = LLM(folder, device="cpu").generate("hello", SamplingParams(temperature=0.0, max_tokens=6))[0].text
    errors = 0
    err = capfd.readouterr().err
    for index, result in enumerate(found):
        if index % 2 == 0:
            assert result["text"] == text
            continue
        line, words = WRONG[index // 2]
        if line == {"prompt": ""}:  # BOS alone is a prompt
            assert "text" in result
            continue
        errors += 1
        assert words in result["error"], (line, result["error"])
        assert f"llama-infer: {source}, line {index + 1}: {result['error']}" in err
    assert err.endswith(f"llama-infer: {errors} of {len(lines)} lines have errors\n")
    assert "Traceback" not in err
    assert start(folder, source, out) == 2  # complete, and as wrong as before
    assert "is complete" in capfd.readouterr().err


def test_started_again_it_goes_on(save: Save, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = save()
    lines = [{"prompt": f"p{i}"} for i in range(6)]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert start(folder, source, tmp_path / "whole.jsonl") == 0
    whole = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    # Killed while the third result was being written; and a line of damage before.
    journal_path(out).write_bytes(whole[4] + b"\x00garbage\n" + whole[1] + whole[2][:20])
    assert start(folder, source, out) == 0
    assert "2 of 6 were done before" in capfd.readouterr().err
    assert out.read_bytes().splitlines(keepends=True) == whole
    assert not journal_path(out).exists()
    before = out.stat().st_mtime_ns
    assert start(folder, source, out) == 0  # nothing more to do, and no model is loaded
    assert "is complete" in capfd.readouterr().err
    assert out.stat().st_mtime_ns == before


def test_only_what_has_changed_is_done_anew(save: Save, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = save()
    source, out = write(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}]), tmp_path / "out.jsonl"
    assert start(folder, source, out) == 0
    os.rename(out, journal_path(out))
    write(source, [{"prompt": "a"}, {"prompt": "c"}, {"prompt": "d"}])
    assert start(folder, source, out) == 0
    assert "1 of 3 were done before" in capfd.readouterr().err
    assert [result["prompt"] for result in results(out)] == ["a", "c", "d"]
    text = out.read_bytes()
    assert start(folder, source, out, "--seed", "4") == 2  # other settings
    assert "out.jsonl exists, and not from this input, model and settings" in capfd.readouterr().err
    assert out.read_bytes() == text


def test_two_processes_do_not_write_one_journal(save: Save, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, out = write(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    with open_journal(out):
        assert start(save(), source, out) == 2
    assert "is being written by another process" in capfd.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="kills")
def test_killed_and_started_again(save: Save, tmp_path: Path) -> None:
    folder = save(max_position_embeddings=512)
    lines = [{"prompt": f"p{i}", "max_tokens": 20 + i % 7, "ignore_eos": True} for i in range(150)]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "llama_infer", "generate", "--model", str(folder), "--input", str(source)]
    command += ["--output", str(out), *FLAGS, "--max-num-seqs", "4"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not (journal_path(out).exists() and journal_path(out).stat().st_size > 2000):
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    kept = len(journal_path(out).read_bytes().splitlines())
    assert 0 < kept < 150
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "of 150 were done before" in done.stderr
    assert [result["line"] for result in results(out)] == list(range(1, 151))
    llm = LLM(folder, device="cpu")
    params = [
        SamplingParams(temperature=0.0, max_tokens=line["max_tokens"], ignore_eos=True)  # type: ignore[arg-type]
        for line in lines
    ]
    outputs = llm.generate([str(line["prompt"]) for line in lines], params)
    assert [result["token_ids"] for result in results(out)] == [output.token_ids for output in outputs]


def test_without_an_output_results_are_printed(save: Save, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "a", "max_tokens": 9}, {"prompt": "b", "max_tokens": 2}])
    assert start(save(), source, None) == 0
    found = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert sorted(result["line"] for result in found) == [1, 2]


def test_an_input_without_lines(save: Save, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = save()
    assert start(folder, write(tmp_path / "in.jsonl", [b"", b" "]), None) == 2
    assert "has no lines" in capfd.readouterr().err
    assert start(folder, tmp_path / "nowhere.jsonl", None) == 1
    assert "nowhere.jsonl: No such file" in capfd.readouterr().err


def test_a_byte_order_mark_is_no_text() -> None:
    (task,) = read_tasks([b'\xef\xbb\xbf{"prompt": "a"}\r\n'], {})
    assert task.error is None
    assert task.fields == {"prompt": "a"}
