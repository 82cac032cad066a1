"""Perplexity against the sum of log-probabilities by hand, in one window and in many; the command."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch

from llama_core import Llama, Tokenizer
from llama_infer import LLM, cli, embedded
from llama_infer.perplexity import Window, cut, measure

Save = Callable[..., Path]
TEXT = "Ünd snow ☃ fell, as it does in winter; and it fell and fell, until no one knew the road."


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((10, 4, 4, 0), [(0, 4, 0), (4, 8, 4), (8, 10, 8)]),
        ((10, 4, 2, 0), [(0, 4, 0), (2, 6, 4), (4, 8, 6), (6, 10, 8)]),
        ((9, 4, 2, 1), [(0, 4, 1), (2, 6, 4), (4, 8, 6), (6, 9, 8)]),
        ((3, 4, 1, 1), [(0, 3, 1)]),
        ((8, 4, 4, 1), [(0, 4, 1), (4, 8, 5)]),  # the first of each cannot be scored
    ],
)
def test_windows(arguments: tuple[int, int, int, int], expected: list[tuple[int, int, int]]) -> None:
    assert list(cut(*arguments)) == [Window(*each) for each in expected]


def by_hand(model: Llama, ids: list[int], begin: int, end: int, first: int, before: list[int]) -> float:
    """Nats of the tokens from `first` on, in one pass over a window."""
    window = torch.tensor([[*before, *ids[begin:end]]])
    logprobs = model.double().logits(model(window))[0].log_softmax(-1)
    model.float()
    places = range(len(before) + first - begin, window.shape[1])
    return -sum(logprobs[place - 1, window[0, place]].item() for place in places)


@pytest.mark.parametrize("bos", [True, False])
def test_equals_the_sum_by_hand(make_model: Callable[..., Llama], tokenizer: Tokenizer, bos: bool) -> None:
    model = make_model(max_position_embeddings=128)
    if not bos:
        backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        tokenizer = Tokenizer(backend, named={"eos_token": "</s>"}, add_bos=False)
    before = [tokenizer.bos_id] if bos else []
    ids = tokenizer.encode(TEXT, add_bos=False)
    llm = LLM(model, tokenizer=tokenizer, max_num_batched_tokens=32)
    assert len(ids) == len(TEXT.encode())

    whole = measure(llm, TEXT, window=127, stride=100)
    expected = by_hand(model, ids, 0, len(ids), 0 if bos else 1, before)  # type: ignore[arg-type]
    assert whole.tokens == whole.bytes == len(ids) - (0 if bos else 1)
    assert whole.nats == pytest.approx(expected, rel=1e-5)
    assert whole.perplexity == pytest.approx(math.exp(expected / whole.tokens), rel=1e-4)
    assert whole.bits_per_byte == pytest.approx(expected / math.log(2) / whole.bytes, rel=1e-5)

    size = 31 if bos else 32
    parts = measure(llm, TEXT, window=32, stride=10)
    windows = list(cut(len(ids), size, 10, 0 if bos else 1))
    expected = sum(by_hand(model, ids, w.begin, w.end, w.first, before) for w in windows)  # type: ignore[arg-type]
    assert parts.tokens == whole.tokens
    assert parts.windows == len(windows) > 3
    assert parts.nats == pytest.approx(expected, rel=1e-5)


def test_what_cannot_be_measured(make_model: Callable[..., Llama], tokenizer: Tokenizer) -> None:
    llm = LLM(make_model(), tokenizer=tokenizer)
    with pytest.raises(ValueError, match="window must be from 2 to 63, the context less 1, got 64"):
        measure(llm, TEXT, window=64)
    with pytest.raises(ValueError, match="stride must be from 1 to 62"):
        measure(llm, TEXT, window=63, stride=63)
    with pytest.raises(ValueError, match="the text has 0 tokens; at least 1 are needed"):
        measure(llm, "", window=32, stride=8)
    with pytest.raises(ValueError, match="a text needs a tokenizer"):
        measure(LLM(make_model()), TEXT, window=32, stride=8)


def test_command(save: Save, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, file = save(), tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    argv = ["eval", "ppl", "--model", str(folder), "--device", "cpu", "--text", str(file), "--window", "40"]
    assert cli.main([*argv, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    expected = measure(LLM(folder, device="cpu"), TEXT, window=40, stride=20)
    assert found["perplexity"] == pytest.approx(expected.perplexity)
    assert (found["tokens"], found["window"], found["stride"]) == (expected.tokens, 40, 20)
    assert cli.main(argv) == 0
    out = capfd.readouterr().out
    assert f"perplexity     {expected.perplexity:.4f}\n" in out
    assert f"bits per byte  {expected.bits_per_byte:.4f}\n" in out
    assert cli.main([*argv, "--quantization", "int8", "--json"]) == 0
    rounded = json.loads(capfd.readouterr().out)
    assert rounded["quantization"] == "int8"
    assert rounded["perplexity"] != found["perplexity"]
    assert rounded["perplexity"] == pytest.approx(found["perplexity"], rel=0.05)
    assert cli.main([*argv, "--max-bytes", "11", "--json"]) == 0  # in the middle of the snowman
    assert json.loads(capfd.readouterr().out)["bytes"] == len("Ünd snow ".encode())


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--stride", "0"], 2, "--stride must be at least 1, got 0"),
        (["--window", "100"], 2, "window must be from 2 to 63"),
        (["--text", "nowhere.txt"], 1, "nowhere.txt: No such file"),
        (["--text", "{bad}"], 2, "is not UTF-8 at byte 1"),
    ],
)
def test_mistakes_are_one_line(
    save: Save, tmp_path: Path, capfd: pytest.CaptureFixture[str], more: list[str], code: int, words: str
) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "bad.txt").write_bytes(b"a\xff")
    more = [word.format(bad=tmp_path / "bad.txt") for word in more]
    text = [] if "--text" in more else ["--text", str(tmp_path / "text.txt")]
    assert cli.main(["eval", "ppl", "--model", str(save()), "--device", "cpu", *text, *more]) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.skipif(embedded.find_embedded() is None, reason=f"not installed: {embedded.INSTALL}")
def test_the_embedded_model_knows_english() -> None:
    """SmolLM2 in 4 bits on a plain English sentence: far better than by chance, and worse where words are mixed."""
    llm = LLM(device="cpu", max_model_len=128)
    good = measure(llm, "The capital of France is Paris, and the capital of Italy is Rome.", 64, 32)
    bad = measure(llm, "capital France of The is the Paris capital, and Rome of Italy is the.", 64, 32)
    assert good.perplexity < 15
    assert good.bits_per_byte < 1.2
    assert bad.bits_per_byte > good.bits_per_byte + 1
