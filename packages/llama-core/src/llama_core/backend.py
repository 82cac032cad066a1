"""What we ask of the tokenizers package besides encoding, and its errors as ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tokenizers


@contextmanager
def package_errors(what: str) -> Iterator[None]:
    """Turns an error of the tokenizers package into a ValueError that begins with `what`. The package raises bare
    `Exception`s, and a panic of its Rust code derives from BaseException only."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {error}") from None


def special_ids(backend: tokenizers.Tokenizer) -> dict[str, int]:
    """The special tokens by their text."""
    return {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}


def decoder_settings(backend: tokenizers.Tokenizer) -> dict[str, Any] | None:
    """The decoder as it stands in tokenizer.json, or None."""
    decoder = backend.decoder
    return None if decoder is None else json.loads(decoder.__getstate__())


def leading_ids(backend: tokenizers.Tokenizer) -> list[int]:
    """The ids that the post-processor puts in front of a single text.

    Read from its settings: running it would panic on a damaged file.
    """
    post_processor = backend.post_processor
    return [] if post_processor is None else _leading(json.loads(post_processor.__getstate__()))


def _leading(settings: dict[str, Any]) -> list[int]:
    kind = settings["type"]
    if kind == "Sequence":  # each works on the result of the one before
        return [i for part in reversed(settings["processors"]) for i in _leading(part)]
    if kind in ("BertProcessing", "RobertaProcessing"):
        return [settings["cls"][1]]
    ids: list[int] = []
    for piece in settings["single"] if kind == "TemplateProcessing" else ():
        if "SpecialToken" not in piece:
            break
        ids += settings["special_tokens"].get(piece["SpecialToken"]["id"], {"ids": []})["ids"]
    return ids
