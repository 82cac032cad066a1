"""Meta's `tokenizer.model`: Llama 3's rank file against tiktoken, Llama 2's model file against sentencepiece."""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from llama_core.byte_level import text_to_bytes
from llama_core.meta_tokenizer import special_tokens
from llama_core.sentencepiece_file import parse_sentencepiece
from llama_core.tiktoken_file import LLAMA3_SPLIT, merges_from_ranks, split_by
from llama_core.tokenizer import load_tokenizer

TEXTS = [
    "What is 3333+777? It's 3.14159, isn't it? I'LL see.",
    "def f(x):\r\n    return {\n        'a': [1, 2],\n    }\n\n\n\tif x: pass",
    "naïve café — “quotes” ﬁ ß; combining: e\u0301; zero\u200bwidth\u200dmarks\ufeff",
    "Привет, мир! Ελληνικά. שלום مرحبا こんにちは世界。한국어 नमस्ते สวัสดี",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 🐢 a�b \x00\x7f\x80 \U0010fffd",
    "   leading and trailing   ",
    "x" * 300 + "ab" * 150 + " " * 40 + "é" * 300,
]
NO_CODE = "".join(TEXTS).replace("\x00", "")


def odd_texts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    scrambled = ["".join(rng.choices(NO_CODE, k=rng.randrange(60))) for _ in range(count)]
    return [text + rng.choice("aé x▁\n") * rng.choice([0, 1, 2, 5, 301]) for text in scrambled]


# --- Llama 3


