"""The live page as one of the places where answers go."""

from __future__ import annotations

from dataclasses import asdict

from gati.video import Frame, Result
from services.live.state import LiveState

__all__ = ["LiveSink"]


class LiveSink:
    """Shows results and their pictures on the live page of a state."""

    def __init__(self, state: LiveState) -> None:
        self._state = state
        self._shown: tuple[str, int] | None = None

    def write(self, result: Result, frame: Frame) -> None:
        """Show a result; its picture once, however many regions it has."""
        self._state.publish(asdict(result))
        if self._shown != (frame.source, frame.index):
            self._shown = (frame.source, frame.index)
            self._state.frame(frame.image)

    def close(self) -> None:
        """Nothing is left to do: the page stays for those who look at it."""
