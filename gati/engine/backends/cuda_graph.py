"""CUDA graphs: one launch per segment instead of one per operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from gati.engine.backends.base import Path, SingleExit, SinglePath, register_backend
from gati.engine.backends.batches import BatchGraphs, GraphTurns, operators_of
from gati.engine.backends.captured import CapturedNetwork, CapturedPath
from gati.engine.backends.cuda_device import CudaDevice, Device, why_no_cuda
from gati.engine.backends.replayed import CapturedLookup, CapturedSegment
from gati.engine.backends.torch import TorchBackend
from gati.engine.exits import Lookup
from gati.errors import BackendError
from gati.model.cuts import Segment
from gati.model.entry import INPUT_KIND
from gati.model.segments import TracedModel

_NEEDS = "backend cuda-graph needs a CUDA device; load with --device cuda"


class CapturingBackend(TorchBackend):
    """On CUDA, replays graphs of the functions of `operators` and `plain_lookup`; on the CPU, calls them."""

    def operators(self, traced: TracedModel, blocks: Sequence[str]) -> Path:
        """The network and its segments as functions."""
        return super().path(traced, blocks)

    def path(self, traced: TracedModel, blocks: Sequence[str]) -> Path:
        """The network, as a graph for single requests, and its segments for batches."""
        plain, device = self.operators(traced, blocks), self.device(traced.device)
        alone = self.device(traced.device)  # graphs of one device share memory, and these know no turns
        if device is None or alone is None:
            return plain
        turns = GraphTurns(device)
        takes: tuple[bool, ...] = (True,)
        segments = []
        for each in plain.segments:
            gives = None if each.block is None else tuple(tensor.batched for tensor in each.carried)
            graphs = BatchGraphs(turns, each.run, takes, gives, each.block)
            segments.append(each if _is_empty(traced, each) else replace(each, run=graphs))
            takes = gives or ()
        batches = BatchGraphs(turns, plain.base, (True,), None)
        return Path(CapturedNetwork(alone, plain.base, batches), tuple(segments))

    def lookup(self, cache: nn.Module, hidden: Tensor) -> Lookup:
        """As `SegmentBackend.lookup`; batches run as graphs."""
        plain, device = self.plain_lookup(cache, hidden), self.device(hidden.device)
        return plain if device is None else BatchGraphs(GraphTurns(device), plain, (True,), (True, True))

    def plain_lookup(self, cache: nn.Module, hidden: Tensor) -> Lookup:
        """The cache as a function."""
        return super().lookup(cache, hidden)

    def single(
        self, traced: TracedModel, segments: Sequence[Segment], exits: Mapping[str, SingleExit]
    ) -> SinglePath | None:
        """As `SegmentBackend.single`."""
        device = self.device(traced.device)
        if device is None:
            return None
        pieces = [replace(each, run=operators_of(each.run)) for each in segments]
        leaving = {name: each._replace(lookup=operators_of(each.lookup)) for name, each in exits.items()}
        with torch.inference_mode():
            return CapturedPath(device, traced.example(), pieces, leaving)

    def timed_path(self, traced: TracedModel, blocks: Sequence[str]) -> Path:
        """As `SegmentBackend.timed_path`: each segment is a graph that reads the previous one's outputs."""
        plain, device = self.operators(traced, blocks), self.device(traced.device)
        if device is None:
            return plain
        first = [_is_empty(traced, each) for each in plain.segments].index(False)
        segments = tuple(
            each
            if _is_empty(traced, each)
            else replace(each, run=CapturedSegment(device, each.run, adopts=each.index > first))
            for each in plain.segments
        )
        return Path(CapturedNetwork(device, plain.base, plain.base), segments)

    def timed_lookup(self, cache: nn.Module, hidden: Tensor) -> Lookup:
        """As `SegmentBackend.timed_lookup`; a separate graph, so the time includes one more launch."""
        lookup, device = self.plain_lookup(cache, hidden), self.device(hidden.device)
        return lookup if device is None else CapturedLookup(device, lookup, hidden)

    def device(self, device: torch.device) -> Device | None:
        """The `Device` for captured requests on `device`; None if requests are not captured there."""
        return CudaDevice(device) if device.type == "cuda" else None


def _is_empty(traced: TracedModel, segment: Segment) -> bool:
    """Whether the segment has no operators, because it ends at the network's input."""
    return segment.block is not None and traced.block_kinds[segment.block] == INPUT_KIND


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
        """Return why the backend cannot run on this machine, or None if it can."""
        return why_no_cuda()

    @classmethod
    def installed(cls) -> bool:
        """Whether there is a CUDA device."""
        return cls.unavailable() is None

    def device(self, device: torch.device) -> Device | None:
        """The `Device` for captured requests. Raises BackendError if `device` is not a CUDA device."""
        if device.type != "cuda":
            raise BackendError(_NEEDS)
        return CudaDevice(device)
