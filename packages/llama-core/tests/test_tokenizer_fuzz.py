"""Damaged tokenizer files of every kind: each loads, or is refused with one ValueError that names the file."""

from __future__ import annotations

import base64
import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from llama_core.tiktoken_file import LLAMA3_SPLIT, split_by
from llama_core.tokenizer import load_tokenizer

TEXT = "What is 3333+777? naïve café — Привет 你好 🐢 def f(x):\n    return x\n"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"


def write_json(folder: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = split_by(LLAMA3_SPLIT)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|begin|>", "<|end|>"],
        show_progress=False,
    )
    backend.train_from_iterator([TEXT] * 4, trainer)
    backend.save(str(folder / "tokenizer.json"))


def write_configurations(folder: Path) -> None:
    write_json(folder)
    files = {
        "tokenizer_config": {
            "bos_token": "<|begin|>",
            "eos_token": {"content": "<|end|>"},
            "add_bos_token": True,
            "added_tokens_decoder": {"300": {"content": "<p>", "special": True}},
            "chat_template": [{"name": "default", "template": TEMPLATE}],
        },
        "config": {"eos_token_id": 1},
        "special_tokens_map": {"pad_token": "<p>"},
    }
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


def write_gguf(folder: Path) -> None:
    import gguf

    write_json(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def write_ranks(folder: Path) -> None:
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" a", b"re"]
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    (folder / "tokenizer.model").write_bytes(b"".join(lines))


def write_sentencepiece(folder: Path) -> None:
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT] * 4),
        model_writer=written,
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(written.getvalue())


KINDS: dict[str, Callable[[Path], None]] = {
    "tokenizer.json": write_json,
    "configurations": write_configurations,
    "gguf": write_gguf,
    "rank file": write_ranks,
    "sentencepiece": write_sentencepiece,
}
VALUES = [None, True, -1, 1.5, 2**40, "", "x", "é", [], [1], [[]], {}, {"a": 1}]


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    new = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(new) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            new[at : at + 1] = rng.randbytes(1)
        elif kind == 1:
            del new[at : at + rng.randrange(1, 60)]
        elif kind == 2:
            new[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 3:  # a length or a count becomes huge, or negative
            new[at : at + 8] = rng.choice([b"\xff" * 8, b"\x00" * 8, b"\xff" * 7 + b"\x7f"])
        else:
            del new[at:]
    return bytes(new)


def mutated_json(data: bytes, rng: random.Random) -> bytes:
    """One value inside replaced or removed, so that the file stays JSON."""
    whole = value = json.loads(data)
    while True:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.8:
            value = value[key]
            continue
        if rng.random() < 0.3:
            del value[key]
        else:
            value[key] = rng.choice(VALUES)
        return json.dumps(whole).encode()


def use(folder: Path) -> None:
    """Everything a tokenizer is asked for."""
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(TEXT + "<|end|>")
    tokenizer.decode(ids)
    tokenizer.encode(TEXT + "<|end|>", parse_special=True)
    detokenizer = tokenizer.detokenizer(ids[:5])
    for token_id in ids[5:]:
        detokenizer.push(token_id)
    detokenizer.flush()
    if tokenizer.chat_templates:
        messages = [{"role": "user", "content": "<|end|>"}, {"role": "assistant", "content": "Hi"}]
        tokenizer.encode_chat_with_mask(messages)
    tokenizer.save(folder / "saved")


def fuzz(kind: str, folder: Path, count: int) -> dict[str, int]:
    rng = random.Random(kind)
    KINDS[kind](folder)
    whole = {path: path.read_bytes() for path in folder.iterdir()}
    use(folder)
    tally = {"tried": 0, "read": 0, "refused": 0}
    for _ in range(count):
        shutil.rmtree(folder / "saved", ignore_errors=True)
        for path, data in whole.items():
            path.write_bytes(data)
        path = rng.choice(list(whole))
        json_mutation = path.suffix == ".json" and rng.random() < 0.6
        path.write_bytes((mutated_json if json_mutation else mutated_bytes)(whole[path], rng))
        tally["tried"] += 1
        try:
            use(folder)
            tally["read"] += 1
        except ValueError as error:
            tally["refused"] += 1
            # once per file: a message that repeats its folder at every level is hard to read
            message = str(error)
            if str(folder) in message and message.count(str(folder)) > 1:
                pytest.fail(message)
    print(kind, tally)
    return tally


@pytest.mark.filterwarnings("ignore:going on without generation_config.json")
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files(tmp_path: Path, kind: str) -> None:
    tally = fuzz(kind, tmp_path, 60)
    assert tally["read"] + tally["refused"] == tally["tried"]
    assert tally["refused"] > 10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:going on without generation_config.json")
@pytest.mark.parametrize("kind", KINDS)
def test_two_thousand_damaged_files(tmp_path: Path, kind: str) -> None:
    tally = fuzz(kind, tmp_path, 2000)
    assert tally["read"] + tally["refused"] == tally["tried"] == 2000
