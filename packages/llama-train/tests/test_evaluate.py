from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llama_core import Llama, load_tokenizer
from llama_train import TrainConfig
from llama_train.batches import IGNORED, Batch
from llama_train.cli import main
from llama_train.data.open_sources import HeldOut
from llama_train.evaluate import ByteCount, Evaluation, evaluate
from llama_train.prepare import measuring_batches, prepare


def test_case_b30_3_every_token_counts_once(t0: Callable[..., Llama]) -> None:
    """llama-cookbook#133 (3): batches of 4, 0 and 2 labels give (sum over 6 tokens)/6."""
    model = t0()
    batches = []
    for seed, unmasked in enumerate((4, 0, 2)):
        generator = torch.Generator().manual_seed(seed)
        tokens, targets = torch.randint(0, 128, (2, 1, 8), generator=generator)
        targets[:, unmasked:] = IGNORED
        batches.append(Batch(tokens, targets))
    total = 0.0
    for batch in batches:
        log_probabilities = model.logits(model(batch.tokens)).log_softmax(-1).detach()
        for place in range(batch.count):
            total -= float(log_probabilities[0, place, batch.targets[0, place]])
    result = evaluate(model, batches)
    assert result.tokens == 6
    assert result.loss == pytest.approx(total / 6, abs=1e-5)
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(ValueError, match="no token to predict"):
        evaluate(model, batches[1:2])


def test_figures() -> None:
    result = Evaluation(math.log(64), 10)
    assert result.perplexity == pytest.approx(64)
    assert result.fraction_of_chance(4096) == pytest.approx(0.5)
    assert Evaluation(1e6, 1).perplexity == math.inf


def test_bits_per_byte_is_by_the_tokens_that_were_scored(tiny: TrainConfig, tmp_path: Path) -> None:
    """2 bits for each of 6 targets over 8 bytes are 1.5 bits per byte; the tokens of a text have its bytes, special
    tokens none, and what is masked does not count."""
    assert Evaluation(2 * math.log(2), 6, bytes=8).bits_per_byte == pytest.approx(1.5)
    assert Evaluation(1.0, 6).bits_per_byte is None
    tokenizer = load_tokenizer(prepare(tiny.data, tmp_path).tokenizer)
    count = ByteCount(tokenizer)
    texts = ["def f(x):\n    return x\n", "α → 文字 🙂"]
    rows = [[tokenizer.bos_id or 0, *tokenizer.encode(text, add_bos=False), tokenizer.eos_ids[0]] for text in texts]
    batches = [Batch(torch.tensor([row[:-1]]), torch.tensor([row[1:]])) for row in rows]
    assert [batch.targets.tolist() for batch in count.of(batches)] == [[row[1:]] for row in rows]
    assert count.bytes == sum(len(text.encode()) for text in texts)
    masked = torch.tensor([rows[0][1:]])
    masked[0, :2] = IGNORED
    spelt = sum(len(tokenizer.token_bytes(token)) for token in rows[0][1:3])
    list(count.of([Batch(batches[0].tokens, masked)]))
    assert count.bytes == len(texts[0].encode()) - spelt


def test_bytes_of_prepared_shards_are_those_of_their_headers(tiny: TrainConfig, tmp_path: Path) -> None:
    """The header's figure was counted from the texts; ours adds up the tokens of every held-out target."""
    texts = tmp_path / "texts.jsonl"
    lines = [{"text": f"{n} é {'x' * (n % 17)}\n"} for n in range(50)] + [{"prompt": "Why? ", "completion": "文."}] * 9
    texts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    tokenizer = prepare(tiny.data, tmp_path / "run").tokenizer
    assert main(["prepare", str(texts), "--tokenizer", str(tokenizer), "--output", str(tmp_path / "shards")]) == 0
    data = replace(tiny.data, sources=(str(tmp_path / "shards"),), held_out=str(tmp_path / "shards"))
    opened = prepare(data, tmp_path / "other")
    count = ByteCount(load_tokenizer(opened.tokenizer))
    list(count.of(measuring_batches(opened, data, rows=4)))
    assert isinstance(opened.held_out, HeldOut)
    assert (
        count.bytes
        == opened.held_out.tokens.bytes
        == sum(len(line.get("text", line.get("completion", "")).encode()) for line in lines)
    )
