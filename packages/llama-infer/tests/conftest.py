"""A tiny model and a tokenizer of bytes: everything but the meaning of the text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from llama_core import Llama, LlamaConfig, Tokenizer, save_model

torch.set_num_threads(1)  # the matrices are tiny; on a busy machine threads would only wait for each other

BOS, EOS, TURN = 256, 257, 258
VOCAB = 272
"""256 bytes, 3 special tokens, and rows of padding that no token has."""
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
)


def _make_model(seed: int = 0, **changes: object) -> Llama:
    """T0 with a vocabulary for bytes. Weights have standard deviation 0.2: small ones make all logits alike."""
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        **changes,
    }
    model = Llama(LlamaConfig(**shape)).eval().requires_grad_(False)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(0, 0.2, generator=generator)
    return model


def _make_tokenizer() -> Tokenizer:
    alphabet = [chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))]
    alphabet += [chr(256 + i) for i in range(256 - len(alphabet))]  # GPT-2's letters for the other bytes
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(alphabet))}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", "<turn>")])
    return Tokenizer(
        backend,
        named={"bos_token": "<s>", "eos_token": "</s>"},
        add_bos=True,
        chat_templates={"default": TEMPLATE},
    )


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Llama]:
    return _make_model


@pytest.fixture(scope="session")
def model() -> Llama:
    return _make_model()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return _make_tokenizer()


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Writes the tiny model with its tokenizer as a Hugging Face folder; keyword: its generation_config.json."""

    def write(generation_config: dict[str, object] | str | None = None, **changes: object) -> Path:
        folder = tmp_path / "model"
        save_model(_make_model(**changes), folder, format="hf")  # type: ignore[arg-type]
        _make_tokenizer().save(folder)
        if generation_config is not None:
            text = generation_config if isinstance(generation_config, str) else json.dumps(generation_config)
            (folder / "generation_config.json").write_text(text, encoding="utf-8")
        return folder

    return write
