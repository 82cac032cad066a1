"""Guesses for the next tokens, from the text itself (prompt look-up, https://github.com/apoorvumang/prompt-lookup-decoding).

Where the last few tokens stood before, what followed them then may follow now: in summaries, code and quotations it
often does. The model looks at all guesses in one pass and draws at each of them as it would have anyway; the first draw
that differs from its guess takes its place, and what stands behind is dropped. So the result is what it would have been
without guesses, drawn or greedy.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 4
"""Tokens that must have stood together before: so many, or fewer if there is no such place."""


def guesses(ids: Sequence[int], most: int) -> list[int]:
    """At most `most` tokens that followed the newest earlier place of the last tokens of `ids`; none without one."""
    if most < 1:
        return []
    for length in range(min(LONGEST, len(ids) - 1), 1, -1):
        tail = list(ids[-length:])
        for start in range(len(ids) - length - 1, -1, -1):
            if ids[start] == tail[0] and list(ids[start : start + length]) == tail:
                return list(ids[start + length : start + length + most])
    return []
