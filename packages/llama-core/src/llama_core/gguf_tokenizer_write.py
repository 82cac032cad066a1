"""A tokenizer as GGUF metadata: the reverse of `gguf_tokenizer.py`.

GGUF stores how text is cut as a name, so a name must be found that cuts the same way. What was written is read back
and compared on texts that tell the rules apart; where ids differ, nothing is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import tokenizers

from .gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf
from .tokenizer import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Contractions, digit runs, punctuation, all kinds of white space, scripts with and without spaces, marks that
# normalisation would move, characters of two to four bytes, control characters.
PROBES = (
    "Hello, world! It's JOHN'S; we'll've done I'm sure they'RE",
    "1 12 123 1234 12345 1234567890 3.14159 1,000 x86_64 a1b22 ２３ ⅷ",
    "def f(x):\n    return  x**2\n\n\n\tif a!=b:\r\n  \t pass   \n ",
    " leading,  double   triple    and trailing   ",
    "«Übergröße» naïve café cafe\u0301 ÅA\u030a ﬁne ①②",
    "Привет, мир! γειά σου κόσμε  שלום مرحبا नमस्ते สวัสดี",
    "你好，世界。こんにちは世界 안녕하세요",
    "🐢🐢 👩‍👩‍👧 🇩🇪 e\u200bz\u00a0n\u2028l\ufeffb",
    "http://a.b/c?d=e&f=%20#g <tag attr='v'>&amp;</tag> C:\\x\\y $100.00 50% #1 @me --- ___ ...!!!",
    "\x00\x01\x7f\ufffd\U0010ffff",
    "a" * 70 + " " + "ab" * 40 + "\n" * 9,
)


def gguf_tokenizer_metadata(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """The `tokenizer.*` keys for a model with `vocab_size` rows; rows without a token get `[PAD…]`.

    Raises:
        ValueError: more tokens than rows, a kind that GGUF does not have, no known name for how it cuts text, or end
            tokens that GGUF cannot hold.
    """
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {vocab_size} rows")
    data = json.loads(tokenizer.to_json())
    model = data["model"]
    if model.get("type") != "BPE":
        raise ValueError(f"the tokenizer is of kind {model.get('type')!r}; GGUF takes BPE")
    byte_level = not model.get("byte_fallback")
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.vocab_size)]
    tokens += [None] * (vocab_size - len(tokens))
    added = {token["id"]: token for token in data["added_tokens"]}
    unknown = model.get("unk_token") if not byte_level else None

    def kind(index: int, token: str | None) -> int:
        if token is None:
            return _UNUSED
        if token == unknown:
            return _UNKNOWN
        if index in added:
            return _CONTROL if added[index]["special"] else _USER_DEFINED
        return _BYTE if not byte_level and re.fullmatch(r"<0x[0-9A-F]{2}>", token) else _NORMAL

    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2" if byte_level else "llama",
        "tokenizer.ggml.tokens": [f"[PAD{i}]" if token is None else token for i, token in enumerate(tokens)],
        "tokenizer.ggml.token_type": [kind(index, token) for index, token in enumerate(tokens)],
        "tokenizer.ggml.add_bos_token": tokenizer.adds_bos,
        "tokenizer.ggml.add_eos_token": False,
    }
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if byte_level:
        metadata["tokenizer.ggml.merges"] = merges
        metadata["tokenizer.ggml.add_space_prefix"] = False
    else:
        metadata["tokenizer.ggml.scores"] = _scores(tokens, model["merges"])
        metadata["tokenizer.ggml.add_space_prefix"] = _prefixes_space(tokenizer)
    for name, key in _NAMED.items():
        if name in tokenizer.named:
            metadata[f"tokenizer.ggml.{key}"] = tokenizer.token_to_id(tokenizer.named[name])
    metadata |= _ends(tokenizer) | _templates(tokenizer)
    return _named_and_checked(tokenizer, metadata, bool(model.get("ignore_merges")))


def _scores(tokens: Sequence[str | None], merges: Sequence[Any]) -> list[float]:
    """SentencePiece scores that give the merges' order: minus the rank at which a piece first comes out of a merge."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    return [-float(ranks.get(token or "", 0)) for token in tokens]


def _prefixes_space(tokenizer: Tokenizer) -> bool:
    first = tokenizer.encode("a", add_bos=False)
    return bool(first) and (tokenizer.id_to_token(first[0]) or "").startswith("▁")


def _ends(tokenizer: Tokenizer) -> dict[str, Any]:
    """GGUF names three end tokens: of text, of turn, of message."""
    eos = tokenizer.token_to_id(tokenizer.named["eos_token"]) if "eos_token" in tokenizer.named else None
    found: dict[str, Any] = {}
    for token_id in tokenizer.eos_ids:
        key = "eom" if tokenizer.id_to_token(token_id) == "<|eom_id|>" else "eot"
        if eos is None:
            eos = token_id
            found["tokenizer.ggml.eos_token_id"] = token_id
        elif token_id != eos:
            found.setdefault(f"tokenizer.ggml.{key}_token_id", token_id)
    return found


def _templates(tokenizer: Tokenizer) -> dict[str, Any]:
    templates = tokenizer.chat_templates
    found: dict[str, Any] = {}
    if others := sorted(name for name in templates if name != "default"):
        found["tokenizer.chat_templates"] = others
    for name in sorted(templates):
        found["tokenizer.chat_template" + ("" if name == "default" else f".{name}")] = templates[name]
    return found


def _named_and_checked(tokenizer: Tokenizer, metadata: dict[str, Any], ignore_merges: bool) -> dict[str, Any]:
    expected = [tokenizer.encode(text, add_bos=False) for text in PROBES]
    if metadata["tokenizer.ggml.model"] == "llama":
        names = [""]
    else:
        # Cheap first: cut the probes with every rule, and read back only under names that cut as the tokenizer does.
        ours = _cuts(tokenizers.Tokenizer.from_str(tokenizer.to_json()).pre_tokenizer)
        names = [
            name
            for name, rule in PRE_TOKENIZERS.items()
            if rule.ignore_merges == ignore_merges and _cuts(rule.split()) == ours
        ]
    for name in names:
        named = {**metadata, "tokenizer.ggml.pre": name} if name else {**metadata, "tokenizer.ggml.pre": "default"}
        back = tokenizer_from_gguf(named)
        if [back.encode(text, add_bos=False) for text in PROBES] != expected:
            continue
        if lost := sorted(set(tokenizer.eos_ids) - set(back.eos_ids)):
            raise ValueError(
                f"GGUF has room for three end tokens; {[tokenizer.id_to_token(i) for i in lost]} do not fit"
            )
        return named
    raise ValueError(
        "no GGUF name describes how this tokenizer cuts text, and a wrong one would give other ids; known are "
        f"{', '.join(PRE_TOKENIZERS)}"
    )


def _cuts(pre_tokenizer: Any) -> list[Any]:
    if pre_tokenizer is None:
        return []
    return [pre_tokenizer.pre_tokenize_str(text) for text in PROBES]
