"""From tokens to the text that a client gets: half characters wait, and so does what may begin a stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["TextWriter"]


class TextWriter:
    """Takes tokens one by one; `stopped` once one of `stops`, which is left out, was complete."""

    def __init__(self, write: Callable[[int], str], stops: Sequence[str]) -> None:
        self._write = write
        self._stops = stops
        self._held = ""
        self.stopped = False

    def add(self, token: int, *, last: bool) -> str:
        """Return the text that goes out with this token; with the last one, all that waited."""
        if self.stopped:
            return ""
        text = self._held + self._write(token)
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        kept = 0 if last else self._possible(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _possible(self, text: str) -> int:
        """How many of the last characters may be the beginning of a stop."""
        longest = max((len(stop) for stop in self._stops), default=1)
        for count in range(min(longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0
