"""Lookups in 8-bit integers inside a network that computes in float32.

The network's answers do not change, so a miss costs no agreement. Every request runs lookups, so faster ones
help. They may be inexact, because their thresholds are certified on the engine's own answers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from gati.engine.backends.base import Graph, GraphBackend, register_backend
from gati.engine.backends.onnxruntime import OnnxRuntimeBackend
from gati.engine.backends.openvino import OpenVinoBackend
from gati.engine.exits import EngineExit
from gati.errors import BackendError
from gati.model.segments import TracedModel
from gati.types import OutputsKind

if TYPE_CHECKING:
    from gati.engine.graph.convert import Converter
    from gati.engine.graph.quantise_lookups import QuantisingConverter


class Int8Lookups(GraphBackend):
    """A graph backend whose lookups are quantised after training on `calibration` [n, ...].

    Without calibration inputs it runs only stored graphs and networks without exits. Quantised lookups are
    stored in the folder `kept`, if given.
    """

    lookup_precision: ClassVar[Literal["f32", "bf16", "int8"] | None] = "int8"
    stored_as: ClassVar[str] = "onnx-int8-lookups"
    calibrated: ClassVar[bool] = True

    def __init__(self, calibration: Tensor | None = None, kept: FilePath | None = None) -> None:
        super().__init__()
        self._calibration = calibration
        self._kept = kept
        self._quantising: QuantisingConverter | None = None

    def assembled(
        self,
        traced: TracedModel,
        settings: Sequence[Sequence[EngineExit]],
        outputs_kind: OutputsKind,
        *,
        convert: Converter | None = None,
        cuts: Collection[str] = (),
    ) -> Iterator[bytes]:
        """As `GraphBackend.assembled`; lookups are quantised once for all settings."""
        from gati.engine.graph.convert import Converter
        from gati.engine.graph.quantise_lookups import QuantisingConverter
        from gati.engine.graph.stages import build_stages

        convert = convert or Converter()
        if settings and settings[0]:
            if self._calibration is None:
                raise BackendError(
                    f"backend '{self.name}' has no stored quantised lookups (graphs/ in the library); "
                    "run gati compose again"
                )
            if self._quantising is None:
                self._quantising = QuantisingConverter(convert, self._calibration, self._kept)
            convert = self._quantising.for_network(build_stages(traced, settings[0], outputs_kind, cuts))
        yield from super().assembled(traced, settings, outputs_kind, convert=convert, cuts=cuts)

    def _compiled_from(self, kept: FilePath, model: bytes, threads: int | None) -> Graph:
        from gati.engine.graph.integers import sums_are_exact, uses_8_bits

        if not sums_are_exact() and uses_8_bits(model):
            raise BackendError(
                f"{kept} was made on a processor that adds 8-bit integers without overflow (VNNI), as this "
                "one does not: its answers would not be those that were certified; compose again here"
            )
        return super()._compiled_from(kept, model, threads)


@register_backend("openvino-int8-lookups")
class OpenVinoInt8LookupsBackend(Int8Lookups, OpenVinoBackend):
    """OpenVINO on the CPU: the network in float32, lookups in 8-bit integers."""

    same_network_as: ClassVar[str | None] = "openvino"
    needed: ClassVar[tuple[str, ...]] = (*OpenVinoBackend.needed, "onnxruntime")  # quantises lookups
    extra: ClassVar[str] = "openvino,onnxruntime"


@register_backend("onnxruntime-int8-lookups")
class OnnxRuntimeInt8LookupsBackend(Int8Lookups, OnnxRuntimeBackend):
    """ONNX Runtime on the CPU: the network in float32, lookups in 8-bit integers."""

    same_network_as: ClassVar[str | None] = "onnxruntime"
