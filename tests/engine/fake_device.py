"""A device that records what is asked of it and computes on the CPU, as late as a real one might.

Work is queued and only done when the host waits for it; what a real device may do in another order, this one
does in the order that is asked for, so that an event that is missing shows as a wrong answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from gati.engine.backends.cuda_device import Lane

Order = Literal["needed", "main first", "lookups first"]


class Event:
    """Happened when its lane has done what was queued before `at`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lane: Lane = "main"
        self.at = 0


class FakeDevice:
    """Two queues; `log` has every operation in the order of the calls, graphs by number in that of capture.

    With `order` "needed" nothing is done before it must be; otherwise one lane runs as far ahead as events
    let it whenever the host waits. `pays` says whether segments take less than a round trip. While `slow` is
    above zero, so many queries find the lookup beside not yet done. `longest` is how many graphs were queued
    on `main` at most.
    """

    def __init__(self, order: Order = "needed", *, pays: bool = False) -> None:
        self.order, self.pays, self.slow, self.longest = order, pays, 0, 0
        self.log: list[str] = []
        self.done: list[str] = []
        self._queues: dict[Lane, list[tuple[str, Callable[[], bool]]]] = {"main": [], "lookups": []}
        self._position: dict[Lane, int] = {"main": 0, "lookups": 0}
        self._graphs: list[tuple[Lane, Callable[[], None]]] = []
        self._events = 0
        self._pinned: list[Tensor] = []

    def static(self, like: Tensor) -> Tensor:
        return like.clone()

    def pinned(self, like: Tensor) -> Tensor:
        made = torch.empty_like(like)
        self._pinned.append(made)
        return made

    def capture(
        self, run: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], lane: Lane
    ) -> tuple[Any, tuple[Tensor, ...]]:
        self.drain()  # as torch.cuda.graph does
        before = [tensor.clone() for tensor in inputs]
        known = len(self._pinned)
        outputs = run(*inputs)
        owned = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        for tensor in outputs:
            if tensor.untyped_storage().data_ptr() not in owned:
                tensor.fill_(math.nan)  # a capture computes nothing
        for tensor in self._pinned[known:]:
            tensor.fill_(math.nan)
        for tensor, value in zip(inputs, before, strict=True):
            tensor.copy_(value)

        def replay() -> None:
            fresh = run(*inputs)
            for tensor, value in zip(outputs, fresh, strict=True):
                if tensor.data_ptr() != value.data_ptr():
                    tensor.copy_(value)

        self._graphs.append((lane, replay))
        return len(self._graphs) - 1, outputs

    def replay(self, graph: Any, lane: Lane) -> None:
        captured_on, replay = self._graphs[graph]
        assert captured_on == lane, "graphs of one lane share memory"
        self._queue(lane, f"graph {graph}", replay)
        queued = [name for name, _ in self._queues["main"] if name.startswith("graph")]
        self.longest = max(self.longest, len(queued))

    def copy(self, source: Tensor, target: Tensor) -> None:
        def copied() -> None:
            target.copy_(source)

        self._queue("main", "copy", copied)

    def event(self) -> Event:
        self._events += 1
        return Event(self._events - 1)

    def record(self, event: Event, lane: Lane) -> None:
        event.lane, event.at = lane, self._position[lane] + len(self._queues[lane])
        self.log.append(f"{lane}: record")

    def wait(self, event: Event, lane: Lane) -> None:
        source, at = event.lane, event.at
        self.log.append(f"{lane}: wait")
        self._queues[lane].append(("wait", lambda: self._position[source] >= at))

    def query(self, event: Event) -> bool:
        if event.lane == "lookups" and self.slow > 0:
            self.slow -= 1
            return False
        self._reach(event.lane, event.at)  # sooner or later it happens
        return True

    def synchronize(self, event: Event) -> None:
        self.log.append("host waits")
        self._run_ahead()
        self._reach(event.lane, event.at)

    def taken(self, tensor: Tensor) -> Tensor:
        self._run_ahead()
        self._reach("main", self._position["main"] + len(self._queues["main"]))
        return tensor.clone()

    def device_ms(self, queue: Callable[[], None]) -> float:
        queue()
        return 0.0 if self.pays else 2.0

    def host_ms(self, work: Callable[[], None]) -> float:
        work()
        return 1.0

    def calls(self) -> list[str]:
        """The log since the last time, without copies and events of the request's begin and end."""
        calls, self.log = self.log, []
        return calls

    @property
    def captured(self) -> int:
        """Graphs so far."""
        return len(self._graphs)

    @property
    def outstanding(self) -> int:
        """Operations queued and not done."""
        return sum(len(queue) for queue in self._queues.values())

    def _queue(self, lane: Lane, name: str, work: Callable[[], None]) -> None:
        self.log.append(f"{lane}: {name}")

        def run() -> bool:
            work()
            self.done.append(name)
            return True

        self._queues[lane].append((name, run))

    def _step(self, lane: Lane) -> bool:
        """Do the next operation of a lane; False if it is empty or has to wait."""
        if not self._queues[lane] or not self._queues[lane][0][1]():
            return False
        self._queues[lane].pop(0)
        self._position[lane] += 1
        return True

    def _reach(self, lane: Lane, at: int) -> None:
        other: Lane = "lookups" if lane == "main" else "main"
        while self._position[lane] < at:
            if not self._step(lane):
                assert self._step(other), "both lanes wait for each other"

    def _run_ahead(self) -> None:
        if self.order == "needed":
            return
        lane: Lane = "main" if self.order == "main first" else "lookups"
        while self._step(lane):
            pass

    def drain(self) -> None:
        """Do everything that is queued."""
        for lane in self._queues:
            self._reach(lane, self._position[lane] + len(self._queues[lane]))
