"""Functions of batches as captured CUDA graphs, one for each of a few batch sizes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gati.engine.backends.cuda_device import Device
from gati.engine.backends.replayed import as_tuple, capture

LARGEST_CAPTURED = 32  # rows; in larger batches the launches of single operators cost little


@dataclass(frozen=True)
class _Captured:
    graph: Any
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class GraphTurns:
    """Graphs of one `Device` share memory, so they run one after the other, even on different streams."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.lock = threading.Lock()
        self.tail = device.event()


class BatchGraphs:
    """`operators`, a function of tensors, as graphs for batches of 1, 2, 4, 8, 16 and 32 rows.

    Batches of other sizes run in the graph of the next size, and results of its surplus rows are dropped.
    Larger batches are not captured. `takes_rows` and `gives_rows` say which inputs and outputs have one row
    per input; `gives_rows` is None if the function returns a single tensor. `block` is for messages.
    Thread-safe.
    """

    def __init__(
        self,
        turns: GraphTurns,
        operators: Callable[..., Any],
        takes_rows: Sequence[bool],
        gives_rows: Sequence[bool] | None,
        block: str | None = None,
    ) -> None:
        self.operators = operators
        self._turns = turns
        self._block = block
        self._takes_rows = tuple(takes_rows)
        self._gives_rows = None if gives_rows is None else tuple(gives_rows)
        self._graphs: dict[int, _Captured] = {}

    def __call__(self, *tensors: Tensor) -> Any:
        """The result of `operators` for `tensors`."""
        rows = tensors[self._takes_rows.index(True)].shape[0]
        if not 0 < rows <= LARGEST_CAPTURED:
            return self.operators(*tensors)
        size = 1 << (rows - 1).bit_length()
        with self._turns.lock:
            device = self._turns.device
            device.wait(self._turns.tail, "main")  # the last call may have come on another stream
            try:
                if size not in self._graphs:
                    self._graphs[size] = self._capture(tensors, size)
                captured = self._graphs[size]
                for given, own, by_row in zip(tensors, captured.inputs, self._takes_rows, strict=True):
                    device.copy(given, own[:rows] if by_row else own)
                device.replay(captured.graph, "main")
                gives = self._gives_rows or (True,)
                results = tuple(
                    device.taken(own[:rows] if by_row else own)
                    for own, by_row in zip(captured.outputs, gives, strict=True)
                )
            finally:
                device.record(self._turns.tail, "main")
        return results if self._gives_rows is not None else results[0]

    def _capture(self, tensors: Sequence[Tensor], size: int) -> _Captured:
        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            return as_tuple(self.operators(*inputs))

        inputs = tuple(
            self._turns.device.static(given[:1].expand(size, *given.shape[1:]) if by_row else given)
            for given, by_row in zip(tensors, self._takes_rows, strict=True)
        )
        graph, outputs = capture(self._turns.device, run, inputs, "main", self._block)
        return _Captured(graph, inputs, outputs)


def operators_of(run: Callable[..., Any]) -> Callable[..., Any]:
    """The function whose graphs `run` replays, or `run` itself: a capture cannot contain a replay."""
    return run.operators if isinstance(run, BatchGraphs) else run
