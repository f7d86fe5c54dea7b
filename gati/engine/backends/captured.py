"""Single requests as CUDA graphs captured once: what is launched when, and when the host waits.

A request is copied into a static tensor. Each segment, its inline lookup with it, is one graph; what it
leaves behind is where the next one reads. Score and probabilities go to pinned host memory in one copy that
an event follows, and the host waits for that event alone.

**Inline lookups.** While the host waits for a score the device would idle: reading it back and launching the
next graph take a *round trip*, measured when the path is made. The next segment is launched before the score
is known if it takes the device no longer than that: on a miss the round trip is hidden, and on a hit the
needless segment ends by the time another request could have begun, so it delays none. A longer segment is
waited for: there a hit saves work, and a round trip is little to lose. On a hit nothing beyond that one
segment has been launched. Which exit answers depends on the input alone.

**Overlapped lookups** are graphs of their own on the lane `lookups`: an event forks them off after their
segment, the host joins them. The network meanwhile continues block by block, two blocks queued at most, up to
the next lookup.

Tested against a fake device; not yet run on hardware.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gati.engine.backends.base import SingleExit, SinglePath
from gati.engine.backends.cuda_device import Device
from gati.engine.backends.replayed import Flag, Run, capture, packed_lookup
from gati.model.cuts import Segment

_BLOCKS_AHEAD = 2  # queued at most while an overlapped lookup is under way: a hit should save something


@dataclass(frozen=True)
class _Lookup:
    """A lookup at the end of a segment; an overlapped one is a graph, an inline one in the segment's."""

    exit: SingleExit
    flag: Flag
    graph: Any = None

    @property
    def inline(self) -> bool:
        return self.graph is None


@dataclass(frozen=True)
class _Piece:
    """A segment as a graph."""

    graph: Any
    lookup: _Lookup | None = None

    @property
    def inline(self) -> bool:
        """Whether the graph looks up, too."""
        return self.lookup is not None and self.lookup.inline


