"""Stages as one ONNX graph: after each lookup an `If`, whose else-branch holds the rest of the network.

    input -> segment 1 -> lookup 1 -> If score >= threshold
                                        then  the lookup's answer
                                        else  segment 2 -> lookup 2 -> If ...
                                                                         else  the last segment's answer

Inner graphs read values of outer graphs by name, so nothing is copied. Segments after a hit do not run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from gati.engine.graph.convert import OPSET, Converter, Piece, to_piece
from gati.engine.graph.stages import INPUT, OUTPUTS, GraphStages
from gati.model.preprocess import Preprocessing

_IR_VERSION = 8  # the oldest version with this operator set, which most runtimes can read
_TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float64): TensorProto.DOUBLE,
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(np.uint8): TensorProto.UINT8,
    np.dtype(np.int64): TensorProto.INT64,
}


def assemble(
    stages: GraphStages, name: str, raw: Preprocessing | None = None, convert: Converter | None = None
) -> onnx.ModelProto:
    """The early-exit network as one model with batch size 1.

    With `raw`, the model takes an image, uint8 [1, H, W, C], and starts with that preprocessing. `convert`
    keeps converted pieces; models of one network can share it.

    **Raises:** `ModelError` for an operator that ONNX does not have.
    """
    shape, dtype = tuple(stages.example.shape), stages.example.numpy().dtype
    before: list[onnx.NodeProto] = []
    entry = INPUT
    if raw is not None:
        entry = "preprocess/input"
        before = _preprocess(raw, entry)
        shape, dtype = (shape[0], *shape[2:], shape[1]), np.dtype(np.uint8)
    takes = helper.make_tensor_value_info(INPUT, _TYPES[dtype], shape)
    graph = _Assembly(stages, convert or Converter()).graph(0, 0, (entry,), "", name)
    nodes = [*before, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    graph.input.append(takes)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version = _IR_VERSION
    return model


def type_of(value: onnx.ValueInfoProto) -> tuple[int, tuple[int, ...]]:
    """Element type and shape of a graph's input or output."""
    tensor = value.type.tensor_type
    return tensor.elem_type, tuple(dimension.dim_value for dimension in tensor.shape.dim)


class _Assembly:
    """Assembles segments and lookups, from the innermost graph outwards."""

    def __init__(self, stages: GraphStages, convert: Converter) -> None:
        self._stages = stages
        self._convert = convert

    def graph(
        self, segment: int, exits: int, inputs: tuple[str, ...], score: str, name: str
    ) -> onnx.GraphProto:
        """The graph from segment number `segment` on, after `exits` exits.

        `score` names the score of the previous lookup; it is empty before the first one.
        """
        stages = self._stages
        pieces: list[Piece] = []
        results = OUTPUTS if exits == 0 else tuple(f"after_{exits}/{output}" for output in OUTPUTS)
        while True:
            prefix = f"segment_{segment}/"
            pieces.append(to_piece(stages.segments[segment], inputs, prefix, self._convert))
            inputs = pieces[-1].outputs
            lookup = stages.lookups[segment]
            segment += 1
            if segment == len(stages.segments):
                ending = _answer(inputs[0], exits, score, results)
                doc = "The rest of the network, for inputs that missed every cache."
                return _make(pieces, ending, results, stages.classes, name, doc)
            if lookup is not None:
                pieces.append(to_piece(lookup, inputs[:1], f"lookup_{exits}/", self._convert))
                break
        probabilities, own_score = pieces[-1].outputs
        leaving, threshold = stages.exits[exits], stages.thresholds[exits]
        leaves = f"leave_{exits}"
        then_results = tuple(f"{leaves}/{output}" for output in OUTPUTS)
        then_branch = helper.make_graph(
            _answer(probabilities, exits, own_score, then_results),
            f"leave after {leaving.block}",
            [],
            _result_infos(then_results, stages.classes),
            doc_string=f"The answer of the learned cache {leaving.variant} after block {leaving.block}.",
        )
        else_branch = self.graph(segment, exits + 1, inputs, own_score, f"go on after {leaving.block}")
        ending = [
            _constant(f"{leaves}/threshold", np.float32(threshold)),
            # False for NaN, which is a miss. For GreaterOrEqual, OpenVINO returns true.
            helper.make_node(
                "LessOrEqual", [f"{leaves}/threshold", own_score], [f"{leaves}/hit"], name=f"{leaves}/hit"
            ),
            helper.make_node(
                "If",
                [f"{leaves}/hit"],
                list(results),
                name=f"{leaves}/if",
                doc_string=f"Leave after block {leaving.block} where the score is at least {threshold:.9g}.",
                then_branch=then_branch,
                else_branch=else_branch,
            ),
        ]
        doc = f"The network up to block {leaving.block}, and the learned cache {leaving.variant} there."
        return _make(pieces, ending, results, stages.classes, name, doc)


