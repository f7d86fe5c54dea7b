"""Functions for single requests as graphs, from host memory to host memory.

The copies to and from pinned memory are part of the graphs, so a request needs one launch, not three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gati.engine.backends.cuda_device import Device, Lane
from gati.engine.exits import Lookup
from gati.errors import BackendError, first_line

Run = Callable[..., tuple[Tensor, ...]]


class ToHost:
    """Copies a result to pinned memory at the end of a graph; every replay overwrites it."""

    def __init__(self, device: Device, lane: Lane) -> None:
        self._device = device
        self._lane = lane
        self._host: Tensor | None = None
        self.known = device.event()

    def __call__(self, source: Tensor) -> None:
        """Copy `source`; call it inside the captured function."""
        if self._host is None:
            self._host = self._device.pinned(source)
        self._host.copy_(source, non_blocking=True)

    def launched(self) -> None:
        """Record the event; call it right after launching the graph."""
        self._device.record(self.known, self._lane)

    def wait(self) -> Tensor:
        """Wait for the values and return them; the next replay overwrites them."""
        self._device.synchronize(self.known)
        return self.values

    @property
    def values(self) -> Tensor:
        """The values in pinned memory, without waiting; valid after `wait`."""
        if self._host is None:
            raise AssertionError("the graph was not captured")
        return self._host


class Flag(ToHost):
    """Copies score and probabilities of a lookup to the host as one float32 tensor."""

    def __init__(self, device: Device, lane: Lane) -> None:
        super().__init__(device, lane)
        self._shape, self._dtype = torch.Size(), torch.float32  # of the probabilities

    def pack(self, probabilities: Tensor, score: Tensor) -> None:
        """Copy a lookup's result; call it inside the captured function."""
        self._shape, self._dtype = probabilities.shape, probabilities.dtype
        self(torch.cat((score.reshape(1).float(), probabilities.reshape(-1).float())))

    def score(self) -> float:
        """Wait for the score and return it."""
        return float(self.wait().numpy()[0])

    def probabilities(self) -> Tensor:
        """The lookup's probabilities [1, K]; call it after `score`."""
        values = self.values[1:].reshape(self._shape)
        return values.to(self._dtype, copy=True)


class CapturedSegment:
    """A segment as a graph, for measurements; its outputs are overwritten by each call.

    With `adopts`, the inputs of the first call are static outputs of another graph, read in place.
    """

    def __init__(self, device: Device, run: Callable[..., Any], *, adopts: bool) -> None:
        self._device = device
        self._run = run
        self._adopts = adopts
        self._graph: Any = None
        self._inputs: tuple[Tensor, ...] = ()
        self._outputs: tuple[Tensor, ...] = ()
        self._alone = False  # whether the result is one tensor, not a tuple

    def __call__(self, *tensors: Tensor) -> Any:
        """The result for `tensors` [1, ...]."""
        if self._graph is None:
            self._capture(tensors)
        for given, own in zip(tensors, self._inputs, strict=True):
            if given is not own:
                self._device.copy(given, own)
        self._device.replay(self._graph, "main")
        return self._outputs[0] if self._alone else self._outputs

    def _capture(self, tensors: tuple[Tensor, ...]) -> None:
        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            result = self._run(*inputs)
            self._alone = isinstance(result, Tensor)
            return as_tuple(result)

        self._inputs = tensors if self._adopts else tuple(self._device.static(each) for each in tensors)
        self._graph, self._outputs = capture(self._device, run, self._inputs, "main", None)


class CapturedLookup:
    """A lookup as a separate graph that reads `hidden` [1, ...] in place; the score is on the host.

    For measurements: a call takes from the launch until the score is known, as at the end of a segment.
    """

    def __init__(self, device: Device, lookup: Lookup, hidden: Tensor) -> None:
        self._device = device
        self._hidden = hidden
        self._flag = Flag(device, "main")
        self._graph, _ = capture(device, flagged(lookup, self._flag), (hidden,), "main", None)

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities [1, K] and the score [1]; copies another hidden output into place first."""
        if hidden is not self._hidden:
            self._device.copy(hidden, self._hidden)
        self._device.replay(self._graph, "main")
        self._flag.launched()
        score = self._flag.score()
        return self._flag.probabilities(), torch.tensor([score], dtype=torch.float64)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    """The result of a segment as a tuple; the last segment returns a single tensor."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def flagged(lookup: Lookup, flag: Flag) -> Run:
    """A lookup whose result is copied to the host through `flag`."""

    def run(hidden: Tensor) -> tuple[Tensor, ...]:
        flag.pack(*lookup(hidden))
        return ()

    return run


def capture(
    device: Device, run: Run, inputs: Sequence[Tensor], lane: Lane, block: str | None
) -> tuple[Any, tuple[Tensor, ...]]:
    """As `Device.capture`. Raises BackendError if capture fails, for example if `run` makes the host wait."""
    try:
        return device.capture(run, inputs, lane)
    except RuntimeError as error:
        where = f" up to block '{block}'" if block else ""
        raise BackendError(
            f"backend cuda-graph cannot capture the network{where}: {first_line(error)}; use --backend torch"
        ) from error
