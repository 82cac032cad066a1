"""The tokenizer and chat template that a GGUF file carries in its metadata (keys `tokenizer.*`).

Kinds: "gpt2" (byte-level BPE: tokens and merges) and "llama" (SentencePiece BPE: tokens and scores). How text is cut
before BPE stands in the file as a name only, so the rules behind the names are a table here; a wrong rule gives other
ids without any error, so an unknown name is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from .sentencepiece_bpe import sentencepiece_bpe
from .tiktoken_file import LLAMA3_SPLIT, split_by
from .tokenizer import Tokenizer

# ggml's token types
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    """GPT-2's rule after every digit has been set apart: SmolLM, StarCoder, Command-R."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> pre_tokenizers.PreTokenizer:
    return split_by(LLAMA3_SPLIT)


@dataclass(frozen=True)
class _Rule:
    split: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False
    """A piece that is in the vocabulary as a whole is one token, whatever the merges give (tiktoken's rule)."""
    add_bos: bool = False
    """Where the file doesn't say."""


_LLAMA3 = _Rule(_llama3, ignore_merges=True, add_bos=True)
# Names as llama.cpp gives them (src/llama-vocab.cpp, convert_hf_to_gguf.py), for models of Llama's architecture.
PRE_TOKENIZERS: dict[str, _Rule] = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": _Rule(_llama3),
    "dbrx": _Rule(_llama3),
    "smollm": _Rule(_single_digits),
    "starcoder": _Rule(_single_digits),
    "refact": _Rule(_single_digits),
    "command-r": _Rule(_single_digits),
    "gpt-2": _Rule(_gpt2),
    "mpt": _Rule(_gpt2),
    "olmo": _Rule(_gpt2),
    "default": _Rule(_gpt2),
}

# Tokens that end a turn in chats of the Llama family. A file names one EOS; Llama 3 Instruct files often name
# <|end_of_text|> there, while every answer ends with <|eot_id|>.
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>")
_NAMED_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def _get(metadata: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    value = metadata.get(key, default)
    if value is not None and type(value) is not kind:
        raise ValueError(f"GGUF metadata {key} must be {kind.__name__}, got {type(value).__name__}")
    return value


def _list(
    metadata: Mapping[str, Any], key: str, kinds: tuple[type, ...], length: int | None = None
) -> list[Any] | None:
    values: list[Any] | None = _get(metadata, key, list)
    if values is not None:
        if length is not None and len(values) != length:
            raise ValueError(f"GGUF metadata {key} has {len(values)} entries for {length} tokens")
        bad = next((i for i, value in enumerate(values) if type(value) not in kinds), None)
        if bad is not None:
            raise ValueError(f"GGUF metadata {key}[{bad}] is {values[bad]!r}, a {type(values[bad]).__name__}")
    return values


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that a GGUF file's metadata describes.

    Args:
        metadata: all keys of the file, as `gguf_file.read_gguf_header(path).metadata` gives them.
    Raises:
        ValueError: no tokenizer in the file, an unknown kind or pre-tokenizer name (with the known ones), or parts that
            don't fit together.
    """
    kind = _get(metadata, "tokenizer.ggml.model", str)
    tokens = _list(metadata, "tokenizer.ggml.tokens", (str,))
    if kind is None or not tokens:
        raise ValueError("the GGUF file holds no tokenizer (tokenizer.ggml.model, tokenizer.ggml.tokens)")
    types = _list(metadata, "tokenizer.ggml.token_type", (int,), len(tokens)) or [_NORMAL] * len(tokens)
    if kind == "gpt2":
        backend, add_bos = _byte_level(metadata, tokens, types)
    elif kind == "llama":
        scores = _list(metadata, "tokenizer.ggml.scores", (float, int), len(tokens))
        if scores is None:
            raise ValueError("the GGUF file's tokenizer is of kind 'llama' but has no tokenizer.ggml.scores")
        space = _get(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
        unknown = next((token for token, t in zip(tokens, types) if t == _UNKNOWN), None)
        mergeable = [t == _NORMAL for t in types]
        backend, add_bos = sentencepiece_bpe(tokens, scores, unknown, mergeable, prefix_space=space), True
    else:
        raise ValueError(f"GGUF tokenizer kind {kind!r} is not known; known kinds are 'gpt2' and 'llama'")
    ids: dict[str, int] = {}
    for index, token in enumerate(tokens):
        ids.setdefault(token, index)
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=types[index] in (_CONTROL, _UNKNOWN))
            for token, index in ids.items()
            if token and types[index] in (_CONTROL, _USER_DEFINED, _UNKNOWN)
        ]
    )
    named = {}
    for name, key in _NAMED_IDS.items():
        token_id = _get(metadata, f"tokenizer.ggml.{key}", int)
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            allowed = f"0 to {len(tokens) - 1}"
            raise ValueError(f"GGUF metadata tokenizer.ggml.{key} is {token_id}; allowed are {allowed}")
        named[name] = tokens[token_id]
    more = [_get(metadata, f"tokenizer.ggml.{key}_token_id", int) for key in ("eos", "eot", "eom")]
    ends = [i for i in more if i is not None]
    ends += [ids[token] for token in _TURN_ENDS if token in ids and types[ids[token]] == _CONTROL]
    return Tokenizer(
        backend,
        named=named,
        eos_ids=list(dict.fromkeys(ends)),
        add_bos=_get(metadata, "tokenizer.ggml.add_bos_token", bool, add_bos and "bos_token" in named),
        chat_templates=_chat_templates(metadata),
    )


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    found = {}
    for key in metadata:
        if metadata[key] is not None and (key == prefix or key.startswith(prefix + ".")):
            found[key[len(prefix) + 1 :] or "default"] = _get(metadata, key, str)
    return found


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> tuple[tokenizers.Tokenizer, bool]:
    name = _get(metadata, "tokenizer.ggml.pre", str, "default")
    if name not in PRE_TOKENIZERS:
        raise ValueError(
            f"GGUF pre-tokenizer {name!r} is not known, and a guess would cut text wrongly; known are "
            f"{', '.join(PRE_TOKENIZERS)}"
        )
    rule = PRE_TOKENIZERS[name]
    merges = _list(metadata, "tokenizer.ggml.merges", (str,))
    if merges is None:
        raise ValueError("the GGUF file's tokenizer is of kind 'gpt2' but has no tokenizer.ggml.merges")
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocab.setdefault(token, index)
    pairs = []
    for index, merge in enumerate(merges):
        left, space, right = merge.partition(" ")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            where = f"GGUF metadata tokenizer.ggml.merges[{index}]"
            raise ValueError(f"{where} is {merge!r}, which does not join two tokens to a third")
        pairs.append((left, right))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=rule.ignore_merges))
    backend.pre_tokenizer = rule.split()
    backend.decoder = decoders.ByteLevel()
    return backend, rule.add_bos
