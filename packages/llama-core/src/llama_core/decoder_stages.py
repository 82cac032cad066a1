"""The decoders of the tokenizers package as streams: tokens go in one at a time, text comes out as soon as it is final.

A decoder of the tokenizers package is a function from the list of *all* tokens to text. Each stage here computes the
same function incrementally, and gives out only what no later token can change:

- ByteLevel holds an incomplete UTF-8 character (at most three bytes).
- ByteFallback holds a run of `<0x..>` tokens until another token ends it. It can't give out sooner: the tokenizers
  package turns the whole run into U+FFFD if any part of it is not UTF-8.
- Strip and Metaspace treat the very first text or token in their own way, and nothing after it.

`Fuse` makes one token out of all. After it, what flows is fragments of that single token (`fused=True` below).
"""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass, field
from typing import Any, Protocol

from .byte_level import text_to_bytes

# u8::from_str_radix of Rust, which the package uses, takes a plus sign as well
_BYTE_TOKEN = re.compile(r"<0x(\+[0-9A-Fa-f]|[0-9A-Fa-f]{2})>")


class Stage(Protocol):
    """One step of a streaming decoder. State is a handful of plain values."""

    def push(self, tokens: list[str]) -> list[str]:
        """Takes the next tokens and returns those that are final."""
        ...

    def flush(self) -> list[str]:
        """Returns what is still held, as the end of the stream makes it."""
        ...


@dataclass
class ReplaceStage:
    pattern: str
    content: str

    def push(self, tokens: list[str]) -> list[str]:
        return [token.replace(self.pattern, self.content) for token in tokens]

    def flush(self) -> list[str]:
        return []


@dataclass
class ByteFallbackStage:
    run: list[int] = field(default_factory=list)

    def push(self, tokens: list[str]) -> list[str]:
        out: list[str] = []
        for token in tokens:
            byte = _BYTE_TOKEN.fullmatch(token) if token.startswith("<0x") else None
            if byte:
                self.run.append(int(byte[1], 16))
            else:
                if self.run:
                    out += self.flush()
                out.append(token)
        return out

    def flush(self) -> list[str]:
        run, self.run = bytes(self.run), []
        try:
            return [run.decode("utf-8")] if run else []
        except UnicodeDecodeError:
            return ["�"] * len(run)


@dataclass
class StripStage:
    """Removes up to `start` leading characters `content`: of each token, or once if the tokens are fused."""

    content: str
    start: int
    fused: bool
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.start

    def push(self, tokens: list[str]) -> list[str]:
        if self.fused and not self.left:
            return tokens
        out = []
        for token in tokens:
            if not self.fused:
                self.left = self.start
            cut = 0
            while cut < len(token) and self.left and token[cut] == self.content:
                cut, self.left = cut + 1, self.left - 1
            if cut < len(token):
                self.left = 0
            out.append(token[cut:])
        return out

    def flush(self) -> list[str]:
        return []


@dataclass
class MetaspaceStage:
    """`▁` → space. Unless the scheme is "never", the first token loses its `▁`: the encoder had put one there."""

    replacement: str
    drops_first: bool
    fused: bool
    first: bool = True

    def push(self, tokens: list[str]) -> list[str]:
        if not tokens:
            return tokens
        out = [token.replace(self.replacement, " ") for token in tokens]
        if self.drops_first and self.fused:
            return [token.replace(self.replacement, "") for token in tokens]
        if self.drops_first and self.first:
            out[0] = tokens[0].replace(self.replacement, "")
        self.first = False
        return out

    def flush(self) -> list[str]:
        return []


@dataclass
class ByteLevelStage:
    held: bytes = b""

    def push(self, tokens: list[str]) -> list[str]:
        data = self.held + b"".join(map(text_to_bytes, tokens))
        text, used = codecs.utf_8_decode(data, "replace", False)
        self.held = data[used:]
        return [text] if text else []

    def flush(self) -> list[str]:
        held, self.held = self.held, b""
        return [held.decode("utf-8", "replace")] if held else []


@dataclass
class JoinStage:
    """No decoder at all: the package then joins the tokens with spaces."""

    first: bool = True

    def push(self, tokens: list[str]) -> list[str]:
        if not tokens:
            return tokens
        text = " ".join(tokens)
        text, self.first = (text if self.first else " " + text), False
        return [text]

    def flush(self) -> list[str]:
        return []


def _unsupported(what: str) -> ValueError:
    known = "ByteLevel, ByteFallback, Fuse, Metaspace, Replace (of a text), Sequence, Strip (at the start), or none"
    return ValueError(f"text can't be streamed through this tokenizer's decoder {what}; known decoders are {known}")


def _stages(decoder: dict[str, Any], fused: bool) -> tuple[list[Stage], bool]:
    kind = decoder["type"]
    if kind == "Sequence":
        stages: list[Stage] = []
        for part in decoder["decoders"]:
            more, fused = _stages(part, fused)
            stages += more
        return stages, fused
    if kind == "Fuse":
        return [], True
    if kind == "ByteLevel" and not fused:
        return [ByteLevelStage()], True
    if kind == "ByteFallback" and not fused:
        return [ByteFallbackStage()], False
    if kind == "Metaspace":
        return [MetaspaceStage(decoder["replacement"], decoder["prepend_scheme"] != "never", fused)], fused
    if kind == "Strip" and decoder["stop"] == 0:
        return [StripStage(decoder["content"], decoder["start"], fused)], fused
    if kind == "Replace":
        pattern = decoder["pattern"].get("String")
        # a longer pattern could lie across two fragments of the fused token
        if pattern and (not fused or len(pattern) == 1):
            return [ReplaceStage(pattern, decoder["content"])], fused
    raise _unsupported(f"{json.dumps(decoder, ensure_ascii=False)}{' after Fuse' if fused else ''}")


def build_stages(decoder: dict[str, Any] | None) -> list[Stage]:
    """Fresh streaming stages for a decoder's settings (`backend.decoder_settings`).

    Raises:
        ValueError: a kind of decoder that no Llama tokenizer has; the message names it and the known ones.
    """
    return [JoinStage()] if decoder is None else _stages(decoder, False)[0]


def run_stages(stages: list[Stage], tokens: list[str]) -> str:
    """Pushes tokens through all stages and returns the text that is final."""
    for stage in stages:
        tokens = stage.push(tokens)
    return "".join(tokens)


def flush_stages(stages: list[Stage]) -> str:
    """Ends the stream: each stage's remainder passes through the stages after it."""
    tokens: list[str] = []
    for stage in stages:
        tokens = stage.push(tokens) + stage.flush()
    return "".join(tokens)


def token_bytes(token: str, decoder: dict[str, Any] | None) -> bytes:
    """The bytes that one token stands for, whatever is around it."""
    settings = json.dumps(decoder)
    if '"ByteLevel"' in settings:
        return text_to_bytes(token)
    if '"ByteFallback"' in settings and (byte := _BYTE_TOKEN.fullmatch(token)):
        return bytes([int(byte[1], 16)])
    return token.replace("▁", " ").encode("utf-8")