@pytest.fixture(scope="module")
def tokens() -> list[bytes]:
    """500 tokens in the order of their ranks, as training makes them."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = split_by(LLAMA3_SPLIT)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXTS * 4, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    vocab = json.loads(backend.to_str())["model"]["vocab"]
    return [text_to_bytes(token) for token in sorted(vocab, key=vocab.get)]


def write_ranks(folder: Path, tokens: list[bytes]) -> Path:
    path = folder / "tokenizer.model"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return path


def test_ranks_equal_tiktoken(tmp_path: Path, tokens: list[bytes]) -> None:
    import tiktoken

    # a token that merging never reaches: only as a piece of its own is it one token
    unreachable = [*tokens, b"zzqjx"]
    ranks = {token: rank for rank, token in enumerate(unreachable)}
    oracle = tiktoken.Encoding("test", pat_str=LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens={})
    ours = load_tokenizer(write_ranks(tmp_path, unreachable))
    for text in [*TEXTS, *odd_texts(1, 500), "zzqjx azzqjx"]:
        ids = ours.encode(text, add_bos=False)
        assert ids == oracle.encode_ordinary(text), text
        assert ours.decode(ids) == text
    assert ours.encode("zzqjx", add_bos=False) == [ranks[b"zzqjx"]]
    rng = random.Random(2)
    for _ in range(200):  # ids at random: bytes that are no characters
        ids = rng.choices(range(len(ranks)), k=8)
        assert ours.decode(ids) == oracle.decode(ids)


def test_every_way_to_cut_a_token() -> None:
    tokens = [b"a", b"b", b"ab", b"ba", b"aba"]
    assert merges_from_ranks(tokens) == [(b"a", b"b"), (b"b", b"a"), (b"a", b"ba"), (b"ab", b"a")]


def test_llama3_special_tokens(tmp_path: Path, tokens: list[bytes]) -> None:
    path, first = write_ranks(tmp_path, tokens), len(tokens)
    for params, pad, eom in (({"use_scaled_rope": True}, 4, "<|eom_id|>"), ({}, None, "<|reserved_special_token_4|>")):
        (tmp_path / "params.json").write_text(json.dumps(params))
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer.vocab_size == first + 256
        assert tokenizer.bos_id == tokenizer.token_to_id("<|begin_of_text|>") == first
        assert tokenizer.pad_id == (None if pad is None else first + pad)
        assert tokenizer.id_to_token(first + 8) == eom
        assert [tokenizer.token_to_id(f"<|{name}|>") for name in ("start_header_id", "end_header_id", "eot_id")] == [
            first + 6,
            first + 7,
            first + 9,
        ]
        assert tokenizer.eos_ids == ((first + 1, first + 8, first + 9) if pad else (first + 1, first + 9))
        assert tokenizer.encode("Hi")[0] == first
        assert first + 9 not in tokenizer.encode("<|eot_id|>")
    (tmp_path / "params.json").unlink()
    assert load_tokenizer(path).id_to_token(first + 10) == "<|python_tag|>"


def test_special_token_names() -> None:
    for llama31, last in ((False, 250), (True, 246)):
        names = special_tokens(llama31)
        assert len(set(names)) == 256
        assert names[-1] == f"<|reserved_special_token_{last}|>"
        assert (names[0], names[1], names[6], names[7], names[9]) == (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
        )


def test_llama3_chat_has_metas_layout(tmp_path: Path, tokens: list[bytes]) -> None:
    """`ChatFormat.encode_dialog_prompt`, spelled out: header and stripped text are encoded apart."""
    tokenizer = load_tokenizer(write_ranks(tmp_path, tokens))
    first = len(tokens)
    messages = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "\n\nHi <|eot_id|>"}]

    def text(value: str) -> list[int]:
        return tokenizer.encode(value, add_bos=False)

    expected = [first]
    for message in messages:
        expected += [first + 6, *text(message["role"]), first + 7, *text("\n\n")]
        expected += [*text(message["content"].strip()), first + 9]
    expected += [first + 6, *text("assistant"), first + 7, *text("\n\n")]
    assert tokenizer.encode_chat(messages) == expected
    ids, mask = tokenizer.encode_chat_with_mask([*messages, {"role": "assistant", "content": "Yes"}])
    assert [i for i, masked in zip(ids, mask) if masked] == [*text("Yes"), first + 9]


def test_saving_makes_a_hugging_face_folder(tmp_path: Path, tokens: list[bytes]) -> None:
    import transformers

    tokenizer = load_tokenizer(write_ranks(tmp_path, tokens))
    tokenizer.save(tmp_path / "hf")
    again = load_tokenizer(tmp_path / "hf")
    assert again.fingerprint == tokenizer.fingerprint
    assert set(again.eos_ids) == set(tokenizer.eos_ids)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in TEXTS:
        assert theirs(text)["input_ids"] == tokenizer.encode(text) == again.encode(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:300], b"!!! 300", *lines[301:]], r"line 301: b'!!! 300' is not base64"),
        (lambda lines: [*lines[:300], b"eHl6 x", *lines[301:]], r"line 301: .* is not a token in base64 and its rank"),
        (lambda lines: [*lines, lines[5].split()[0] + b" 500"], "line 501: the token .* stands twice"),
        (lambda lines: lines[:400] + lines[401:], "ranks must be 0 to 498, each once; rank 400 is missing"),
        (lambda lines: [*lines, b"eHl6eHl6 7"], "ranks must be 0 to 500, each once"),
        (lambda lines: [b"%s %d" % (line.split()[0], i) for i, line in enumerate(lines[1:])], "no token for byte 0x21"),
        (lambda lines: [*lines, b"eHl6 99999999999"], "is not a token in base64 and its rank"),
    ],
)
def test_damaged_rank_files(tmp_path: Path, tokens: list[bytes], change: Any, message: str) -> None:
    path = write_ranks(tmp_path, tokens)
    path.write_bytes(b"\n".join(change(path.read_bytes().splitlines())))
    with pytest.raises(ValueError, match=message):
        load_tokenizer(path)


# --- Llama 2


def sentencepiece_model(**changes: Any) -> bytes:
    """A model trained with Llama 2's settings."""
    import sentencepiece

    written = io.BytesIO()
    settings = {
        "vocab_size": 450,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "character_coverage": 0.98,
        "minloglevel": 2,
        **changes,
    }
    lines = iter([text for text in NO_CODE.splitlines() if text.strip()] * 4)
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=written, **settings)
    return written.getvalue()


