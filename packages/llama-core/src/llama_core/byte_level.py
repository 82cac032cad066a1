"""The printable alphabet in which byte-level BPE writes arbitrary bytes (GPT-2, Radford et al. 2019, `encoder.py`).

Bytes that are visible characters of Latin-1 stand for themselves; the other 68 are written as U+0100 onwards, in order,
so that a vocabulary file holds no spaces and no control characters.
"""

from __future__ import annotations

_VISIBLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]

BYTE_TO_CHAR: dict[int, str] = {byte: chr(byte) for byte in _VISIBLE} | {
    byte: chr(0x100 + index) for index, byte in enumerate(_HIDDEN)
}
CHAR_TO_BYTE: dict[str, int] = {char: byte for byte, char in BYTE_TO_CHAR.items()}


def bytes_to_text(data: bytes) -> str:
    """The spelling of `data` in the byte alphabet."""
    return "".join(map(BYTE_TO_CHAR.__getitem__, data))


def text_to_bytes(text: str) -> bytes:
    """The bytes that `text` spells. Text with any character outside the alphabet stands for its own UTF-8 bytes, as in
    the tokenizers package: that is how added tokens such as `<|im_start|> ` with a real space come through."""
    try:
        return bytes(map(CHAR_TO_BYTE.__getitem__, text))
    except KeyError:
        return text.encode("utf-8")
