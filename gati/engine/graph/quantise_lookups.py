"""Lookups in 8-bit integers inside a float32 network: their ONNX models are quantised after training.

The result is plain ONNX with `QuantizeLinear` and `DequantizeLinear` around convolutions and matrix products,
which OpenVINO and ONNX Runtime run in integers. The last layer, the probabilities and the score stay in
float32: 256 score values are too few for thresholds.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
from collections.abc import Collection, Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor

from gati.engine.graph.biases import Floats, correct_biases
from gati.engine.graph.convert import Converter
from gati.engine.graph.integers import sums_are_exact
from gati.engine.graph.silence import silenced
from gati.engine.graph.stages import GraphStage, GraphStages
from gati.errors import StorageError
from gati.files import atomic_write_bytes
from gati.version import __version__

_WITH_WEIGHTS = ("Conv", "Gemm", "MatMul")
_IN_INTEGERS = (*_WITH_WEIGHTS, "Relu", "Clip", "MaxPool")
_SOME_INPUTS = 128  # of those for calibration: for means, and to compare answers
_CLOSE_ENOUGH = 0.99  # share of equal answers
_SHARE_OF_AN_INPUT = 0.02  # in the moving average of smallest and largest values


class QuantisingConverter(Converter):
    """Converts like `plain`, and quantises lookups on calibration inputs [n, ...].

    It keeps quantised lookups, so several networks can share them, see `for_network`, and stores them in the
    folder `kept`: quantising a large one takes most of a minute.
    """

    def __init__(self, plain: Converter, calibration: Tensor, kept: Path | None = None) -> None:
        super().__init__()
        self._plain = plain
        self._calibration = calibration
        self._kept = kept
        self._blocks: dict[Hashable, str] = {}  # at which each lookup is, by its key
        self._hidden: dict[str, Tensor] = {}  # by block

    def for_network(self, stages: GraphStages) -> QuantisingConverter:
        """Compute the hidden outputs that the lookups of `stages` read, once per block; returns itself."""
        lookups = [lookup.key for lookup in stages.lookups if lookup is not None]
        blocks = [leaving.block for leaving in stages.exits]
        self._blocks.update(zip(lookups, blocks, strict=True))
        if missing := set(blocks) - self._hidden.keys():
            self._hidden |= _hidden_outputs(stages, self._calibration, missing)
        return self

    def __call__(self, stage: GraphStage, name: str) -> onnx.ModelProto:
        """As `Converter.__call__`."""
        block = self._blocks.get(stage.key)
        if block is None:
            return self._plain(stage, name)
        if stage.key not in self._converted:
            hidden = self._hidden[block].numpy()
            self._converted[stage.key] = _quantised_once(self._plain(stage, name), hidden, self._kept)
        return super().__call__(stage, name)


def _quantised_once(model: onnx.ModelProto, hidden: Floats, kept: Path | None) -> onnx.ModelProto:
    """As `quantise_lookup`, or what an earlier call with the same arguments has stored in folder `kept`."""
    if kept is None:
        return quantise_lookup(model, hidden)
    import onnxruntime

    made_by = f"{__version__} {onnxruntime.__version__} {sums_are_exact()} {hidden.shape}"
    digest = hashlib.sha256(made_by.encode())
    digest.update(model.SerializeToString(deterministic=True))
    digest.update(np.ascontiguousarray(hidden).data)
    path = kept / f"lookup-{digest.hexdigest()[:16]}.onnx"
    with suppress(FileNotFoundError, NotADirectoryError):
        known = onnx.load(path)
        with suppress(OSError):  # the library may be read-only
            os.utime(path)  # it is in use
        return known
    found = quantise_lookup(model, hidden)
    with suppress(StorageError):  # it is quantised again
        atomic_write_bytes(path, found.SerializeToString())
    return found


def quantise_lookup(model: onnx.ModelProto, hidden: Floats) -> onnx.ModelProto:
    """Quantise a converted lookup, calibrated on hidden outputs [n, ...] one at a time.

    Weights get one scale per output channel, activations one per tensor. Activations range over all values
    that were seen; if answers then differ too often, over the typical largest values of an input. Each is
    tried with and without corrected biases (`gati.engine.graph.biases`), and what is closest to the given
    answers is kept. A lookup with fewer than two layers with weights is returned unchanged: the last one is
    never quantised.
    """
    layers = [node for node in model.graph.node if node.op_type in _WITH_WEIGHTS]
    if len(layers) < 2:
        return model
    rows = [np.ascontiguousarray(row) for row in np.split(hidden, len(hidden))]
    first, last = rows[:_SOME_INPUTS], rows[-_SOME_INPUTS:]
    given = _probabilities(model, last)
    closest, least = model, math.inf
    for typical in (False, True):
        plain = _quantised(model, layers[-1].name, rows, typical=typical)
        corrected = copy.deepcopy(plain)
        correct_biases(corrected, model, first)
        equal = 0.0
        for candidate in (plain, corrected):
            answers = _probabilities(candidate, last)
            difference = float(((answers - given) ** 2).sum(1).mean())
            if difference < least:
                closest, least = candidate, difference
            equal = max(equal, float((answers.argmax(1) == given.argmax(1)).mean()))
        if equal >= _CLOSE_ENOUGH:
            break
    return closest


def _quantised(
    model: onnx.ModelProto, last: str, rows: Sequence[Floats], *, typical: bool
) -> onnx.ModelProto:
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    moving = {"CalibMovingAverage": True, "CalibMovingAverageConstant": _SHARE_OF_AN_INPUT}
    with TemporaryDirectory() as folder, silenced(""):
        given, result = Path(folder) / "given.onnx", Path(folder) / "quantised.onnx"
        onnx.save(model, given)
        quantize_static(
            given,
            result,
            _Rows(model.graph.input[0].name, rows),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=not sums_are_exact(),
            op_types_to_quantize=list(_IN_INTEGERS),
            nodes_to_exclude=[last],
            extra_options=moving if typical else {},
        )
        return onnx.load(result)


def _probabilities(model: onnx.ModelProto, rows: Sequence[Floats]) -> Floats:
    """The lookup's probabilities [n, K]."""
    from onnxruntime import InferenceSession

    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    reads, gives = model.graph.input[0].name, model.graph.output[0].name
    return np.concatenate([session.run([gives], {reads: row})[0] for row in rows])


class _Rows:
    """Calibration inputs for ONNX Runtime, which reads one at a time until None."""

    def __init__(self, name: str, rows: Sequence[Floats]) -> None:
        self._name = name
        self._rows = iter(rows)

    def get_next(self) -> dict[str, Any] | None:
        row = next(self._rows, None)
        return None if row is None else {self._name: row}


def _hidden_outputs(stages: GraphStages, inputs: Tensor, blocks: Collection[str]) -> dict[str, Tensor]:
    """The hidden outputs [n, ...] that the lookups of `stages` at `blocks` read, by block."""
    hidden: dict[str, Tensor] = {}
    carried: Sequence[Tensor] = (inputs,)
    exits = iter(stages.exits)
    with torch.inference_mode():
        for segment, lookup in zip(stages.segments[:-1], stages.lookups, strict=False):
            carried = segment.module(*carried)
            if lookup is not None and (block := next(exits).block) in blocks:
                hidden[block] = carried[0].clone()
            if len(hidden) == len(blocks):
                break
    return hidden