def test_llama2_equals_sentencepiece(tmp_path: Path) -> None:
    data = sentencepiece_model()
    import sentencepiece

    oracle = sentencepiece.SentencePieceProcessor(model_proto=data)
    (tmp_path / "tokenizer.model").write_bytes(data)
    ours = load_tokenizer(tmp_path)
    assert (ours.vocab_size, ours.bos_id, ours.eos_ids, ours.adds_bos) == (len(oracle), 1, (2,), True)
    for text in [text.replace("\x00", "") for text in TEXTS] + odd_texts(3, 500) + ["", " ", "▁", "<s> </s> <0x41>"]:
        expected = oracle.encode(text)
        assert ours.encode(text, add_bos=False) == expected, text
        assert ours.decode(expected) == oracle.decode(expected) == text.replace("▁", " ")
    rng = random.Random(4)
    for _ in range(200):
        ids = rng.choices(range(259, len(oracle)), k=8)
        assert ours.decode(ids) == oracle.decode(ids)
        detokenizer = ours.detokenizer(ids[:3])
        chunks = "".join(detokenizer.push(i) for i in ids[3:]) + detokenizer.flush()
        assert ours.decode(ids[:3]) + chunks == oracle.decode(ids)


def test_llama2_chat_has_metas_layout(tmp_path: Path) -> None:
    """`chat_completion` of Meta's generation.py: each pair of turns is encoded by itself, between BOS and EOS."""
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model())
    tokenizer = load_tokenizer(tmp_path)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi "},
        {"role": "assistant", "content": " Hello. </s>"},
        {"role": "user", "content": "Bye"},
    ]
    first = "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello. </s> "
    expected = [
        1,
        *tokenizer.encode(first, add_bos=False),
        2,
        1,
        *tokenizer.encode("[INST] Bye [/INST]", add_bos=False),
    ]
    assert tokenizer.encode_chat(messages) == expected
    ids, mask = tokenizer.encode_chat_with_mask(messages[:3])
    assert (
        tokenizer.decode([i for i, masked in zip(ids, mask) if masked], skip_special=False).strip()
        == "Hello. </s> </s>"
    )
    with pytest.raises(ValueError, match="roles must alternate"):
        tokenizer.encode_chat([messages[1], messages[3]])


def test_a_folder_from_before_tokenizer_json(tmp_path: Path) -> None:
    data = sentencepiece_model()
    (tmp_path / "tokenizer.model").write_bytes(data)
    config = {"bos_token": "<s>", "chat_template": "C", "pad_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_ids, tokenizer.pad_id, tokenizer.adds_bos) == ((2, 5), 0, True)
    assert tokenizer.chat_templates == {"default": "C"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": False}))
    assert not load_tokenizer(tmp_path).adds_bos


def test_the_tokenizer_above_a_folder_of_weights(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model())
    weights = tmp_path / "llama-2-7b"
    weights.mkdir()
    with pytest.raises(ValueError, match="no tokenizer found"):
        load_tokenizer(weights)
    (weights / "params.json").write_text("{}")
    assert load_tokenizer(weights).bos_id == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "unigram", "hard_vocab_limit": False}, r"model type 1, only BPE \(2\) is read"),
        ({"normalization_rule_name": "nmt_nfkc"}, "a normalizer with a character map"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
    ],
)
def test_settings_that_would_change_ids(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(**changes))
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)


def test_mutated_model_files_are_value_errors(tmp_path: Path) -> None:
    """Bytes cut, changed and put in: a tokenizer or one ValueError that names the file, never anything else."""
    rng = random.Random(0)
    data = sentencepiece_model()
    path = tmp_path / "tokenizer.model"
    refused: list[str] = []
    for _ in range(300):
        mutated = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(mutated))
            kind = rng.randrange(3)
            if kind == 0:
                mutated[at] = rng.randrange(256)
            elif kind == 1:
                del mutated[at : at + rng.randrange(1, 50)]
            else:
                mutated[at:at] = rng.randbytes(rng.randrange(1, 20))
        path.write_bytes(bytes(mutated[: rng.randrange(len(mutated))] if rng.random() < 0.2 else mutated))
        try:
            load_tokenizer(path)
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all("tokenizer.model" in message for message in refused)
    for content in (b"", b"\n", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"PK\x03\x04", b"\x80\x04"):
        with pytest.raises(ValueError, match="neither a tiktoken rank file nor a SentencePiece model"):
            parse_sentencepiece(content, path)
