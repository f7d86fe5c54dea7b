"""Functions for single requests as graphs, and the transfer of their results to the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gati.engine.backends.base import Lookup
from gati.engine.backends.cuda_device import Device, Lane
from gati.errors import BackendError, first_line

Run = Callable[..., tuple[Tensor, ...]]


class ToHost:
    """Transfers a static tensor to pinned host memory, which every transfer overwrites."""

    def __init__(self, device: Device, source: Tensor, lane: Lane) -> None:
        self._device = device
        self._source = source
        self._host = device.pinned(source)
        self._lane = lane
        self.known = device.event()

    def send(self) -> None:
        """Queue the copy to the host."""
        self._device.copy(self._source, self._host, self._lane)
        self._device.record(self.known, self._lane)

    def taken(self) -> Tensor:
        """Wait for the values and return a copy of them."""
        self._device.synchronize(self.known)
        return self._host.clone()


class Flag(ToHost):
    """Transfers score and probabilities of a lookup, `packed` as one tensor."""

    def __init__(self, device: Device, packed: Tensor, probabilities: Tensor, lane: Lane) -> None:
        super().__init__(device, packed, lane)
        self._probabilities = probabilities

    def score(self) -> float:
        """Wait for the score and return it."""
        self._device.synchronize(self.known)
        return float(self._host[0])

    def probabilities(self) -> Tensor:
        """The probabilities [1, K] that came with the score, on the host."""
        values = self._host[1:].reshape(self._probabilities.shape)
        return values.to(self._probabilities.dtype, copy=True)


class Captured:
    """A function of tensors as a graph for single requests, captured on first use; batches run it directly.

    With `adopts`, the inputs are static outputs of another graph, which are read in place. Without `keeps`,
    the results are on the host, and calls are thread-safe; with it, they are the graph's outputs, which each
    call overwrites.
    """

    def __init__(
        self, device: Device, run: Callable[..., Any], *, adopts: bool = False, keeps: bool = False
    ) -> None:
        self._device = device
        self._run = run
        self._adopts, self._keeps = adopts, keeps
        self._lock = threading.Lock()
        self._graph: Any = None
        self._tail = device.event()
        self._inputs: tuple[Tensor, ...] = ()
        self._outputs: tuple[Tensor, ...] = ()
        self._results: tuple[ToHost, ...] = ()
        self._alone = False  # whether the result is one tensor, not a tuple

    def __call__(self, *tensors: Tensor) -> Any:
        """Return the result for `tensors`; a batch of one is replayed."""
        if tensors[0].shape[0] != 1:
            return self._run(*tensors)
        with self._lock:
            if self._graph is None:
                self._capture(tensors)
            if not self._keeps:
                self._device.wait(self._tail, "main")  # the last call may have come on another stream
            for given, own in zip(tensors, self._inputs, strict=True):
                if given is not own:
                    self._device.copy(given, own, "main")
            self._device.replay(self._graph, "main")
            results = self._outputs
            if not self._keeps:
                for each in self._results:
                    each.send()
                self._device.record(self._tail, "main")
                results = tuple(each.taken() for each in self._results)
        return results[0] if self._alone else results

    def _capture(self, tensors: tuple[Tensor, ...]) -> None:
        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            result = self._run(*inputs)
            self._alone = isinstance(result, Tensor)
            return (result,) if isinstance(result, Tensor) else tuple(result)

        self._inputs = tensors if self._adopts else tuple(self._device.static(each) for each in tensors)
        self._graph, self._outputs = capture(self._device, run, self._inputs, "main", None)
        if not self._keeps:
            self._results = tuple(ToHost(self._device, each, "main") for each in self._outputs)


class CapturedLookup:
    """A lookup as a separate graph that reads `hidden` [1, ...] in place; the score is on the host.

    It is for measurements: from the launch until the score is known, as at the end of a segment.
    """

    def __init__(self, device: Device, lookup: Lookup, hidden: Tensor) -> None:
        self._device = device
        self._hidden = hidden
        self._graph, found = capture(device, packed_lookup(lookup), (self._hidden,), "main", None)
        packed, probabilities = found
        self._flag = Flag(device, packed, probabilities, "main")

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities [1, K] and the score [1]; another hidden output is copied first."""
        if hidden is not self._hidden:
            self._device.copy(hidden, self._hidden, "main")
        self._device.replay(self._graph, "main")
        self._flag.send()
        score = self._flag.score()
        return self._flag.probabilities(), torch.tensor([score], dtype=torch.float64)


def packed_lookup(lookup: Lookup) -> Run:
    """A lookup that also returns score and probabilities as one tensor [1 + K], for a single copy."""

    def run(hidden: Tensor) -> tuple[Tensor, ...]:
        probabilities, score = lookup(hidden)
        return torch.cat((score.reshape(1), probabilities.reshape(-1))), probabilities

    return run


def capture(
    device: Device, run: Run, inputs: Sequence[Tensor], lane: Lane, block: str | None
) -> tuple[Any, tuple[Tensor, ...]]:
    """As `Device.capture`. Raises BackendError if it fails, as for a function that makes the host wait."""
    try:
        return device.capture(run, inputs, lane)
    except RuntimeError as error:
        where = f" up to block '{block}'" if block else ""
        raise BackendError(
            f"backend cuda-graph cannot capture the network{where}: {first_line(error)}; use --backend torch"
        ) from error
