"""CUDA graphs: single requests are launched per segment instead of operator by operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from gati.engine.backends.base import Lookup, Path, SingleExit, SinglePath, register_backend
from gati.engine.backends.captured import CapturedPath
from gati.engine.backends.cuda_device import CudaDevice, Device, why_no_cuda
from gati.engine.backends.replayed import Captured, CapturedLookup
from gati.engine.backends.torch import TorchBackend
from gati.errors import BackendError
from gati.model.cuts import Segment
from gati.model.entry import INPUT_KIND
from gati.model.segments import TracedModel

_NEEDS = "backend cuda-graph needs a CUDA device; load with --device cuda"


class CapturingBackend(TorchBackend):
    """On CUDA, replays single requests as graphs of what `operators` and `lookup` return.

    Batches, and requests on the CPU, call these functions themselves.
    """

    def operators(self, traced: TracedModel, blocks: Sequence[str]) -> Path:
        """The network and its segments as functions."""
        return super().path(traced, blocks)

    def path(self, traced: TracedModel, blocks: Sequence[str]) -> Path:
        """The network, as a graph for single requests, and its segments for batches."""
        plain, device = self.operators(traced, blocks), self.device(traced.device)
        return plain if device is None else Path(Captured(device, plain.base), plain.segments)

    def single(
        self, traced: TracedModel, segments: Sequence[Segment], exits: Mapping[str, SingleExit]
    ) -> SinglePath | None:
        """As `SegmentBackend.single`."""
        device = self.device(traced.device)
        if device is None:
            return None
        with torch.inference_mode():
            return CapturedPath(device, traced.example(), segments, dict(exits))

    def timed_path(self, traced: TracedModel, blocks: Sequence[str]) -> Path:
        """As `SegmentBackend.timed_path`: each segment is a graph that reads the previous one's outputs."""
        plain, device = self.operators(traced, blocks), self.device(traced.device)
        if device is None:
            return plain
        kinds = traced.block_kinds
        empty = [each.block is not None and kinds[each.block] == INPUT_KIND for each in plain.segments]
        first = empty.index(False)  # nothing runs before the input
        segments = tuple(
            each
            if empty[each.index]
            else replace(each, run=Captured(device, each.run, adopts=each.index > first, keeps=True))
            for each in plain.segments
        )
        return Path(Captured(device, plain.base), segments)

    def timed_lookup(self, cache: nn.Module, hidden: Tensor) -> Lookup:
        """As `SegmentBackend.timed_lookup`; a separate graph, which costs one more launch."""
        lookup, device = self.lookup(cache, hidden), self.device(hidden.device)
        return lookup if device is None else CapturedLookup(device, lookup, hidden)

    def device(self, device: torch.device) -> Device | None:
        """The calls on `device`; None if requests are not captured there."""
        return CudaDevice(device) if device.type == "cuda" else None


@register_backend("cuda-graph")
class CudaGraphBackend(CapturingBackend):
    """Replays the operators of backend `torch`."""

    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    automatic: ClassVar[tuple[str, ...]] = ("cuda",)

    def __init__(self) -> None:
        reason = self.unavailable()
        if reason is not None:
            raise BackendError(f"{_NEEDS} ({reason})")

    @classmethod
    def unavailable(cls) -> str | None:
        """Return why it cannot run on this machine, or None if it can."""
        return why_no_cuda()

    @classmethod
    def available(cls) -> bool:
        """Whether there is a CUDA device."""
        return cls.unavailable() is None

    @classmethod
    def installed(cls) -> bool:
        """Whether there is a CUDA device."""
        return cls.available()

    def device(self, device: torch.device) -> Device | None:
        """The calls on `device`. Raises BackendError if it is not a CUDA device."""
        if device.type != "cuda":
            raise BackendError(_NEEDS)
        return CudaDevice(device)
