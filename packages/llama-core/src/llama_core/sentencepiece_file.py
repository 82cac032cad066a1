"""Llama 1 and 2's `tokenizer.model`: the pieces of a SentencePiece model file.

The file is one protocol-buffer message (google/sentencepiece, `sentencepiece_model.proto`). What is needed of it are
three fields of each piece and a few settings, so the wire format is read here directly; no package is required.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from .errors import CheckpointError
from .sentencepiece_bpe import sentencepiece_bpe

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
_BPE = 2  # TrainerSpec.ModelType


@dataclass
class SentencePieceModel:
    """Pieces in the order of their ids, and how text is prepared."""

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    model_type: int = 1
    byte_fallback: bool = False
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    has_charsmap: bool = False
    suffix_space: bool = False


class _Fault(Exception):
    """Where the wire format breaks off."""


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise _Fault(f"a number is not whole at byte {at}")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of one message: numbers as int, everything else as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            length, at = _varint(data, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise _Fault(f"wire type {wire} at byte {at}")
        if length > len(data) - at:
            raise _Fault(f"{length} bytes announced at byte {at}, {len(data) - at} left")
        yield number, data[at : at + length]
        at += length


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise _Fault("a number where a text or message should be")
    return value


def _piece(model: SentencePieceModel, data: bytes) -> None:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(data):
        if number == 1:
            text = _bytes(value).decode("utf-8")
        elif number == 2:
            score = struct.unpack("<f", _bytes(value))[0]
        elif number == 3 and isinstance(value, int):
            kind = value
    model.pieces.append(text)
    model.scores.append(score)
    model.types.append(kind)


def parse_sentencepiece(data: bytes, path: Path) -> SentencePieceModel:
    """Reads the message.

    Raises:
        CheckpointError: not a SentencePiece model, or a damaged one.
    """
    model = SentencePieceModel()
    try:
        for number, value in _fields(data):
            if number == 1:
                _piece(model, _bytes(value))
            elif number == 2:  # TrainerSpec
                for inner, setting in _fields(_bytes(value)):
                    if inner == 3 and isinstance(setting, int):
                        model.model_type = setting
                    elif inner == 35:
                        model.byte_fallback = bool(setting)
                    elif inner == 24:
                        model.suffix_space = bool(setting)
            elif number == 3:  # NormalizerSpec
                for inner, setting in _fields(_bytes(value)):
                    if inner == 2:
                        model.has_charsmap = bool(setting)
                    elif inner == 3:
                        model.add_dummy_prefix = bool(setting)
                    elif inner == 4:
                        model.remove_extra_whitespaces = bool(setting)
    except (_Fault, UnicodeDecodeError, struct.error) as error:
        raise CheckpointError(f"{path}: neither a tiktoken rank file nor a SentencePiece model: {error}") from None
    if not model.pieces:
        raise CheckpointError(f"{path}: neither a tiktoken rank file nor a SentencePiece model: it has no pieces")
    return model


def sentencepiece_tokenizer(model: SentencePieceModel, path: Path) -> tokenizers.Tokenizer:
    """The model as an object of the tokenizers package.

    Raises:
        CheckpointError: settings that no Llama has and that would change ids.
    """
    for wrong, what in (
        (model.model_type != _BPE, f"model type {model.model_type}, only BPE (2) is read"),
        (model.has_charsmap, "a normalizer with a character map, only 'identity' is read"),
        (model.remove_extra_whitespaces, "remove_extra_whitespaces, which Llama's models have switched off"),
        (model.suffix_space, "treat_whitespace_as_suffix, which Llama's models have switched off"),
    ):
        if wrong:
            raise CheckpointError(f"{path}: this SentencePiece model has {what}")
    unknown = next((text for text, kind in zip(model.pieces, model.types) if kind == UNKNOWN), None)
    mergeable = [kind == NORMAL for kind in model.types]
    backend = sentencepiece_bpe(
        model.pieces, model.scores, unknown, mergeable=mergeable, prefix_space=model.add_dummy_prefix
    )
    backend.add_tokens(
        [
            AddedToken(text, normalized=False, special=kind != USER_DEFINED)
            for text, kind in zip(model.pieces, model.types)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED) and text
        ]
    )
    return backend