def _answer(probabilities: str, index: int, score: str, results: Sequence[str]) -> list[onnx.NodeProto]:
    """Nodes that compute `results`: ONNX requires that a branch computes its outputs with its own nodes."""
    nodes = [
        helper.make_node("Identity", [probabilities], [results[0]], name=results[0]),
        _constant(results[1], np.array([index], dtype=np.int64)),
    ]
    if score:
        nodes.append(helper.make_node("Identity", [score], [results[2]], name=results[2]))
    else:
        nodes.append(_constant(results[2], np.array([math.nan], dtype=np.float32)))
    return nodes


def _make(
    pieces: Sequence[Piece],
    ending: list[onnx.NodeProto],
    results: Sequence[str],
    classes: int,
    name: str,
    doc: str,
) -> onnx.GraphProto:
    return helper.make_graph(
        [*(node for piece in pieces for node in piece.nodes), *ending],
        name,
        [],
        _result_infos(results, classes),
        initializer=[weight for piece in pieces for weight in piece.weights],
        value_info=[shape for piece in pieces for shape in piece.shapes],
        doc_string=doc,
    )


def _result_infos(names: Sequence[str], classes: int) -> list[onnx.ValueInfoProto]:
    probabilities, exit, score = names
    return [
        helper.make_tensor_value_info(probabilities, TensorProto.FLOAT, [1, classes]),
        helper.make_tensor_value_info(exit, TensorProto.INT64, [1]),
        helper.make_tensor_value_info(score, TensorProto.FLOAT, [1]),
    ]


def _preprocess(preprocessing: Preprocessing, result: str) -> list[onnx.NodeProto]:
    """uint8 [1, H, W, C] -> the network's input, with the same steps as `Preprocessing`."""
    steps: tuple[tuple[str, Any], ...] = (
        ("Div", np.float32(255.0)),
        ("Sub", np.array(preprocessing.mean, dtype=np.float32).reshape(1, -1, 1, 1)),
        ("Div", np.array(preprocessing.std, dtype=np.float32).reshape(1, -1, 1, 1)),
    )
    planes = "preprocess/planes"
    nodes = [
        helper.make_node("Transpose", [INPUT], [planes], name=planes, perm=[0, 3, 1, 2]),
        helper.make_node("Cast", [planes], ["preprocess/0"], name="preprocess/cast", to=TensorProto.FLOAT),
    ]
    for step, (operator, operand) in enumerate(steps):
        constant, before = f"preprocess/operand_{step}", f"preprocess/{step}"
        after = result if step == len(steps) - 1 else f"preprocess/{step + 1}"
        nodes.append(_constant(constant, operand))
        nodes.append(helper.make_node(operator, [before, constant], [after], name=after))
    return nodes


def _constant(name: str, value: Any) -> onnx.NodeProto:
    tensor = numpy_helper.from_array(np.asarray(value), name)
    return helper.make_node("Constant", [], [name], name=name, value=tensor)