class CapturedPath(SinglePath):
    """The path of a single request as graphs. Any thread may ask; one request runs at a time."""

    def __init__(
        self,
        device: Device,
        request: Tensor,
        segments: Sequence[Segment],
        exits: dict[str, SingleExit],
    ) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._tail, self._forked = device.event(), device.event()
        self._marks = [device.event() for _ in range(_BLOCKS_AHEAD)]
        self._pending: _Lookup | None = None
        self._exits = len(exits)
        self._request = device.static(request)
        self._pieces: list[_Piece] = []
        carried: tuple[Tensor, ...] = (self._request,)
        self._outputs: list[tuple[Tensor, ...]] = []  # kept: graphs captured later must not take their memory
        for segment in segments:
            carried = self._add(segment, carried, exits.get(segment.block or ""))
        (self._scores,) = carried
        self._speculative = [self._pays(position) for position in range(len(self._pieces))]

    def answer(self, x: Tensor) -> tuple[Tensor, int]:
        """As `SinglePath.answer`."""
        with self._lock:
            self._device.wait(self._tail, "main")  # the last request may have come on another stream
            try:
                return self._walk(x)
            finally:
                if self._pending is not None:  # something was raised
                    self._device.wait(self._pending.flag.known, "main")
                    self._pending = None
                self._device.record(self._tail, "main")

    # Capture ------------------------------------------------------------------------------------------------

    def _add(
        self, segment: Segment, carried: tuple[Tensor, ...], leaving: SingleExit | None
    ) -> tuple[Tensor, ...]:
        """Capture a segment on what the one before leaves behind; returns what it leaves."""
        run = _piece_run(segment, leaving)
        graph, outputs = capture(self._device, run, carried, "main", segment.block)
        self._device.replay(graph, "main")  # the next warm-up gets values that can occur
        self._outputs.append(outputs)
        if leaving is None:
            self._pieces.append(_Piece(graph))
            return outputs
        if not leaving.overlapped:
            *through, packed, probabilities = outputs
            flag = Flag(self._device, packed, probabilities, "main")
            self._pieces.append(_Piece(graph, _Lookup(leaving, flag)))
            return tuple(through)
        *through, hidden = outputs
        look = packed_lookup(leaving.lookup)
        lookup_graph, found = capture(self._device, look, (hidden,), "lookups", segment.block)
        self._outputs.append(found)
        packed, probabilities = found
        flag = Flag(self._device, packed, probabilities, "lookups")
        self._pieces.append(_Piece(graph, _Lookup(leaving, flag, lookup_graph)))
        return tuple(through)

    def _pays(self, position: int) -> bool:
        """Whether to launch this piece before the score of the one before it is known."""
        before, piece = self._pieces[position - 1], self._pieces[position]
        lookup = before.lookup
        if position == 0 or lookup is None or not lookup.inline:
            return False

        def queue() -> None:
            self._device.replay(before.graph, "main")

        def asked() -> None:
            self._launch(before)
            lookup.flag.score()

        round_trip_ms = self._device.host_ms(asked) - self._device.device_ms(queue)
        return self._device.device_ms(lambda: self._device.replay(piece.graph, "main")) <= round_trip_ms

    # A request ----------------------------------------------------------------------------------------------

    def _walk(self, x: Tensor) -> tuple[Tensor, int]:
        self._device.copy(x, self._request, "main")
        ahead = 0  # pieces launched since the lookup that is pending
        for position, piece in enumerate(self._pieces):
            if self._must_settle_before(position) and (found := self._settle()) is not None:
                return found
            ahead = ahead + 1 if self._pending is not None else 0
            self._launch(piece)
            if self._must_settle_after(position) and (found := self._settle()) is not None:
                return found
            if piece.lookup is not None:
                self._fork(piece.lookup)
                self._pending, ahead = piece.lookup, 0
            self._keep_pace(ahead)
        return self._device.taken(self._scores), self._exits

    def _must_settle_before(self, position: int) -> bool:
        pending = self._pending
        if pending is None:
            return False
        if pending.inline:
            return not self._speculative[position]
        return self._pieces[position].inline or self._known(pending)  # one lookup at a time

    def _must_settle_after(self, position: int) -> bool:
        last = position == len(self._pieces) - 1
        return self._pending is not None and (last or self._pieces[position].lookup is not None)

    def _settle(self) -> tuple[Tensor, int] | None:
        """Wait for the lookup that is pending; its answer on a hit."""
        pending = self._pending
        if pending is None:
            return None
        score = pending.flag.score()
        self._pending = None
        if score >= pending.exit.threshold:  # False for NaN
            return pending.flag.probabilities(), pending.exit.position
        return None

    def _launch(self, piece: _Piece) -> None:
        self._device.replay(piece.graph, "main")
        if piece.lookup is not None and piece.lookup.inline:
            piece.lookup.flag.send()

    def _fork(self, lookup: _Lookup) -> None:
        """Queue an overlapped lookup after its segment; an inline one was launched with it."""
        if lookup.inline:
            return
        self._device.record(self._forked, "main")
        self._device.wait(self._forked, "lookups")
        self._device.replay(lookup.graph, "lookups")
        lookup.flag.send()

    def _keep_pace(self, ahead: int) -> None:
        """Let the host queue a few blocks at most while an overlapped lookup is under way."""
        pending = self._pending
        if pending is None or pending.inline:
            return
        mark = self._marks[ahead % _BLOCKS_AHEAD]
        if ahead >= _BLOCKS_AHEAD:
            while not self._device.query(mark) and not self._known(pending):
                pass
        self._device.record(mark, "main")

    def _known(self, pending: _Lookup) -> bool:
        return self._device.query(pending.flag.known)


def _piece_run(segment: Segment, leaving: SingleExit | None) -> Run:
    """A segment as it is captured: with its inline lookup, or with what an overlapped one may read."""

    def run(*carried: Tensor) -> tuple[Tensor, ...]:
        result = segment.run(*carried)
        through: tuple[Tensor, ...] = (result,) if isinstance(result, Tensor) else tuple(result)
        if leaving is None:
            return through
        if leaving.overlapped:
            return (*through, through[0].clone() if segment.hidden_changes_later else through[0])
        return (*through, *packed_lookup(leaving.lookup)(through[0]))

    return run
