"""The early-exit network in 8-bit integers: an ONNX graph quantised after training, in OpenVINO's format.

It is quantised once, with thresholds that no score reaches. So every calibration input runs every lookup and
every segment, and value ranges cover all inputs, not only those that missed the earlier caches. The real
thresholds are set afterwards.
"""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import Tensor

from gati.engine.exits import EngineExit
from gati.engine.graph.silence import silenced
from gati.engine.graph.stages import float32_at_least

_NEVER = 1e30
_XML, _WEIGHTS = "model.xml", "model.bin"
_MOST_INPUTS = 300  # NNCF's default number of calibration inputs


class Quantised:
    """A quantised early-exit network whose thresholds can be set."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def with_thresholds(self, thresholds: Sequence[float]) -> bytes:
        """The network with `thresholds`, one per exit, as one file (a ZIP archive of OpenVINO's two)."""
        import openvino

        found = 0
        for constant in _constants(self._model):
            name = constant.get_friendly_name()
            for index, threshold in enumerate(thresholds):
                if name == f"leave_{index}/threshold":
                    value = np.full(constant.data.shape, float32_at_least(threshold), dtype=np.float32)
                    other = openvino.opset13.constant(value)
                    other.set_friendly_name(name)
                    for reader in constant.output(0).get_target_inputs():
                        reader.replace_source_output(other.output(0))
                    found += 1
        if found != len(thresholds):
            raise AssertionError(f"{found} of {len(thresholds)} thresholds found in the quantised network")
        return _to_file(self._model)


def quantised(model: bytes, calibration: Tensor) -> Quantised:
    """Quantise an assembled ONNX model, calibrated on inputs [n, ...] one at a time."""
    from openvino import Core

    rows = calibration.numpy()[:_MOST_INPUTS]
    inputs = [rows[index : index + 1] for index in range(len(rows))]
    result = in_8_bit_integers(Core().read_model(model=model), inputs)
    return Quantised(result)


def in_8_bit_integers(model: Any, batches: Sequence[Any]) -> Any:
    """An OpenVINO model quantised after training, calibrated on `batches` of its one input."""
    import nncf

    unseen = io.StringIO()  # progress bars and advice
    with silenced("nncf"), contextlib.redirect_stdout(unseen), contextlib.redirect_stderr(unseen):
        return nncf.quantize(
            model,
            nncf.Dataset(batches),
            preset=nncf.QuantizationPreset.MIXED,
            subset_size=len(batches),
            # Without VNNI, x86 adds pairs of products in 16 bits, which saturate. With 7 bits for weights no
            # sum can, so the answers are the same on every processor that the library is used on.
            advanced_parameters=nncf.AdvancedQuantizationParameters(overflow_fix=nncf.OverflowFix.ENABLE),
        )


def read_quantised(file: bytes) -> Any:
    """The OpenVINO model in a file from `Quantised.with_thresholds`."""
    from openvino import Core

    with zipfile.ZipFile(io.BytesIO(file)) as packed:
        return Core().read_model(model=packed.read(_XML), weights=packed.read(_WEIGHTS))


def without_exits(exits: Sequence[EngineExit]) -> list[EngineExit]:
    """The same exits with thresholds that no score reaches."""
    return [replace(leaving, threshold=_NEVER) for leaving in exits]


def _constants(model: Any) -> Iterator[Any]:
    for node in model.get_ops():
        if node.get_type_name() == "Constant":
            yield node
        elif node.get_type_name() == "If":
            for branch in (0, 1):
                yield from _constants(node.get_function(branch))


def _to_file(model: Any) -> bytes:
    import openvino

    packed = io.BytesIO()
    with TemporaryDirectory() as folder:
        xml, weights = Path(folder) / _XML, Path(folder) / _WEIGHTS
        openvino.serialize(model, str(xml), str(weights))
        with zipfile.ZipFile(packed, "w") as archive:
            for part in (xml, weights):
                archive.writestr(zipfile.ZipInfo(part.name), part.read_bytes())
    return packed.getvalue()
