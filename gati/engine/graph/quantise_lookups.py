"""Lookups in 8-bit integers inside a float32 network: their ONNX models are quantised after training.

The result is plain ONNX with `QuantizeLinear` and `DequantizeLinear` around convolutions and matrix products,
which OpenVINO and ONNX Runtime run in integers. The last layer, the probabilities and the score stay in
float32: 256 score values are too few for thresholds.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from torch import Tensor

from gati.engine.graph.convert import Converter
from gati.engine.graph.stages import GraphStage, GraphStages

_WITH_WEIGHTS = ("Conv", "Gemm", "MatMul")
_IN_INTEGERS = (*_WITH_WEIGHTS, "Relu", "Clip", "MaxPool")


class QuantisingConverter(Converter):
    """Converts like `plain`, and quantises lookups on calibration inputs [n, ...].

    It keeps quantised lookups, so several networks can share them, see `for_network`.
    """

    def __init__(self, plain: Converter, calibration: Tensor) -> None:
        super().__init__()
        self._plain = plain
        self._calibration = calibration
        self._hidden: dict[Hashable, Tensor] = {}

    def for_network(self, stages: GraphStages) -> QuantisingConverter:
        """Compute the hidden outputs that the lookups of `stages` read; returns itself."""
        if any(lookup is not None and lookup.key not in self._hidden for lookup in stages.lookups):
            self._hidden |= _hidden_outputs(stages, self._calibration)
        return self

    def __call__(self, stage: GraphStage, name: str) -> onnx.ModelProto:
        """As `Converter.__call__`."""
        if stage.key not in self._hidden:
            return self._plain(stage, name)
        if stage.key not in self._converted:
            hidden = self._hidden[stage.key].numpy()
            self._converted[stage.key] = quantise_lookup(self._plain(stage, name), hidden)
        return super().__call__(stage, name)


def quantise_lookup(model: onnx.ModelProto, hidden: npt.NDArray[np.float32]) -> onnx.ModelProto:
    """Quantise a converted lookup, calibrated on hidden outputs [n, ...] one at a time.

    Weights get one scale per output channel, activations one per tensor. A lookup with fewer than two layers
    with weights is returned unchanged, since the last one is never quantised.
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    layers = [node for node in model.graph.node if node.op_type in _WITH_WEIGHTS]
    if len(layers) < 2:
        return model
    with TemporaryDirectory() as folder, _quiet():
        given, result = Path(folder) / "given.onnx", Path(folder) / "quantised.onnx"
        onnx.save(model, given)
        quantize_static(
            given,
            result,
            _Rows(model.graph.input[0].name, hidden),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
            op_types_to_quantize=list(_IN_INTEGERS),
            nodes_to_exclude=[layers[-1].name],
        )
        return onnx.load(result)


class _Rows:
    """Calibration inputs for ONNX Runtime, which reads one at a time until None."""

    def __init__(self, name: str, hidden: npt.NDArray[np.float32]) -> None:
        self._name = name
        self._rows: Iterator[npt.NDArray[np.float32]] = iter(np.split(hidden, len(hidden)))

    def get_next(self) -> dict[str, Any] | None:
        row = next(self._rows, None)
        return None if row is None else {self._name: np.ascontiguousarray(row)}


def _hidden_outputs(stages: GraphStages, inputs: Tensor) -> dict[Hashable, Tensor]:
    """The hidden outputs [n, ...] that each lookup of `stages` reads, by its key."""
    hidden: dict[Hashable, Tensor] = {}
    carried: Sequence[Tensor] = (inputs,)
    with torch.inference_mode():
        for segment, lookup in zip(stages.segments[:-1], stages.lookups, strict=False):
            carried = segment.module(*carried)
            if lookup is not None:
                hidden[lookup.key] = carried[0].clone()
    return hidden


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the quantiser's warnings."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)
