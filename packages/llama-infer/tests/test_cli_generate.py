"""`llama-infer generate`: what is printed where, for every way of giving the prompt."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_infer import LLM, SamplingParams, cli

Save = Callable[..., Path]


def run(capfd: pytest.CaptureFixture[str], model: Path, *argv: str) -> tuple[str, str]:
    assert cli.main(["generate", "--model", str(model), "--device", "cpu", *argv]) == 0
    out, err = capfd.readouterr()
    return out, err


def reply(model: Path, prompt: str, **settings: Any) -> str:
    return LLM(model, device="cpu").generate(prompt, SamplingParams(**settings))[0].text


def test_text_goes_to_standard_output_and_nothing_else(capfd: pytest.CaptureFixture[str], save: Save) -> None:
    folder = save()
    out, err = run(capfd, folder, "--prompt", "hello", "--temperature", "0", "--max-tokens", "9")
    assert out == reply(folder, "hello", temperature=0.0, max_tokens=9) + "\n"
    assert err == "llama-infer: stopped at the limit (--max-tokens, or the model's context)\n"


def test_every_sampling_flag_arrives(capfd: pytest.CaptureFixture[str], save: Save) -> None:
    folder = save()
    flags = "--temperature 0.9 --top-k 50 --top-p 0.95 --min-p 0.001 --seed 4 --max-tokens 30 --ignore-eos"
    out, _ = run(capfd, folder, "--prompt", "hello", *flags.split(), "--stop", "zzz", "--stop", "e")
    settings = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.001, "seed": 4, "max_tokens": 30}
    assert out == reply(folder, "hello", **settings, stop=("zzz", "e"), ignore_eos=True) + "\n"


@pytest.mark.parametrize(
    ("data", "prompt"), [("hello\n", "hello"), ("hello\r\n", "hello"), ("a\n\n", "a\n"), ("snow ☃", "snow ☃")]
)
def test_a_dash_reads_standard_input(
    capfd: pytest.CaptureFixture[str], save: Save, monkeypatch: pytest.MonkeyPatch, data: str, prompt: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data.encode())))
    folder = save()
    out, _ = run(capfd, folder, "--prompt", "-", "--temperature", "0", "--max-tokens", "9")
    assert out == reply(folder, prompt, temperature=0.0, max_tokens=9) + "\n"


@pytest.mark.parametrize(("data", "words"), [(b"", "the prompt is empty"), (b"ab\xff", "not UTF-8 at byte 2")])
def test_bad_standard_input_is_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, data: bytes, words: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert cli.main(["generate", "--prompt", "-"]) == 2
    assert words in capfd.readouterr().err


def test_chat_applies_the_template(capfd: pytest.CaptureFixture[str], save: Save) -> None:
    folder = save()
    argv = ["--prompt", "hi", "--chat", "--system", "be brief", "--temperature", "0", "--max-tokens", "9"]
    out, _ = run(capfd, folder, *argv)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    expected = LLM(folder, device="cpu").chat(messages, SamplingParams(temperature=0.0, max_tokens=9))[0].text
    assert out == expected + "\n"


def test_json_is_one_object(capfd: pytest.CaptureFixture[str], save: Save) -> None:
    folder = save()
    argv = ["--prompt", "hello ☃", "--json", "--temperature", "0", "--max-tokens", "9"]
    out, err = run(capfd, folder, *argv)
    output = LLM(folder, device="cpu").generate("hello ☃", SamplingParams(temperature=0.0, max_tokens=9))[0]
    assert json.loads(out) == {
        "prompt": "hello ☃",
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(output.token_ids),
    }
    assert err == ""


def test_the_models_defaults_apply_are_shown_once_and_can_be_off(capfd: pytest.CaptureFixture[str], save: Save) -> None:
    folder = save({"do_sample": False, "max_new_tokens": 5, "eos_token_id": 257})
    out, err = run(capfd, folder, "--prompt", "hello")
    assert out == reply(folder, "hello", temperature=0.0, max_tokens=5) + "\n"
    notice = "llama-infer: sampling defaults from generation_config.json: max_tokens 5, temperature 0.0\n"
    assert err.count("sampling defaults") == 1
    assert err.startswith(notice)
    _, err = run(capfd, folder, "--prompt", "hello", "--temperature", "1")
    assert "generation_config.json: max_tokens 5\n" in err  # what is explicit is no default
    out, err = run(
        capfd, folder, "--prompt", "hello", "--generation-config", "off", "--max-tokens", "9", "--top-k", "1"
    )
    assert out == reply(folder, "hello", temperature=0.0, max_tokens=9) + "\n"
    assert "sampling defaults" not in err


def test_a_prompt_longer_than_the_context_is_one_line(capfd: pytest.CaptureFixture[str], save: Save) -> None:
    argv = ["generate", "--model", str(save()), "--device", "cpu", "--prompt", "x" * 99]
    assert cli.main(argv) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "llama-infer: prompt 0 has 100 tokens; the context is 64, so a prompt may have at most 63\n"


def test_several_prompts_are_one_batch(capfd: pytest.CaptureFixture[str], save: Save) -> None:
    folder = save()
    flags = ["--temperature", "0", "--max-tokens", "5", "--ignore-eos"]
    out, _ = run(capfd, folder, "--prompt", "hello", "--prompt", "you", *flags)
    texts = [reply(folder, prompt, temperature=0.0, max_tokens=5, ignore_eos=True) for prompt in ("hello", "you")]
    assert out == "".join(text + "\n" for text in texts)
    out, _ = run(capfd, folder, "--prompt", "hello", "--prompt", "you", "--json", *flags)
    assert [json.loads(line)["text"] for line in out.splitlines()] == texts


def test_a_draft_and_a_form(capfd: pytest.CaptureFixture[str], save: Save, tmp_path: Path) -> None:
    folder = save()
    draft = folder.rename(tmp_path / "draft")
    folder = save(seed=3)
    form = ["--structured-outputs", '{"regex": "[a-z]{9}"}']
    guess = ["--draft", str(draft), "--num-speculative-tokens", "2"]
    out, err = run(capfd, folder, "--prompt", "hello", "--temperature", "0", *guess, *form)
    assert "% of the guesses were right" in err
    assert out == reply(folder, "hello", temperature=0.0, structured_outputs={"regex": "[a-z]{9}"}) + "\n"
    assert len(out) == 10
    assert cli.main(["generate", "--model", str(folder), "--prompt", "x", "--num-speculative-tokens", "2"]) == 2
    assert "num_speculative_tokens needs a draft model" in capfd.readouterr().err
