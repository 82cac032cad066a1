"""Stop strings in streamed text: what may still become one is held back, so that no part of one is ever shown."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text through until one of `stops` appears in it.

    Of several, the one that is complete first counts (of those, the longest), so the result does not depend on how
    the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def push(self, text: str) -> str:
        """Take the next piece of text; returns what can be shown now. After a match that is nothing."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [(start + len(stop), -len(stop), stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if found:
            end, _, self.matched = min(found)
            shown, self._held = self._held[: end - len(self.matched)], ""
            return shown
        keep = self._possible_start()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """The text ends here: what was held back did not become a stop string."""
        shown, self._held = self._held, ""
        return shown

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
