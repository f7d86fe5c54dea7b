"""Bias correction of a quantised lookup.

Rounding weights and cutting values off shifts the mean of every output channel, and the shifts of many layers
add up, above all where each channel has few weights (depthwise convolutions). The expected shift of a layer
follows from the mean of its inputs, and its bias takes it back (Nagel et al., "Data-Free Quantization Through
Weight Equalization and Bias Correction", 2019, section 4.2, with means measured on calibration inputs).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Floats = npt.NDArray[np.float32]

_LARGEST = 255  # of QUInt8


class _Layer(NamedTuple):
    """A layer whose inputs, weights and bias are quantised, and the same layer as `given`.

    `weights` are the given ones. It knows its inputs within `low` and `high`.
    """

    node: onnx.NodeProto
    given: onnx.NodeProto
    weights: Floats
    low: float
    high: float


def correct_biases(quantised: onnx.ModelProto, given: onnx.ModelProto, rows: Sequence[Floats]) -> None:
    """Correct the biases of `quantised`, which ONNX Runtime made from `given`, by inputs [1, ...]."""
    tensors = {tensor.name: tensor for tensor in quantised.graph.initializer}
    makers = {name: node for node in quantised.graph.node for name in node.output}
    layers = _layers(quantised, given, makers, tensors)
    for layer, (mean, within) in zip(layers, _means(given, layers, rows), strict=True):
        weight, bias = (makers[name] for name in layer.node.input[1:3])
        exact = _by_input(layer, layer.weights)
        rounded = _by_input(layer, _dequantised(weight, tensors))
        shift = exact @ mean.reshape(exact.shape[0], -1, 1) - rounded @ within.reshape(exact.shape[0], -1, 1)
        stored = tensors[bias.input[0]]
        steps = np.rint(shift.ravel() / numpy_helper.to_array(tensors[bias.input[1]])).astype(np.int32)
        stored.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(stored) + steps, stored.name))


def _layers(
    quantised: onnx.ModelProto,
    given: onnx.ModelProto,
    makers: dict[str, onnx.NodeProto],
    tensors: dict[str, onnx.TensorProto],
) -> list[_Layer]:
    """The layers that can be corrected: convolutions and linear layers with stored weights."""
    before = {node.name: node for node in given.graph.node if node.name}
    stored = {tensor.name: tensor for tensor in given.graph.initializer}
    found = []
    for node in quantised.graph.node:
        if node.op_type not in ("Conv", "Gemm") or len(node.input) < 3:
            continue
        sources = [makers.get(name) for name in node.input]
        if any(source is None or source.op_type != "DequantizeLinear" for source in sources):
            continue  # it stays in float32
        values = makers[node.input[0]]
        scale, zero = (float(numpy_helper.to_array(tensors[name])) for name in values.input[1:3])
        same = before.get(node.name)
        if same is None or same.op_type != node.op_type or same.input[1] not in stored:
            continue
        weights = numpy_helper.to_array(stored[same.input[1]])
        found.append(_Layer(node, same, weights, -zero * scale, (_LARGEST - zero) * scale))
    return found


def _means(
    given: onnx.ModelProto, layers: Sequence[_Layer], rows: Sequence[Floats]
) -> list[tuple[Floats, Floats]]:
    """The mean of what each layer reads by channel [C]: as it is, and cut off at what the layer knows."""
    from onnxruntime import InferenceSession

    if not layers:
        return []
    model = copy.deepcopy(given)
    names: list[str] = []
    for number, layer in enumerate(layers):
        reads = layer.given.input[0]
        low, high, cut = (f"means/{number}/{name}" for name in ("low", "high", "cut"))
        for name, limit in ((low, layer.low), (high, layer.high)):
            model.graph.initializer.append(numpy_helper.from_array(np.array(limit, np.float32), name))
        model.graph.node.append(helper.make_node("Clip", [reads, low, high], [cut]))
        axes = [0, *range(2, layer.weights.ndim)]
        axes_name = f"means/{number}/axes"
        model.graph.initializer.append(numpy_helper.from_array(np.array(axes, np.int64), axes_name))
        for value in (reads, cut):
            names.append(f"means/{len(names)}")
            mean = helper.make_node("ReduceMean", [value, axes_name], [names[-1]], keepdims=0)
            model.graph.node.append(mean)
            model.graph.output.append(helper.make_tensor_value_info(names[-1], TensorProto.FLOAT, None))
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = [session.run(names, {given.graph.input[0].name: row}) for row in rows]
    means: list[Floats] = [np.mean(each, axis=0) for each in zip(*found, strict=True)]
    return list(zip(means[0::2], means[1::2], strict=True))


def _by_input(layer: _Layer, weights: Floats) -> Floats:
    """Weights summed over positions, [groups, outputs of a group, inputs of a group]."""
    attributes = {each.name: each.i for each in layer.given.attribute}
    if layer.node.op_type == "Gemm":
        return (weights if attributes.get("transB") else weights.T)[None]
    summed: Floats = weights.sum(axis=tuple(range(2, weights.ndim)))
    groups = attributes.get("group", 1)
    return summed.reshape(groups, len(summed) // groups, -1)


def _dequantised(node: onnx.NodeProto, tensors: dict[str, onnx.TensorProto]) -> Floats:
    """Weights as the quantised layer has them; their zero points are 0."""
    integers, scale = (numpy_helper.to_array(tensors[name]) for name in node.input[:2])
    axis = next((each.i for each in node.attribute if each.name == "axis"), 1)
    shape = [1] * integers.ndim
    if scale.ndim:
        shape[axis] = -1
    result: Floats = integers.astype(np.float32) * scale.reshape(shape)
    return result
