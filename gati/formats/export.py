"""`gati export`: a composition as a file that needs neither Gati nor the model's code."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from gati.composition.composition import Composition
from gati.composition.load import Served, open_model
from gati.engine.graph.stages import GraphStages, build_stages
from gati.errors import BackendError, CompositionError, DataError, ModelError
from gati.exploration.library import Library
from gati.files import atomic_write
from gati.formats.check import check_answers, onnx_runner, program_runner
from gati.formats.metadata import describe, in_float32, metadata_of
from gati.model.inputs import TensorInputs
from gati.model.lengths import TracedSequences
from gati.model.preprocess import Preprocessing
from gati.model.segments import TracedModel

if TYPE_CHECKING:
    import onnx

Format = Literal["onnx", "pt2", "triton"]

_CHECKED_INPUTS = 16
_NEEDED = ("onnx", "onnxscript", "onnxruntime")
_LARGEST_FILE = 2**31 - 1  # what a protocol buffer holds


@dataclass(frozen=True)
class Exported:
    """The written file, or folder for Triton. `exits` are the blocks an input can leave after."""

    path: Path
    format: Format
    exits: tuple[str, ...]
    input_shape: tuple[int, ...]
    input_type: str
    size_bytes: int
    checked_inputs: int
    note: str = ""


def export(
    directory: str | Path,
    out: str | Path,
    *,
    composition: str = "default",
    format: Format = "onnx",
    raw_input: bool = False,
    length: int | None = None,
) -> Exported:
    """Write a composition as one network that decides for itself where an input leaves, on the CPU.

    It takes one input at a time and gives `probabilities` [1, K], `exit` int64 [1] (the index of the exit,
    or the number of exits where the whole network answered) and `score` [1] of the last lookup (NaN without
    one). All lookups are inline. `onnx` is one file with nested `If` nodes, `triton` a model folder around
    it, `pt2` a `torch.export` program with `torch.cond`. Before a file gets its name it is tested on random
    inputs and must answer as the engine does. With `raw_input` it takes the image, uint8 [1, H, W, C], of
    exactly the network's size. A network of sequences is written at its longest length, or at `length`, one
    of those at which it is executed: a faster file for inputs of at most so many tokens.

    Raises:
        BackendError: onnx is not installed.
        ModelError: the network has an operator that the format does not have.
        DataError: `raw_input` where the preprocessing resizes or crops; a `length` that there is not.
        StorageError: the place is not writable, or the folder for Triton is there already.
        LibraryError, CompositionError: as `load` does.
    """
    if format not in get_args(Format):
        raise BackendError(f"unknown format '{format}'; choose one of {', '.join(get_args(Format))}")
    if format != "pt2":
        _need_onnx()
    elif raw_input:
        raise DataError("a pt2 file takes preprocessed inputs only; leave out --raw-input")
    served = _opened(directory, composition)
    stages = _stages(served, length)
    raw = _raw_preprocessing(served) if raw_input else None
    target = Path(out)
    if format == "pt2":
        _write_program(served, stages, target)
    else:
        _write_onnx(served, stages, target, raw, folder=format == "triton")
    shape = tuple(stages.example.shape)
    return Exported(
        path=target,
        format=format,
        exits=tuple(leaving.block for leaving in stages.exits),
        input_shape=shape if raw is None else (shape[0], *shape[2:], shape[1]),
        input_type=str(stages.example.dtype).removeprefix("torch.") if raw is None else "uint8",
        size_bytes=sum(file.stat().st_size for file in (target, *target.rglob("*")) if file.is_file()),
        checked_inputs=_CHECKED_INPUTS,
        note=_note(served),
    )


def _opened(directory: str | Path, composition: str) -> Served:
    """The network and the caches on the CPU, whatever backend serves them."""
    library = Library.open(directory)
    chosen = Composition.load(library.composition_path(composition))
    model = open_model(directory, device="cpu")
    return Served(model.engine_of(model.exits(chosen), chosen.name, "torch"), model, library, chosen)


def _note(served: Served) -> str:
    composition = served.composition
    if composition.certificate is None or in_float32(composition):
        return ""
    return (
        f"the certificate is of {composition.backend} and not in the file, which computes in float32; "
        "compose with --backend openvino or onnxruntime for a file with a certificate"
    )


def _need_onnx() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendError(
            f"exporting to ONNX needs {', '.join(missing)}, not installed here; pip install 'gati[export]', "
            "or give --format pt2"
        )


def _stages(served: Served, length: int | None) -> GraphStages:
    dtype = served.engine.traced.computes_in
    if dtype != torch.float32:
        raise ModelError(f"the network computes in {dtype}; only float32 networks can be exported")
    blocks = [leaving.block for leaving in served.composition.exits]
    if blocks != [leaving.block for leaving in served.engine.exits]:
        listed = ", ".join(blocks)
        raise CompositionError(f"the exits {listed} are not in forward order; run gati compose again")
    return build_stages(_at(served.engine.traced, length), served.engine.exits, served.model.outputs_kind)


def _at(traced: TracedModel, length: int | None) -> TracedModel:
    """The network for inputs of `length`. Raises `DataError` where it is not executed at that length."""
    if length is None:
        return traced
    if not isinstance(traced, TracedSequences) or traced.lengths is None:
        raise DataError("--length is for networks that are executed at several lengths; leave it out")
    if length not in traced.lengths.every:
        every = ", ".join(map(str, traced.lengths.every))
        raise DataError(f"--length is {length}, the network is executed at {every}; choose one of them")
    return traced.at(length)


def _raw_preprocessing(served: Served) -> Preprocessing:
    """The preprocessing, if images of the network's own size pass its resizing and cropping unchanged."""
    preprocessing = served.model.preprocessing
    if preprocessing.sound is not None:
        raise DataError("--raw-input is for images, and this network takes sound: leave it out")
    shape = served.engine.traced.input_shape
    if preprocessing.tensors is not None or len(shape) != 3 or shape[0] != preprocessing.channels:
        raise DataError(f"--raw-input is for images, the network takes {list(shape)}; leave it out")
    height, width = shape[1:]
    unchanged = (
        preprocessing.size in (None, (height, width))
        and preprocessing.resize in (None, min(height, width))
        and (preprocessing.crop is None or preprocessing.crop == height == width)
    )
    if not unchanged:
        resized = preprocessing.size or preprocessing.resize
        raise DataError(
            f"--raw-input cannot hold this preprocessing: it resizes to {resized} and crops to "
            f"{preprocessing.crop} pixels; leave --raw-input out and preprocess before"
        )
    return preprocessing


