"""The few GPU calls of captured requests; code that uses them can be tested without a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Lane = Literal["main", "lookups"]

_WARM_UP_CALLS = 3
_TIMED_CALLS = 15
_CAPTURING = threading.Lock()  # one capture at a time in a process


class Device(Protocol):
    """Two ordered lanes of work with events between them; on CUDA, lanes are streams.

    `main` is the caller's current stream. Only `synchronize`, `device_ms`, `host_ms` and, if
    necessary, `taken` make the host wait.
    """

    def static(self, like: Tensor) -> Tensor:
        """A copy of `like` at a fixed address."""

    def pinned(self, like: Tensor) -> Tensor:
        """Pinned host memory for an asynchronous copy of `like`."""

    def capture(
        self, run: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], lane: Lane
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """`run(*inputs)` as a graph, and its outputs, which each replay overwrites.

        Capturing does not change `inputs`. Copies from and to pinned memory become part of the graph. Graphs
        of one lane share memory, so they must be replayed one after the other.
        """

    def replay(self, graph: Any, lane: Lane) -> None:
        """Queue a graph."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Queue a copy into static or pinned memory on `main`."""

    def event(self) -> Any:
        """A new event, not recorded yet."""

    def record(self, event: Any, lane: Lane) -> None:
        """Record the event: it happens when all earlier work on the lane is done."""

    def wait(self, event: Any, lane: Lane) -> None:
        """Make later work on the lane wait for the event; an unrecorded event counts as happened."""

    def query(self, event: Any) -> bool:
        """Whether the event has happened; does not wait."""

    def synchronize(self, event: Any) -> None:
        """Make the host wait for the event."""

    def taken(self, tensor: Tensor) -> Tensor:
        """A copy on the device, ordered after the work on `main`; later replays do not change it."""

    def device_ms(self, queue: Callable[[], None]) -> float:
        """The device time of the work that `queue` puts on `main`."""

    def host_ms(self, work: Callable[[], None]) -> float:
        """The host time of `work`, which must itself wait for the device."""


class CudaDevice:
    """The calls on a CUDA device. `main` is the current stream at the time of each call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Captures and warm-up of a lane use one stream, which owns the memory pool and cuBLAS workspaces. So
        # concurrent lanes never share either.
        self._streams: dict[Lane, torch.cuda.Stream] = {
            "main": torch.cuda.Stream(device),
            "lookups": torch.cuda.Stream(device),
        }
        self._pools: dict[Lane, Any] = {lane: torch.cuda.graph_pool_handle() for lane in self._streams}

    def static(self, like: Tensor) -> Tensor:
        """As `Device.static`."""
        with torch.inference_mode(False):  # it is written to in and outside inference mode
            return torch.empty(like.shape, dtype=like.dtype, device=self._device).copy_(like)

    def pinned(self, like: Tensor) -> Tensor:
        """As `Device.pinned`."""
        with torch.inference_mode(False):
            return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)

    def capture(
        self, run: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], lane: Lane
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """As `Device.capture`, after warm-up on copies: an operator may change its input in place."""
        stream, graph = self._streams[lane], torch.cuda.CUDAGraph()
        with _CAPTURING, torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP_CALLS):
                    run(*map(_copy, inputs))
            current.wait_stream(stream)
            # "thread_local": other threads may serve requests and allocate memory during a capture.
            with torch.cuda.graph(
                graph, pool=self._pools[lane], stream=stream, capture_error_mode="thread_local"
            ):
                outputs = run(*inputs)
        return graph, outputs

    def replay(self, graph: Any, lane: Lane) -> None:
        """As `Device.replay`."""
        if lane == "main":
            graph.replay()
            return
        with torch.cuda.stream(self._streams["lookups"]):
            graph.replay()

    def copy(self, source: Tensor, target: Tensor) -> None:
        """As `Device.copy`."""
        target.copy_(source, non_blocking=True)

    def event(self) -> Any:
        """As `Device.event`."""
        return torch.cuda.Event()

    def record(self, event: Any, lane: Lane) -> None:
        """As `Device.record`."""
        event.record(self._stream(lane))

    def wait(self, event: Any, lane: Lane) -> None:
        """As `Device.wait`."""
        self._stream(lane).wait_event(event)

    def query(self, event: Any) -> bool:
        """As `Device.query`."""
        return bool(event.query())

    def synchronize(self, event: Any) -> None:
        """As `Device.synchronize`."""
        event.synchronize()

    def taken(self, tensor: Tensor) -> Tensor:
        """As `Device.taken`; the host does not wait here."""
        return tensor.clone()

    def device_ms(self, queue: Callable[[], None]) -> float:
        """As `Device.device_ms`: the median of a few runs, timed by CUDA events."""
        times = []
        for _ in range(_TIMED_CALLS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(self._stream("main"))
            queue()
            end.record(self._stream("main"))
            end.synchronize()
            times.append(float(begin.elapsed_time(end)))
        return median(times)

    def host_ms(self, work: Callable[[], None]) -> float:
        """As `Device.host_ms`: the median of a few runs."""
        times = []
        for _ in range(_TIMED_CALLS):
            torch.cuda.synchronize(self._device)
            start = time.perf_counter_ns()
            work()
            times.append((time.perf_counter_ns() - start) / 1e6)
        return median(times)

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return self._streams["lookups"] if lane == "lookups" else torch.cuda.current_stream(self._device)


def _copy(tensor: Tensor) -> Tensor:
    """A copy, an inference tensor only if `tensor` is one: compiled code is specialised for one kind."""
    with torch.inference_mode(tensor.is_inference()):
        return tensor.clone()


def why_no_cuda() -> str | None:
    """Return why no CUDA device can be used, or None if one can."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return f"torch {torch.__version__} sees no CUDA device"
