from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llama_core import Llama, load_tokenizer
from llama_train import train
from llama_train.config import EvaluationConfig, TrainConfig
from llama_train.console import Reporter
from llama_train.prepare import prepare
from llama_train.sample import sample_text


def test_a_sample_continues_the_prompt_and_follows_from_the_seed(
    tiny: TrainConfig, tmp_path: Path, t0: Callable[..., Llama]
) -> None:
    tokenizer = load_tokenizer(prepare(tiny.data, tmp_path).tokenizer)
    model = t0(vocab_size=300, bos_token_id=298, eos_token_id=299)

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        return model.logits(model(tokens))

    config = EvaluationConfig(sample_prompt="def f(", sample_tokens=12, sample_temperature=1.0)
    first = sample_text(logits, tokenizer, config, seed=1)
    assert first.startswith("def f(")
    assert first == sample_text(logits, tokenizer, config, seed=1)
    assert first != sample_text(logits, tokenizer, config, seed=2)
    # Greedy: each token is the likeliest after the begin token, the prompt and those before it.
    ids = tokenizer.encode("def f(")
    assert ids[0] == 298
    with torch.no_grad():
        for _ in range(12):
            ids.append(int(model.logits(model(torch.tensor([ids])))[0, -1].argmax()))
            if ids[-1] == 299:
                break
    greedy = sample_text(logits, tokenizer, replace(config, sample_temperature=0.0), seed=1)
    assert greedy == tokenizer.decode(ids)


def test_a_chat_prompt_without_a_chat_template_is_told_before_the_first_step(
    tiny: TrainConfig, recorder: Callable[[], Reporter]
) -> None:
    evaluation = EvaluationConfig(sample_tokens=4, sample_chat=True)
    with pytest.raises(ValueError, match=r"evaluation\.sample_chat is true: this tokenizer has no"):
        train(replace(tiny, evaluation=evaluation), recorder())
    assert not list(Path(str(tiny.folder)).glob("checkpoints/step-*"))
    metrics = Path(str(tiny.folder)) / "metrics.jsonl"
    assert not metrics.exists() or not metrics.read_text(encoding="utf-8")
