"""`gati export`: write a composition as a file that needs neither Gati nor the model's code."""

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
from gati.errors import BackendError, CompositionError, DataError, ModelError, StorageError
from gati.exploration.library import Library
from gati.files import atomic_write
from gati.formats.check import check_answers, onnx_runner, program_runner
from gati.formats.metadata import describe, in_float32, metadata_of, warning_of
from gati.model.folders import is_folder
from gati.model.inputs import TensorInputs
from gati.model.lengths import TracedSequences
from gati.model.preprocess import Preprocessing
from gati.model.segments import TracedModel

if TYPE_CHECKING:
    import onnx

Format = Literal["onnx", "pt2", "triton"]

_CHECKED_INPUTS = 16
_NEEDED = ("onnx", "onnxscript", "onnxruntime")
_LARGEST_FILE = 2**31 - 1  # the protobuf size limit


@dataclass(frozen=True)
class Exported:
    """The exported file, or folder for Triton. `exits` are the blocks after which an input can exit."""

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
    """Write a composition as one network that runs on the CPU and makes its own exit decisions.

    The network takes one input at a time and returns `probabilities` [1, K], `exit` int64 [1] (the index of
    the exit, or the number of exits if the whole network answered) and `score` [1] of the last lookup (NaN if
    there was none). All lookups are inline. `onnx` is one file with nested `If` nodes, `triton` a model
    folder around it, `pt2` a `torch.export` program with `torch.cond`. The file is first checked against the
    engine on random inputs. With `raw_input` it takes an image, uint8 [1, H, W, C], of exactly the network's
    input size. A sequence network is exported at its longest length, or at `length`, which must be one of its
    execution lengths; a shorter one gives a faster file for inputs of at most that many tokens.

    Raises:
        BackendError: onnx is not installed.
        ModelError: the network uses an operator that the format does not support.
        DataError: `raw_input` but the preprocessing resizes or crops, or `length` is not available.
        StorageError: the target is not writable, or the Triton folder already exists.
        LibraryError, CompositionError: as for `load`.
    """
    if format not in get_args(Format):
        raise BackendError(f"unknown format '{format}'; choose one of {', '.join(get_args(Format))}")
    if format != "pt2":
        _need_onnx()
    elif raw_input:
        raise DataError("a pt2 file takes preprocessed inputs only; leave out --raw-input")
    target = Path(out)
    _check_target(target, format)
    served = _opened(directory, composition)
    stages = _stages(served, length)
    raw = _raw_preprocessing(served) if raw_input else None
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


def _check_target(target: Path, format: Format) -> None:
    """Refuse what could not be written, before the network is converted, which may take minutes."""
    if format == "triton":
        from gati.formats.triton import check_new

        check_new(target)
    elif is_folder(target, "export", StorageError):
        raise StorageError(f"cannot write {target}: it is a folder; give the name of a file")


def _opened(directory: str | Path, composition: str) -> Served:
    """Load the network and its caches on the CPU, whatever backend serves them."""
    library = Library.open(directory)
    chosen = Composition.of(library, composition)
    model = open_model(directory, device="cpu")
    return Served(model.engine_of(model.exits(chosen), chosen.name, "torch"), model, library, chosen)


def _note(served: Served) -> str:
    composition = served.composition
    if warning := warning_of(composition):
        return warning
    if composition.certificate is None or in_float32(composition):
        return ""
    return (
        f"the certificate is for {composition.backend} and was left out of the file, which computes in "
        "float32; compose with --backend openvino or onnxruntime to export a certificate"
    )


def _need_onnx() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendError(
            f"exporting to ONNX needs {', '.join(missing)}, which is not installed; pip install "
            "'gati[export]', or give --format pt2"
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
    """Return the network for inputs of `length`. Raises `DataError` if it does not run at that length."""
    if length is None:
        return traced
    if not isinstance(traced, TracedSequences) or traced.lengths is None:
        raise DataError("--length is for networks that run at several lengths; leave it out")
    if length not in traced.lengths.every:
        every = ", ".join(map(str, traced.lengths.every))
        raise DataError(f"--length is {length}, but the network runs at {every}; choose one of them")
    return traced.at(length)


def _raw_preprocessing(served: Served) -> Preprocessing:
    """Return the preprocessing, if it does not resize or crop images of the network's input size."""
    preprocessing = served.model.preprocessing
    if preprocessing.sound is not None:
        raise DataError("--raw-input is for images, but this network takes audio; leave it out")
    shape = served.engine.traced.input_shape
    if preprocessing.tensors is not None or len(shape) != 3 or shape[0] != preprocessing.channels:
        raise DataError(f"--raw-input is for images, but the network takes {list(shape)}; leave it out")
    preprocessing.check_images()
    height, width = shape[1:]
    unchanged = (
        preprocessing.size in (None, (height, width))
        and preprocessing.resize in (None, min(height, width))
        and (preprocessing.crop is None or preprocessing.crop == height == width)
    )
    if not unchanged:
        resized = preprocessing.size or preprocessing.resize
        raise DataError(
            f"--raw-input does not support this preprocessing: it resizes to {resized} and crops to "
            f"{preprocessing.crop} pixels; leave out --raw-input and preprocess the inputs yourself"
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
    """Yield random inputs (as fed, preprocessed) of widely varying scale, to reach more than one exit."""
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
