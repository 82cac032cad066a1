"""Meta's Llama 3 `tokenizer.model`: a tiktoken rank file as an object of the tokenizers package.

Each line is a token's bytes in base64, a space, and its rank, which is its id. tiktoken merges the neighbouring pair
whose joined bytes have the lowest rank. The tokenizers package wants the pairs themselves, ranked: they are every way
to cut a token into two others, in the order of the tokens. Which way to cut comes first does not matter: when a
token's turn has come, all lower ranks have been merged, so only one of the cuts can be standing there.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from .byte_level import bytes_to_text
from .errors import CheckpointError

# meta-llama/llama-models, models/llama3/tokenizer.py
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Digits in runs of one to three from the left, never with a space before them."""


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Cuts text at every match of the pattern, then writes the bytes in the byte alphabet."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def looks_like_ranks(data: bytes) -> bool:
    """Whether a file's content begins like a rank file: text, base64, a space, digits."""
    token, space, rank = data.partition(b"\n")[0].rstrip(b"\r").partition(b" ")
    try:
        return bool(space) and rank.isdigit() and bool(base64.b64decode(token, validate=True))
    except binascii.Error:
        return False


def parse_ranks(data: bytes, path: Path) -> list[bytes]:
    """The tokens of a rank file in the order of their ids.

    Raises:
        CheckpointError: a line that is no token and rank, a token or rank that stands twice or is missing, or no token
            for one of the 256 bytes; the message gives the line.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        token, _, rank = line.rstrip(b"\r").partition(b" ")
        try:
            key = base64.b64decode(token, validate=True)
        except binascii.Error as error:
            raise CheckpointError(f"{path}: line {number}: {line[:60]!r} is not base64: {error}") from None
        if not key or not rank.isdigit() or len(rank) > 9:
            raise CheckpointError(f"{path}: line {number}: {line[:60]!r} is not a token in base64 and its rank")
        if key in ranks:
            raise CheckpointError(f"{path}: line {number}: the token {key[:60]!r} stands twice")
        ranks[key] = int(rank)
    tokens = sorted(ranks, key=ranks.__getitem__)
    wrong = next((i for i, token in enumerate(tokens) if ranks[token] != i), None)
    if wrong is not None:
        raise CheckpointError(f"{path}: ranks must be 0 to {len(tokens) - 1}, each once; rank {wrong} is missing")
    absent = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if absent is not None:
        raise CheckpointError(f"{path}: there is no token for byte 0x{absent:02X}, so not every text could be written")
    return tokens


def merges_from_ranks(tokens: list[bytes]) -> list[tuple[bytes, bytes]]:
    """All pairs of tokens that join to a token, by the rank of the whole, then of the parts."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges: list[tuple[bytes, bytes]] = []
    for token in tokens:
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def tiktoken_bpe(tokens: list[bytes], special: list[str]) -> tokenizers.Tokenizer:
    """Tokens in id order and, after them, special tokens, with Llama 3's split.

    Meta's own code cuts texts of more than 400,000 characters, and runs of more than 25,000, before encoding, to spare
    tiktoken; there ids may differ. Hugging Face's tokenizer.json doesn't, nor do we.
    """
    spelled = {token: bytes_to_text(token) for token in tokens}
    vocab = {text: rank for rank, text in enumerate(spelled.values())}
    merges = [(spelled[left], spelled[right]) for left, right in merges_from_ranks(tokens)]
    # a piece that is a token as a whole is that token, even where merging would not arrive at it
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = split_by(LLAMA3_SPLIT)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    return backend