def _write_onnx(
    served: Served, stages: GraphStages, target: Path, raw: Preprocessing | None, *, folder: bool
) -> None:
    import onnx

    from gati.engine.graph.assemble import assemble
    from gati.formats.triton import write_model_folder

    library, composition, tensors = served.library, served.composition, served.model.preprocessing.tensors
    model = assemble(stages, f"gati {composition.name}", raw)
    _check_size(model)
    model.producer_name = "gati"
    model.doc_string = describe(composition, stages, raw=raw is not None)
    metadata = metadata_of(library.manifest, composition, stages, raw=raw is not None)
    model.producer_version = metadata["gati_version"]
    onnx.helper.set_model_props(model, metadata)
    onnx.checker.check_model(model, full_check=True)

    def write(there: Path) -> None:
        there.write_bytes(model.SerializeToString())
        check_answers(onnx_runner(there, model.graph.input[0].name), stages, _inputs(stages, raw, tensors))
        if folder:
            write_model_folder(target, model, there, library.manifest.class_names)

    if folder:
        import tempfile

        with tempfile.TemporaryDirectory() as scratch:
            write(Path(scratch) / "model.onnx")
    else:
        atomic_write(target, write)


def _check_size(model: onnx.ModelProto) -> None:
    size = model.ByteSize()
    if size > _LARGEST_FILE:
        raise ModelError(f"the ONNX file would be {size / 2**30:.1f} GiB, more than 2; give --format pt2")


def _write_program(served: Served, stages: GraphStages, target: Path) -> None:
    from gati.formats.program import save_program, to_program

    program = to_program(stages)
    metadata = metadata_of(served.library.manifest, served.composition, stages, raw=False)
    description = describe(served.composition, stages, raw=False)

    def write(there: Path) -> None:
        notes = {"gati.json": json.dumps({**metadata, "description": description}, indent=1)}
        save_program(program, there, notes)
        with open(there, "rb") as handle:
            check_answers(
                program_runner(handle), stages, _inputs(stages, None, served.model.preprocessing.tensors)
            )

    atomic_write(target, write)


def _inputs(
    stages: GraphStages, raw: Preprocessing | None, tensors: TensorInputs | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Random inputs of very different size, so that more than one exit is asked; as fed, and preprocessed."""
    generator = torch.Generator().manual_seed(0)
    shape = stages.example.shape
    for number in range(_CHECKED_INPUTS):
        if tensors is not None:
            x = tensors.example(1, number)[..., : shape[-1]].contiguous()
            yield x, x
        elif raw is None:
            x = torch.randn(shape, generator=generator) * 4.0 * (number + 1) / _CHECKED_INPUTS
            yield x, x
        else:
            largest = 256 * (number + 1) // _CHECKED_INPUTS
            image = torch.randint(0, largest, (shape[0], *shape[2:], shape[1]), generator=generator)
            pixels = image.to(torch.uint8)
            yield pixels, raw(pixels.numpy())
