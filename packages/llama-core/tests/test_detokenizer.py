"""Streaming text out of token ids. The oracle is always the tokenizers package decoding everything at once."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from types import FrameType

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from llama_core.byte_level import BYTE_TO_CHAR, CHAR_TO_BYTE, bytes_to_text, text_to_bytes
from llama_core.decoder_stages import ByteLevelStage
from llama_core.tokenizer import Tokenizer

PIECES = ["▁I", "▁am", "▁testing", "▁", "ing", "▁two", "▁spaces", "▁next", "Say", ":", "▁Say", "next", "a", "�", "é"]


def byte_level() -> tokenizers.Tokenizer:
    """Ids 0 to 255 are the bytes; some tokens cut characters apart, some begin with a space."""
    vocab = {BYTE_TO_CHAR[byte]: byte for byte in range(256)}
    for data in (b" x", b" \x9f", b"\xf0\x9f", b"\xe2\x82\xac", b"\x80\x80", b"ab\xc3", b"\xa9 "):
        vocab[bytes_to_text(data)] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken(" raw é", normalized=False)])  # not in the byte alphabet: stands for itself
    return backend


def metaspace(decoder: decoders.Decoder | None = None) -> tokenizers.Tokenizer:
    """The small SentencePiece-style tokenizer of case B14."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for piece in [f"<0x{byte:02X}>" for byte in range(256)] + PIECES:
        vocab[piece] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoder if decoder is not None else decoders.Sequence(steps)
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def without_decoder() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "c d": 2}, merges=[]))


def stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip_special: bool = True) -> list[str]:
    """The chunk of each id, and of the flush last."""
    detokenizer = tokenizer.detokenizer(prompt, skip_special=skip_special)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def pieces(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    ids = [tokenizer.token_to_id(token) for token in tokens]
    assert None not in ids
    return [token_id for token_id in ids if token_id is not None]


# --- case B14


def test_b14_spaces_survive_after_a_prompt() -> None:
    tokenizer = Tokenizer(metaspace())
    prompt = pieces(tokenizer, "▁Say", ":")
    ids = pieces(tokenizer, "▁I", "▁am", "▁testing")
    assert tokenizer.decode(prompt) == "Say:"
    assert stream(tokenizer, prompt, ids) == [" I", " am", " testing", ""]


def test_b14_two_spaces_and_a_newline() -> None:
    tokenizer = Tokenizer(metaspace())
    text = "  two  spaces\n next"
    ids = pieces(tokenizer, "▁", "▁", "▁two", "▁", "▁spaces", "<0x0A>", "▁next")
    assert tokenizer.decode(ids) == text
    assert "".join(stream(tokenizer, [], ids)) == text
    prompt = pieces(tokenizer, "▁Say", ":")
    chunks = stream(tokenizer, prompt, ids)
    assert "".join(chunks) == tokenizer.decode(prompt + ids)[len("Say:") :] == "   two  spaces\n next"
    assert "<0x" not in "".join(chunks)


def test_b14_the_prompt_ends_in_a_space() -> None:
    tokenizer = Tokenizer(metaspace())
    prompt = pieces(tokenizer, "▁Say", ":", "▁")
    ids = pieces(tokenizer, "▁I", "▁am")
    assert tokenizer.decode(prompt) == "Say: "
    assert "".join(stream(tokenizer, prompt, ids)) == " I am"
    lone = pieces(tokenizer, "▁")  # decodes to nothing, and the next piece keeps its space
    assert tokenizer.decode(lone) == ""
    assert "".join(stream(tokenizer, lone, ids)) == tokenizer.decode(lone + ids) == " I am"


def test_b14_byte_level_too() -> None:
    tokenizer = Tokenizer(byte_level())
    prompt, ids = list(b"Say:"), list(b" I am\n  testing ")
    assert "".join(stream(tokenizer, prompt, ids)) == " I am\n  testing "
    assert stream(tokenizer, list(b"Say: "), list(b" I"))[0] == " "


def test_the_prompts_last_newline_does_not_come_twice() -> None:
    tokenizer = Tokenizer(metaspace())
    prompt = pieces(tokenizer, "▁Say", ":", "<0x0A>")  # a byte run that is still open
    assert tokenizer.decode(prompt) == "Say:\n"
    assert "".join(stream(tokenizer, prompt, pieces(tokenizer, "next"))) == "next"
    emoji = pieces(tokenizer, "<0xF0>", "<0x9F>", "<0x90>", "<0xA2>")
    assert "".join(stream(tokenizer, prompt, emoji)) == "🐢"
    # a later byte makes the whole run unreadable: decode gives one U+FFFD for each byte, the newline's too
    spoiled = pieces(tokenizer, "<0xF0>", "next")
    assert tokenizer.decode(prompt + spoiled) == "Say:��next"
    assert "".join(stream(tokenizer, prompt, spoiled)) == "��next"


# --- case B15


def test_b15_a_character_of_four_tokens_comes_at_once() -> None:
    chunks = stream(Tokenizer(byte_level()), [], [0xF0, 0x9F, 0x90, 0xA2])
    assert chunks == ["", "", "", "\U0001f422", ""]


def test_b15_korean_then_space_then_an_open_character() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = [0xEA, 0xB1, 0xB0, 0x20, 0xEA]
    chunks = stream(tokenizer, [], ids)
    assert chunks[:-1] == ["", "", "\uac70", " ", ""]
    assert "".join(chunks) == tokenizer.decode(ids) == "\uac70 �"


def test_b15_a_broken_character_becomes_one_replacement() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = [0x41, 0xC3, *pieces(tokenizer, bytes_to_text(b" x")), 0x9F]
    chunks = stream(tokenizer, [], ids)
    assert chunks == ["A", "", "� x", "�", ""]
    assert "".join(chunks) == tokenizer.decode(ids)
    joined = [0x41, 0xC3, *pieces(tokenizer, bytes_to_text(b" \x9f"))]
    assert "".join(stream(tokenizer, [], joined)) == tokenizer.decode(joined) == "A� �"


def test_b15_flush_decodes_what_is_left() -> None:
    tokenizer = Tokenizer(byte_level())
    assert stream(tokenizer, [], [0xF0, 0x9F]) == ["", "", "�"]
    assert tokenizer.decode([0xF0, 0x9F]) == "�"


def test_b15_a_genuine_replacement_character_passes() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = list("a�b".encode())
    chunks = stream(tokenizer, [], ids)
    assert chunks == ["a", "", "", "�", "b", ""]
    llama = Tokenizer(metaspace())
    assert "".join(stream(llama, [], pieces(llama, "a", "�", "a"))) == "a�a"


# --- any ids, any decoder a Llama tokenizer has

R, BYTES, FUSE, STRIP = (
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
)
DECODERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": byte_level,
    "none": without_decoder,
    "llama": metaspace,
    "no strip": lambda: metaspace(decoders.Sequence([R, BYTES, FUSE])),
    "strip of each token": lambda: metaspace(decoders.Sequence([R, BYTES, STRIP])),
    "strip of three": lambda: metaspace(decoders.Sequence([R, BYTES, FUSE, decoders.Strip(" ", 3, 0)])),
    "metaspace": lambda: metaspace(decoders.Metaspace()),
    "metaspace never": lambda: metaspace(decoders.Metaspace(prepend_scheme="never")),
    "bytes, metaspace": lambda: metaspace(decoders.Sequence([BYTES, decoders.Metaspace()])),
    "metaspace, bytes": lambda: metaspace(decoders.Sequence([decoders.Metaspace(), BYTES, FUSE])),
    "bytes, fuse, metaspace": lambda: metaspace(decoders.Sequence([BYTES, FUSE, decoders.Metaspace()])),
    "bytes, fuse, replace": lambda: metaspace(decoders.Sequence([BYTES, FUSE, R, STRIP])),
}


@pytest.mark.parametrize("name", DECODERS)
def test_random_ids_stream_as_they_decode(name: str) -> None:
    """700 random prompts and continuations, half from few ids and the bytes of 😀 and €."""
    backend = DECODERS[name]()
    oracle = tokenizers.Tokenizer.from_str(backend.to_str())
    tokenizer = Tokenizer(backend)
    size, rng = tokenizer.vocab_size, random.Random(name)
    shift = 0 if name == "byte level" else 3
    often = [byte + shift for byte in "😀€".encode()] if size > 200 else []
    often += [token_id for token_id in map(tokenizer.token_to_id, ("▁", "Ġ")) if token_id is not None] * 3
    met = 0
    for _ in range(700):
        pool = range(size) if rng.random() < 0.5 else [*rng.choices(range(size), k=5), *often]
        ids = rng.choices(pool, k=rng.randrange(14))
        cut, skip = rng.randrange(len(ids) + 1), rng.random() < 0.5
        whole = oracle.decode(ids, skip_special_tokens=skip)
        front = oracle.decode(ids[:cut], skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special=skip) == whole
        chunks = stream(tokenizer, ids[:cut], ids[cut:], skip)
        # where the prompt ends inside a character, its text isn't the front of the whole
        same = len(os.path.commonprefix((front, whole)))  # noqa: RUF071 - characters are what is meant
        assert "".join(chunks) == whole[same:], (ids, cut, skip)
        met += same == len(front)
    assert met > 500


