"""One stage of the network as an ONNX graph without branches, to become part of a larger graph."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx
import torch

from gati.engine.graph.apart import process_apart
from gati.engine.graph.operators import one_table_of_operators
from gati.engine.graph.pooling import without_adaptive_pooling
from gati.engine.graph.silence import silenced
from gati.engine.graph.stages import GraphStage
from gati.errors import ModelError, one_line

OPSET = 18
_LOGGERS = ("torch.onnx", "onnxscript", "onnx_ir")


@dataclass(frozen=True)
class Piece:
    """Nodes and weights of a stage, with names unique among stages; `outputs` are names, in order."""

    nodes: tuple[onnx.NodeProto, ...]
    weights: tuple[onnx.TensorProto, ...]
    shapes: tuple[onnx.ValueInfoProto, ...]
    outputs: tuple[str, ...]


class Converter:
    """Converts stages of one network, each only once."""

    def __init__(self) -> None:
        self._converted: dict[Hashable, onnx.ModelProto] = {}

    def __call__(self, stage: GraphStage, name: str) -> onnx.ModelProto:
        """The stage as a separate model, a copy. Raises `ModelError` as `to_piece`, which mentions `name`."""
        if stage.key is None:
            return _converted(stage, name)
        if stage.key not in self._converted:
            self._converted[stage.key] = _converted(stage, name)
        copy = onnx.ModelProto()
        copy.CopyFrom(self._converted[stage.key])
        return copy

    def forget_lookups(self) -> None:
        """Drop converted lookups, since learned caches are replaced over time; keep segments."""
        for key in [key for key in self._converted if isinstance(key, tuple) and _is_lookup(key)]:
            del self._converted[key]


def _is_lookup(key: tuple[Hashable, ...]) -> bool:
    return any(isinstance(part, torch.nn.Module) for part in key)


def to_piece(stage: GraphStage, inputs: tuple[str, ...], prefix: str, convert: Converter) -> Piece:
    """Convert a stage whose inputs are the values `inputs` of the surrounding graph.

    **Raises:** `ModelError` for an operator that ONNX does not have.
    """
    model = convert(stage, prefix)
    graph = model.graph
    if len(graph.input) != len(inputs) or model.functions:
        raise AssertionError("a converted stage has a wrong number of inputs, or functions")
    names = dict(zip((value.name for value in graph.input), inputs, strict=True))
    _rename(graph, names, prefix)
    outputs = tuple(names.get(value.name, f"{prefix}{value.name}") for value in graph.output)
    return Piece(tuple(graph.node), tuple(graph.initializer), tuple(graph.value_info), outputs)


def _converted(stage: GraphStage, name: str) -> onnx.ModelProto:
    """Convert in the calling thread's conversion process if that is possible, else in this process."""
    process = process_apart()
    model = None if process is None else process.convert(stage.module, stage.example, name)
    return convert_here(stage.module, stage.example, name) if model is None else _parsed(model)


def _parsed(model: bytes) -> onnx.ModelProto:
    parsed = onnx.ModelProto()
    parsed.ParseFromString(model)
    return parsed


def convert_here(module: torch.nn.Module, example: tuple[torch.Tensor, ...], name: str) -> onnx.ModelProto:
    """Convert a stage's module in this process. Raises `ModelError` as `to_piece`."""
    try:
        with silenced(*_LOGGERS), one_table_of_operators(), contextlib.redirect_stdout(io.StringIO()):
            program = without_adaptive_pooling(torch.export.export(module, example, strict=False))
            converted = torch.onnx.export(program, dynamo=True, opset_version=OPSET, verbose=False)
    except Exception as error:  # torch raises many unrelated types
        reason = _reason(error)
    else:
        if converted is None:
            raise AssertionError("torch.onnx.export without a file name returns a program")
        model: onnx.ModelProto = converted.model_proto
        versions = {entry.domain: entry.version for entry in model.opset_import}
        if set(versions) <= {"", "ai.onnx"} and max(versions.values()) == OPSET:
            return model
        reason = f"it needs the operator sets {versions}"
    raise ModelError(
        f"cannot export {name.rstrip('/')} to ONNX: {reason}; give --format pt2, or replace that operator in "
        "the network"
    )


def _reason(error: BaseException) -> str:
    """Type and first line of the root cause of an error, which names the operator."""
    cause: BaseException | None = error
    while cause is not None:
        error, cause = cause, cause.__cause__
    return one_line(error)


def _rename(graph: Any, names: Mapping[str, str], prefix: str) -> None:
    """Rename every value and node for the larger graph, and remove metadata about this machine."""

    def renamed(name: str) -> str:
        return names.get(name, f"{prefix}{name}") if name else name

    for node in graph.node:
        node.input[:] = [renamed(name) for name in node.input]
        node.output[:] = [renamed(name) for name in node.output]
        node.name = f"{prefix}{node.name.removeprefix('node_')}"
        node.doc_string = ""
        del node.metadata_props[:]
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                _rename(inner, names, prefix)
                for value in (*inner.input, *inner.output):
                    value.name = renamed(value.name)
    for value in (*graph.initializer, *graph.value_info):
        value.name = renamed(value.name)
        value.doc_string = ""
        del value.metadata_props[:]
