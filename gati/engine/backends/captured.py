"""Single requests as captured CUDA graphs: the order of launches, and when the host waits.

A request is copied into pinned memory, from which the first graph reads it. Each segment with its inline
lookup is one graph. It reads the static outputs of the previous graph and ends with one copy of score and
probabilities to pinned memory. An event follows the copy, and the host waits only for that event.

**Inline lookups.** While the host waits for a score, the device would idle: reading the score back and
launching the next graph take a *round trip*, which is measured when the path is built. If the next segment
takes the device no longer than a round trip, it is launched before the score is known. On a miss this hides
the round trip. On a hit, at most that one segment was launched in vain, and it ends by the time another
request could start, so it delays no request. Before a longer segment the host waits for the score: there a
hit saves work, and a round trip costs little. The exit that answers depends only on the input.

**Overlapped lookups** are separate graphs on the lane `lookups`. Each waits for an event after its segment,
and the host waits for its result. Meanwhile the network continues block by block up to the next lookup, with
at most two blocks queued.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gati.engine.backends.base import SingleExit, SinglePath
from gati.engine.backends.cuda_device import Device
from gati.engine.backends.replayed import Flag, Run, ToHost, as_tuple, capture, flagged
from gati.model.cuts import Segment

_BLOCKS_AHEAD = 2  # blocks queued at most during an overlapped lookup, so that a hit saves work


@dataclass(frozen=True)
class _Lookup:
    """A lookup at the end of a segment. `graph` is its own graph if overlapped, None if inline."""

    exit: SingleExit
    flag: Flag
    graph: Any = None

    @property
    def inline(self) -> bool:
        return self.graph is None


@dataclass(frozen=True)
class _Piece:
    """A segment as a graph; `sends` is the result that the graph itself copies to the host."""

    graph: Any
    lookup: _Lookup | None = None
    sends: ToHost | None = None

    @property
    def inline(self) -> bool:
        """Whether the graph includes the lookup."""
        return self.lookup is not None and self.lookup.inline


class CapturedPath(SinglePath):
    """The path of a single request as graphs. Thread-safe; one request runs at a time."""

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
        self._latest: _Piece | None = None  # launched last
        self._running = False  # whether a piece that the last request did not need may still run
        self._exits = len(exits)
        self._incoming, self._request = device.pinned(request), device.static(request)
        self._incoming.copy_(request)
        self._scores = ToHost(device, "main")
        self._pieces: list[_Piece] = []
        carried: tuple[Tensor, ...] = (self._incoming,)
        self._outputs: list[tuple[Tensor, ...]] = []  # kept, so that later graphs do not reuse their memory
        for segment in segments:
            carried = self._add(segment, carried, exits.get(segment.block or ""))
        self._speculative = [self._launches_early(position) for position in range(len(self._pieces))]

    def answer(self, x: Tensor) -> tuple[Tensor, int]:
        """As `SinglePath.answer`."""
        with self._lock:
            self._incoming.copy_(x)
            if self._running:  # wait for it: this request may come on another stream
                self._device.wait(self._tail, "main")
                self._running = False
            try:
                return self._walk()
            except BaseException:
                if self._pending is not None:
                    self._device.wait(self._pending.flag.known, "main")
                    self._pending = None
                self._device.record(self._tail, "main")
                self._device.synchronize(self._tail)  # a copy may still read what the next request overwrites
                raise

    # Capture ------------------------------------------------------------------------------------------------

    def _add(
        self, segment: Segment, carried: tuple[Tensor, ...], leaving: SingleExit | None
    ) -> tuple[Tensor, ...]:
        """Capture a segment on the outputs of the previous one; return its outputs."""
        flag = None if leaving is None else Flag(self._device, "lookups" if leaving.overlapped else "main")
        run = self._piece_run(segment, leaving, flag)
        graph, outputs = capture(self._device, run, carried, "main", segment.block)
        self._device.replay(graph, "main")  # gives the next warm-up realistic values
        self._outputs.append(outputs)
        if leaving is None or flag is None:
            self._pieces.append(_Piece(graph, sends=None if segment.block else self._scores))
            return outputs
        if not leaving.overlapped:
            self._pieces.append(_Piece(graph, _Lookup(leaving, flag), flag))
            return outputs
        *through, hidden = outputs
        look = flagged(leaving.lookup, flag)
        lookup_graph, _ = capture(self._device, look, (hidden,), "lookups", segment.block)
        self._pieces.append(_Piece(graph, _Lookup(leaving, flag, lookup_graph)))
        return tuple(through)

    def _piece_run(self, segment: Segment, leaving: SingleExit | None, flag: Flag | None) -> Run:
        """A segment to capture, with the copies from and to the host.

        It includes an inline lookup. For an overlapped one it also returns the hidden output.
        """
        first = not self._pieces

        def run(*carried: Tensor) -> tuple[Tensor, ...]:
            if first:
                carried = (self._request.copy_(carried[0], non_blocking=True),)
            through = as_tuple(segment.run(*carried))
            if segment.block is None:
                self._scores(through[0])
            if leaving is None or flag is None:
                return through
            if leaving.overlapped:
                return (*through, through[0].clone() if segment.hidden_changes_later else through[0])
            flag.pack(*leaving.lookup(through[0]))
            return through

        return run

    def _launches_early(self, position: int) -> bool:
        """Whether to launch this piece before the score of the previous one is known."""
        before, piece = self._pieces[position - 1], self._pieces[position]
        lookup = before.lookup
        if position == 0 or lookup is None or not lookup.inline:
            return False

        def queue() -> None:
            self._device.replay(before.graph, "main")

        def launch_and_wait() -> None:
            self._launch(before)
            lookup.flag.wait()

        round_trip_ms = self._device.host_ms(launch_and_wait) - self._device.device_ms(queue)
        return self._device.device_ms(lambda: self._device.replay(piece.graph, "main")) <= round_trip_ms

    # A request ----------------------------------------------------------------------------------------------

    def _walk(self) -> tuple[Tensor, int]:
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
        return self._scores.wait().clone(), self._exits

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
        """Wait for the pending lookup; return its answer on a hit, else None."""
        pending = self._pending
        if pending is None:
            return None
        score = pending.flag.score()
        self._pending = None
        if score >= pending.exit.threshold:  # False for NaN
            self._running = self._latest is None or self._latest.lookup is not pending
            if self._running:
                self._device.record(self._tail, "main")
            return pending.flag.probabilities(), pending.exit.position
        return None

    def _launch(self, piece: _Piece) -> None:
        self._device.replay(piece.graph, "main")
        self._latest = piece
        if piece.sends is not None:
            piece.sends.launched()

    def _fork(self, lookup: _Lookup) -> None:
        """Queue an overlapped lookup after its segment; an inline one was launched with the segment."""
        if lookup.inline:
            return
        self._device.record(self._forked, "main")
        self._device.wait(self._forked, "lookups")
        self._device.replay(lookup.graph, "lookups")
        lookup.flag.launched()

    def _keep_pace(self, ahead: int) -> None:
        """Wait while too many blocks are queued and the overlapped lookup still runs."""
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


class CapturedNetwork:
    """A network without exits, captured at the first single request; `batches` runs batches. Thread-safe.

    A single request may be on any device; its result is on the CPU.
    """

    def __init__(
        self, device: Device, run: Callable[[Tensor], Tensor], batches: Callable[[Tensor], Tensor]
    ) -> None:
        self._device = device
        self._whole = Segment(0, None, run, ())
        self._batches = batches
        self._lock = threading.Lock()
        self._path: CapturedPath | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The result for `x` [B, ...]."""
        if x.shape[0] != 1:
            return self._batches(x)
        with self._lock:
            if self._path is None:
                self._path = CapturedPath(self._device, x, [self._whole], {})
        return self._path.answer(x)[0]