def test_nothing_is_taken_back() -> None:
    """After every id, what was given out is the front of what all continuations decode to."""
    for make in (byte_level, metaspace):
        tokenizer, rng = Tokenizer(make()), random.Random(5)
        shift = 0 if make is byte_level else 3
        pool = [*(byte + shift for byte in "😀é ".encode()), 65 + shift, tokenizer.vocab_size - 3]
        for _ in range(200):
            ids = rng.choices(pool, k=8)
            detokenizer, shown = tokenizer.detokenizer(), ""
            for position, token_id in enumerate(ids):
                shown += detokenizer.push(token_id)
                for end in rng.choices(pool, k=4):
                    assert tokenizer.decode([*ids[: position + 1], end, pool[0]]).startswith(shown)


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_cost_does_not_grow_with_the_text(make: Callable[[], tokenizers.Tokenizer]) -> None:
    """Long runs of bytes that never complete: 16 times the ids take 16 times the calls, not 256 times."""
    tokenizer = Tokenizer(make())
    shift = 0 if make is byte_level else 3

    def calls(count: int) -> int:
        detokenizer = tokenizer.detokenizer()
        counted = 0

        def count_calls(frame: FrameType, event: str, argument: object) -> None:
            nonlocal counted
            counted += event in ("call", "c_call")

        sys.setprofile(count_calls)
        try:
            for token_id in [0x9F + shift, 0xF0 + shift] * (count // 2):
                detokenizer.push(token_id)
        finally:
            sys.setprofile(None)
        held = [stage.held for stage in detokenizer._stages if isinstance(stage, ByteLevelStage)]
        assert all(len(part) <= 3 for part in held)  # a call that looks at all that is held stays cheap
        detokenizer.flush()
        return counted

    assert calls(3200) <= 16 * calls(200)


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = [*pieces(tokenizer, "<s>"), 0x61, *pieces(tokenizer, "</s>")]
    assert "".join(stream(tokenizer, [], ids)) == "a"
    assert "".join(stream(tokenizer, [], ids, skip_special=False)) == "<s>a</s>"


def test_wrong_use_is_a_value_error() -> None:
    tokenizer = Tokenizer(byte_level())
    detokenizer = tokenizer.detokenizer()
    last = tokenizer.vocab_size - 1
    for bad in (-1, last + 1, 2**70):
        with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary, 0 to {last}"):
            detokenizer.push(bad)
    for wrong in ("a", None, 1.0):
        with pytest.raises(ValueError, match="must be an integer"):
            detokenizer.push(wrong)  # type: ignore[arg-type]
    assert detokenizer.push(0x61) == "a"  # an error leaves the stream as it was
    assert detokenizer.flush() == "" == detokenizer.flush()
    with pytest.raises(ValueError, match="push after flush"):
        detokenizer.push(0x61)
    unknown = metaspace(decoders.WordPiece())
    with pytest.raises(ValueError, match=r"decoder .*WordPiece.*known decoders are ByteLevel"):
        Tokenizer(unknown).detokenizer()


def test_the_byte_alphabet_is_the_packages() -> None:
    assert sorted(CHAR_TO_BYTE) == sorted(pre_tokenizers.ByteLevel.alphabet())
    for byte in range(256):
        assert text_to_bytes(bytes_to_text(bytes([byte]))) == bytes([byte])
    assert text_to_bytes("naïve 🐢") == "naïve 🐢".encode()


def test_token_bytes() -> None:
    byte, llama = Tokenizer(byte_level()), Tokenizer(metaspace())
    assert [byte.token_bytes(i) for i in (0x41, 0x9F, 0x20)] == [b"A", b"\x9f", b" "]
    assert [llama.token_bytes(i) for i in pieces(llama, "▁I", "<0x9F>", "é")] == [b" I", b"\x9f", "é".encode()]
