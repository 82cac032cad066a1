"""A SentencePiece BPE vocabulary (pieces and scores) as an object of the tokenizers package.

SentencePiece merges the neighbouring pair whose joined piece has the best score, leftmost first. The tokenizers package
merges by a ranked list of pairs, so the list holds every way to cut a piece into two others, best score first.
"""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers

SPACE = "▁"


def merges_from_scores(
    pieces: Sequence[str], scores: Sequence[float], mergeable: Sequence[bool]
) -> list[tuple[str, str]]:
    """All pairs of pieces that join to a piece: by falling score of the whole, then by the ids of the parts (the order
    in which Hugging Face's converter writes them)."""
    ids: dict[str, int] = {}
    for index, piece in enumerate(pieces):
        ids.setdefault(piece, index)
    found = []
    for piece, index in ids.items():
        if not mergeable[index]:
            continue
        for cut in range(1, len(piece)):
            left, right = ids.get(piece[:cut]), ids.get(piece[cut:])
            if left is not None and right is not None and mergeable[left] and mergeable[right]:
                found.append((-scores[index], index, left, right))
    found.sort()
    return [(pieces[left], pieces[right]) for _, _, left, right in found]


def sentencepiece_bpe(
    pieces: Sequence[str],
    scores: Sequence[float],
    unknown: str | None,
    mergeable: Sequence[bool],
    prefix_space: bool = True,
) -> tokenizers.Tokenizer:
    """Llama 1/2 style: one space put in front, spaces written as `▁`, characters outside the vocabulary as bytes.

    Args:
        pieces: the vocabulary in id order; of equal pieces the first counts.
        scores: one per piece; higher merges first.
        unknown: the piece for what has no bytes either, if there is one.
        mergeable: False for pieces that text is never merged to: control, unknown, user-defined, byte pieces.
        prefix_space: whether text gets a space in front that decoding takes off again.
    """
    vocab: dict[str, int] = {}
    for index, piece in enumerate(pieces):
        vocab.setdefault(piece, index)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges_from_scores(pieces, scores, mergeable),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces] if prefix_space else [spaces])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix_space else steps)
    return backend
