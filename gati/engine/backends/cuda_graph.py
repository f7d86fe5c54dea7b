"""CUDA graphs: the operators of backend `torch`, launched per segment instead of one by one.

Tested against a fake device; not yet run on hardware.
"""

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
from gati.model.segments import TracedModel

_NEEDS = "backend cuda-graph needs a CUDA device; load with --device cuda"


@register_backend("cuda-graph")
class CudaGraphBackend(TorchBackend):
    """Replays single requests as CUDA graphs; batches run as on backend `torch`."""

    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    automatic: ClassVar[bool] = True

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

    def path(self, traced: TracedModel, blocks: Sequence[str]) -> Path:
        """The network, as a graph for single requests, and its segments for batches, as on `torch`."""
        return Path(Captured(self.device(traced.device), traced.base), traced.cut(blocks))

    def single(
        self, traced: TracedModel, segments: Sequence[Segment], exits: Mapping[str, SingleExit]
    ) -> SinglePath:
        """As `SegmentBackend.single`."""
        with torch.inference_mode():
            return CapturedPath(self.device(traced.device), traced.example(), segments, dict(exits))

    def timed_path(self, traced: TracedModel, blocks: Sequence[str]) -> Path:
        """As `SegmentBackend.timed_path`: each segment is a graph that reads the previous one's outputs."""
        device, plain = self.device(traced.device), self.path(traced, blocks)
        segments = tuple(
            replace(each, run=Captured(device, each.run, adopts=each.index > 0, keeps=True))
            for each in plain.segments
        )
        return Path(plain.base, segments)

    def timed_lookup(self, cache: nn.Module, hidden: Tensor) -> Lookup:
        """As `SegmentBackend.timed_lookup`; a separate graph, which costs one more launch."""
        return CapturedLookup(self.device(hidden.device), self.lookup(cache, hidden), hidden)

    def device(self, device: torch.device) -> Device:
        """The calls on `device`. Raises BackendError if it is not a CUDA device."""
        if device.type != "cuda":
            raise BackendError(_NEEDS)
        return CudaDevice(device)
