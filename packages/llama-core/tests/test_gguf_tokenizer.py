"""The tokenizer inside a GGUF file. Case B17 stands here for its three sources: rank file, tokenizer.json, GGUF."""

from __future__ import annotations

import base64
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from llama_core.byte_level import text_to_bytes
from llama_core.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf
from llama_core.sentencepiece_bpe import sentencepiece_bpe
from llama_core.tiktoken_file import LLAMA3_SPLIT, split_by
from llama_core.tokenizer import Tokenizer, load_tokenizer

# case B17, word for word
PIECES = {
    "What is 3333+777?": ["What", " is", " ", "333", "3", "+", "777", "?"],
    "1234567": ["123", "456", "7"],
    "12 345": ["12", " ", "345"],
    "3.14159": ["3", ".", "141", "59"],
    "a1b22": ["a", "1", "b", "22"],
    "x\n\n  y": ["x", "\n\n", " ", " y"],
}
CORPUS = [*PIECES, "def f(x):\n    return x * 100 + 1234\n", "What is it? It's 3333 or 777.", "día 你好 🐢 año"] * 4
CHAT = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"


def trained(pattern: str = LLAMA3_SPLIT) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    backend.pre_tokenizer = split_by(pattern)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def gguf_of(backend: tokenizers.Tokenizer, **changes: Any) -> dict[str, Any]:
    """The metadata llama.cpp's converter writes for a byte-level BPE tokenizer; a change to None removes a key."""
    model = json.loads(backend.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    first = len(tokens) - 3
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * first + [3] * 3,
        "tokenizer.ggml.merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": first + 1,
    }
    metadata |= {f"tokenizer.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3] + [6] * 256
    words = ["▁a", "▁t", "he", "▁the", "▁▁", "▁", "a", "t", "h", "e", "<", "s", ">", "s>"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + words,
        "tokenizer.ggml.scores": [0.0] * len(pieces) + [-float(i) for i in range(len(words))],
        "tokenizer.ggml.token_type": types + [1] * len(words),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    metadata |= {f"tokenizer.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


# --- case B17


def three_sources(tmp_path: Path) -> dict[str, Tokenizer]:
    backend = trained()
    vocab = json.loads(backend.to_str())["model"]["vocab"]
    ranks = [text_to_bytes(token) for token in sorted(vocab, key=vocab.get)]
    (tmp_path / "tokenizer.model").write_bytes(
        b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks))
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    return {
        "rank file": load_tokenizer(tmp_path / "tokenizer.model"),
        "tokenizer.json": load_tokenizer(tmp_path / "tokenizer.json"),
        "gguf": tokenizer_from_gguf(gguf_of(backend)),
    }


def test_b17_pieces() -> None:
    for name in ("llama-bpe", "llama3", "llama-v3", "smaug-bpe"):
        tokenizer = tokenizer_from_gguf(gguf_of(trained(), **{"ggml.pre": name}))
        split = tokenizers.Tokenizer.from_str(tokenizer.to_json()).pre_tokenizer
        for text, expected in PIECES.items():
            assert [text_to_bytes(piece).decode() for piece, _ in split.pre_tokenize_str(text)] == expected


def test_b17_ids_of_three_sources_agree(tmp_path: Path) -> None:
    sources = three_sources(tmp_path)
    rng = random.Random(0)
    scrambled = ["".join(rng.choices("".join(CORPUS) + "0123456789", k=40)) for _ in range(300)]
    for text in [*PIECES, *scrambled]:
        ids = [tokenizer.encode(text, add_bos=False) for tokenizer in sources.values()]
        assert ids[0] == ids[1] == ids[2], text
        assert {tokenizer.decode(ids[0]) for tokenizer in sources.values()} == {text}
    for name, tokenizer in sources.items():
        pieces = [[tokenizer.token_bytes(i).decode() for i in tokenizer.encode(t, add_bos=False)] for t in PIECES]
        for found, expected in zip(pieces, PIECES.values()):
            # tokens never cross a border between pieces
            assert "".join(found) == "".join(expected), name
            borders = {len("".join(expected[:i])) for i in range(len(expected))}
            assert borders <= {len("".join(found[:i])) for i in range(len(found))}, (name, found, expected)


def test_digits_stand_alone_in_smollm() -> None:
    tokenizer = tokenizer_from_gguf(gguf_of(trained(), **{"ggml.pre": "smollm"}))
    split = tokenizers.Tokenizer.from_str(tokenizer.to_json()).pre_tokenizer
    pieces = [text_to_bytes(piece).decode() for piece, _ in split.pre_tokenize_str("a12 345, it's ½٣  x")]
    assert pieces == ["a", "1", "2", " ", "3", "4", "5", ",", " it", "'s", " ", "½", "٣", " ", " x"]
    gpt2 = tokenizer_from_gguf(gguf_of(trained(), **{"ggml.pre": "gpt-2"}))
    split = tokenizers.Tokenizer.from_str(gpt2.to_json()).pre_tokenizer
    assert [text_to_bytes(piece).decode() for piece, _ in split.pre_tokenize_str("a12 345")] == ["a", "12", " 345"]


# --- byte-level files


def test_special_tokens_and_ends() -> None:
    metadata = gguf_of(trained(), chat_template=CHAT, **{"chat_template.rag": "R", "ggml.eom_token_id": 5})
    tokenizer = tokenizer_from_gguf(metadata)
    first = tokenizer.vocab_size - 3
    assert (tokenizer.bos_id, tokenizer.eos_id) == (first, first + 1)
    assert tokenizer.eos_ids == (first + 1, 5, first + 2)  # the file names two; a turn of Llama 3 ends with <|eot_id|>
    assert tokenizer.chat_templates == {"default": CHAT, "rag": "R"}
    assert tokenizer.encode("<|eot_id|>", add_bos=False, parse_special=True) == [first + 2]
    assert first + 2 not in tokenizer.encode("<|eot_id|>")
    assert tokenizer.decode([first, first + 2]) == ""


@pytest.mark.parametrize(("name", "adds"), [("llama-bpe", True), ("smollm", False), ("gpt-2", False)])
def test_bos_by_flag_or_by_kind(name: str, adds: bool) -> None:
    assert tokenizer_from_gguf(gguf_of(trained(), **{"ggml.pre": name})).adds_bos is adds
    for flag in (True, False):
        metadata = gguf_of(trained(), **{"ggml.pre": name, "ggml.add_bos_token": flag})
        assert tokenizer_from_gguf(metadata).adds_bos is flag
    assert not tokenizer_from_gguf(gguf_of(trained(), **{"ggml.pre": name, "ggml.bos_token_id": None})).adds_bos


def test_user_defined_tokens_are_found_in_text() -> None:
    metadata = gguf_of(trained())
    metadata["tokenizer.ggml.tokens"][-1] = " raw token"
    metadata["tokenizer.ggml.token_type"][-1] = 4
    tokenizer = tokenizer_from_gguf(metadata)
    ids = tokenizer.encode("a raw token", add_bos=False)
    assert ids == [tokenizer.token_to_id("a"), tokenizer.vocab_size - 1]
    assert tokenizer.decode(ids) == "a raw token"


def test_the_first_of_equal_tokens_counts() -> None:
    metadata = gguf_of(trained())
    metadata["tokenizer.ggml.tokens"] += ["<|eot_id|>", "a"]
    metadata["tokenizer.ggml.token_type"] += [3, 1]
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.encode("a", add_bos=False) == [metadata["tokenizer.ggml.tokens"].index("a")]


def test_a_written_file(tmp_path: Path) -> None:
    """Through the gguf package's writer and our reader."""
    import gguf

    metadata = gguf_of(trained(), chat_template=CHAT)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(metadata["tokenizer.ggml.pre"])
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(metadata["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(metadata["tokenizer.ggml.eos_token_id"])
    writer.add_chat_template(CHAT)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    expected = tokenizer_from_gguf(metadata)
    for path in (tmp_path / "model.gguf", tmp_path):  # the file, or a folder with one
        tokenizer = load_tokenizer(path)
        assert tokenizer.fingerprint == expected.fingerprint
        assert tokenizer.chat_templates == {"default": CHAT}
    (tmp_path / "model.gguf").write_bytes((tmp_path / "model.gguf").read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model\.gguf"):
        load_tokenizer(tmp_path)


# --- SentencePiece files


def test_sentencepiece_kind() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata())
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (1, (2,), True)

    def tokens(text: str) -> list[str | None]:
        return [tokenizer.id_to_token(i) for i in tokenizer.encode(text)]

    assert tokens("the  a") == ["<s>", "▁the", "▁", "▁a"]
    assert tokens(" é") == ["<s>", "▁▁", "<0xC3>", "<0xA9>"]
    assert tokens("\n") == ["<s>", "▁", "<0x0A>"]
    for text in ("", " ", "the  a", " é\n", "你好 🐢", "e" * 300):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    bare = tokenizer_from_gguf(sentencepiece_metadata(**{"ggml.add_space_prefix": False, "ggml.add_bos_token": False}))
    assert [bare.id_to_token(i) for i in bare.encode("the a")] == ["t", "he", "▁a"]
    assert bare.decode(bare.encode(" the a")) == " the a"


def test_text_is_never_merged_to_a_control_piece() -> None:
    """`<`, `s>` and `<s>` are all pieces, and `<s>` has the best score of all."""
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata())
    tokens = [tokenizer.id_to_token(i) for i in tokenizer.encode("<s>", add_bos=False)]
    assert tokens == ["▁", "<", "s>"]
    assert tokenizer.encode("<s>", add_bos=False, parse_special=True) == [1]
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("<0x41>", add_bos=False)][:2] == ["▁", "<"]


def test_merges_prefer_the_best_score_then_the_left() -> None:
    """Against SentencePiece's own rule, written down plainly: join the pair with the best score, leftmost first."""
    letters = ["a", "b", "▁"]
    rng = random.Random(3)
    for _ in range(40):
        pieces = list(letters)
        while len(pieces) < 14:  # as training makes them: each new piece joins two older ones
            piece = rng.choice(pieces) + rng.choice(pieces)
            if piece not in pieces and len(piece) < 9:
                pieces.append(piece)
        scores = [-float(i) for i in range(len(pieces))]
        backend = sentencepiece_bpe(pieces, scores, None, [True] * len(pieces), prefix_space=False)
        score_of = dict(zip(pieces, scores))
        for _ in range(60):
            text = "".join(rng.choices("ab ", weights=(5, 3, 1), k=rng.randrange(1, 30)))
            expected = list(text.replace(" ", "▁"))
            while True:
                joins = [
                    (-score_of[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(expected)) if a + b in score_of
                ]
                if not joins:
                    break
                at = min(joins)[1]
                expected[at : at + 2] = [expected[at] + expected[at + 1]]
            assert backend.encode(text, add_special_tokens=False).tokens == expected, (pieces, text)


# --- what is wrong is said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml.pre": "spiral"}, "pre-tokenizer 'spiral' is not known.*llama-bpe.*smollm.*gpt-2.*default"),
        ({"ggml.model": "t5"}, "kind 't5' is not known; known kinds are 'gpt2' and 'llama'"),
        ({"ggml.model": None}, "holds no tokenizer"),
        ({"ggml.tokens": None}, "holds no tokenizer"),
        ({"ggml.tokens": []}, "holds no tokenizer"),
        ({"ggml.tokens": "abc"}, "tokens must be list, got str"),
        ({"ggml.tokens": ["a", 5]}, r"tokens\[1\] is 5, a int"),
        ({"ggml.merges": None}, "has no tokenizer.ggml.merges"),
        ({"ggml.merges": ["a b c"]}, r"merges\[0\] is 'a b c', which does not join two tokens"),
        ({"ggml.merges": ["ab"]}, r"merges\[0\] is 'ab', which does not join"),
        ({"ggml.token_type": [1]}, r"token_type has 1 entries for \d+ tokens"),
        ({"ggml.bos_token_id": 99999}, r"bos_token_id is 99999; allowed are 0 to \d+"),
        ({"ggml.eos_token_id": -1}, r"eos_token_id is -1; allowed are 0"),
        ({"ggml.eot_token_id": 99999}, "99999"),
        ({"ggml.eos_token_id": "x"}, "eos_token_id must be int, got str"),
        ({"ggml.add_bos_token": 1}, "add_bos_token must be bool, got int"),
        ({"chat_template": 5}, "chat_template must be str, got int"),
    ],
)
def test_wrong_metadata_is_a_value_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokenizer_from_gguf(gguf_of(trained(), **changes))


def test_wrong_sentencepiece_metadata_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="has no tokenizer"):
        tokenizer_from_gguf(sentencepiece_metadata(**{"ggml.scores": None}))
    with pytest.raises(ValueError, match="scores has 1 entries for"):
        tokenizer_from_gguf(sentencepiece_metadata(**{"ggml.scores": [0.0]}))


def test_every_known_name_builds() -> None:
    for name in PRE_TOKENIZERS:
        tokenizer = tokenizer_from_gguf(gguf_of(trained(), **{"ggml.pre": name}))
        for text in CORPUS:
            assert tokenizer.decode(tokenizer.encode(text)) == text
    unnamed = tokenizer_from_gguf(gguf_of(trained(), **{"ggml.pre": None}))
    assert unnamed.fingerprint == tokenizer_from_gguf(gguf_of(trained(), **{"ggml.pre": "default"})).fingerprint
