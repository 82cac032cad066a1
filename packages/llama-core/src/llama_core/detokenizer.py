"""Token ids to text, one id at a time.

The chunks joined are exactly what decoding everything at once gives, without re-decoding a window: the tokenizer's own
decoder runs as a stream (`decoder_stages.py`), so each token costs the same however long the text has become.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

from .decoder_stages import Stage, flush_stages, run_stages
from .text import shared_front


class IncrementalDetokenizer:
    """Made by `Tokenizer.detokenizer(prompt_ids)`.

    Let P = decode(prompt_ids) and W = decode(prompt_ids + all pushed ids). All chunks and the flush joined are W
    without its front P. If the prompt ends inside a character (or inside a run of byte tokens whose later part changes
    how it is read), P is not the front of W; the chunks then begin where P and W part.

    No chunk holds a U+FFFD that a later id could turn into a character: nothing given out is ever taken back. `flush`
    ends the text: bytes of an incomplete character become U+FFFD there, as in `decode`.
    """

    def __init__(self, piece: Callable[[int], str | None], stages: list[Stage], prompt_ids: Iterable[int] = ()) -> None:
        """
        Args:
            piece: an id's token as the vocabulary spells it, None for one that is not shown; ValueError for a bad id.
            stages: fresh stages of the tokenizer's decoder.
            prompt_ids: what came before. Its text is not given out, but it decides how the next ids read.
        """
        self._piece = piece
        self._stages = stages
        self._ended = False
        run_stages(stages, [token for i in prompt_ids if (token := piece(i)) is not None])
        # What the prompt still holds back (an open character or byte run) is part of decode(prompt_ids) already, so
        # that much must not come out again.
        self._shown = flush_stages([copy.deepcopy(stage) for stage in stages])

    def push(self, token_id: int) -> str:
        """The text that became final with this id; empty while a character is incomplete.

        Raises:
            ValueError: an id outside the vocabulary, or a push after the flush.
        """
        if self._ended:
            raise ValueError("push after flush: the text has ended; make a new detokenizer")
        token = self._piece(token_id)
        if token is None:
            return ""
        return self._new(run_stages(self._stages, [token]))

    def flush(self) -> str:
        """The rest of the text. A second flush is empty."""
        self._ended = True
        return self._new(flush_stages(self._stages))

    def _new(self, text: str) -> str:
        if not self._shown or not text:
            return text
        same = shared_front(self._shown, text)
        # still inside what was shown only if all of the new text was; the first difference ends the comparison
        self._shown = self._shown[same:] if same == len(text) else ""
        return text[same:]
