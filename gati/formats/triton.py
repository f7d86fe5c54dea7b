"""Model folders for NVIDIA Triton's ONNX Runtime backend.

NAME/config.pbtxt     inputs and outputs
NAME/labels.txt       class names, if there are any
NAME/1/model.onnx     the early-exit network
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import TensorProto

from gati.engine.graph.assemble import type_of
from gati.errors import StorageError
from gati.files import atomic_write, atomic_write_text, unfinished

_TYPES: dict[int, str] = {
    TensorProto.FLOAT: "TYPE_FP32",
    TensorProto.DOUBLE: "TYPE_FP64",
    TensorProto.FLOAT16: "TYPE_FP16",
    TensorProto.INT64: "TYPE_INT64",
    TensorProto.UINT8: "TYPE_UINT8",
}


def config_of(model: onnx.ModelProto, name: str, *, labels: bool) -> str:
    """Return the text of `config.pbtxt`.

    An `If` decides for one input, so Triton must not batch inputs. Without an instance group it would run the
    file on a GPU if there is one, which may round to TF32: answers were checked, and certified, in float32.
    """
    outputs = [_tensor(value, labels and value.name == "probabilities") for value in model.graph.output]
    return (
        f"name: {json.dumps(name)}\n"
        'backend: "onnxruntime"\n'
        "max_batch_size: 0\n"
        "instance_group [ { kind: KIND_CPU } ]\n"
        f"input [\n{_tensor(model.graph.input[0], False)}\n]\n"
        "output [\n" + ",\n".join(outputs) + "\n]\n"
    )


def check_new(folder: Path) -> None:
    """Raise `StorageError` for a folder that is there: Triton may be serving from it."""
    if folder.exists():
        raise StorageError(f"{folder} already exists; remove it or give another folder with --out")


def write_model_folder(
    folder: Path, model: onnx.ModelProto, source: Path, class_names: Sequence[str] | None
) -> None:
    """Create `folder` with a copy of the model file `source`, atomically.

    **Raises:** `StorageError` if it already exists or cannot be written.
    """
    check_new(folder)
    try:
        partial = unfinished(folder)
        partial.mkdir(parents=True)
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror}; choose another folder") from error
    try:
        config = config_of(model, folder.name, labels=class_names is not None)
        atomic_write(partial / "1" / "model.onnx", lambda there: _copy(source, there))
        atomic_write_text(partial / "config.pbtxt", config)
        if class_names is not None:
            lines = [" ".join(class_name.split()) for class_name in class_names]
            atomic_write_text(partial / "labels.txt", "\n".join(lines) + "\n")
        os.rename(partial, folder)
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror}; choose another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy(source: Path, there: Path) -> None:
    shutil.copyfile(source, there)


def _tensor(value: onnx.ValueInfoProto, labels: bool) -> str:
    element, shape = type_of(value)
    dims = ", ".join(map(str, shape))
    label = ', label_filename: "labels.txt"' if labels else ""
    return f"  {{ name: {json.dumps(value.name)}, data_type: {_TYPES[element]}, dims: [ {dims} ]{label} }}"
