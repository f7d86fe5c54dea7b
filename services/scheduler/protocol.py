"""The Open Inference Protocol (V2) with its extension for binary tensors: parses requests, renders responses.

The input of a model is `input`: FP32 [batch, ...] as the network takes it, or UINT8 [batch, height, width,
channels], images, which Gati preprocesses. A network with several inputs takes them under their own names.
Models with a tokenizer also accept `text` (BYTES [batch]), and models for sound `recording` (BYTES [batch]:
WAV or FLAC files). The outputs are `probabilities`, `class_index`, `class_name` and `exit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from gati.errors import RequestError, first_line
from gati.model.arrays import one_of
from services.scheduler.nested import array_of
from services.scheduler.parameters import (
    FIELDS,
    PARAMETERS,
    UNUSED_FIELDS,
    UNUSED_PARAMETERS,
    check_names,
    place,
    positive,
    priority,
    shown,
    timeout,
)
from services.wire.codec import LARGE_BYTES
from services.wire.gen.ttypes import Tensor
from services.wire.tensors import (
    BYTES,
    DATATYPES,
    check_bytes,
    check_texts,
    datatype_of,
    elements,
    from_bytes,
    packed_texts,
    recordings_of,
    text_tensor,
    to_tensor,
)

HEADER_LENGTH = "Inference-Header-Content-Length"
OUTPUTS = ("probabilities", "class_index", "class_name", "exit")
_RECORDING = "recording"
_INPUT_NAMES = ("input", "image", "text", _RECORDING)
_DATATYPES = (*DATATYPES, BYTES)
_MOST_OUTPUTS = 64


class Output(NamedTuple):
    """A requested output."""

    name: str
    binary: bool = False


class InferenceRequest(NamedTuple):
    """A parsed request: its tensor in wire format, and its parameters."""

    id: str | None
    tensor: Any
    outputs: tuple[Output, ...]
    latency_slo_ms: float | None
    timeout_ms: float | None
    priority: int | None
    place: str | None = None


def split(body: bytes, header_length: str | None) -> tuple[bytes, memoryview]:
    """Return the JSON of a request, and the binary tensors after it. Raises `RequestError`."""
    length = len(body)
    if header_length is not None:
        is_number = header_length.isascii() and header_length.isdigit() and len(header_length) < 20
        if not (is_number and int(header_length) <= len(body)):
            raise RequestError(
                f"{HEADER_LENGTH} is {header_length[:40]!r}; give the length of the JSON in bytes"
            )
        length = int(header_length)
    text = body if length == len(body) else body[:length]
    return text, memoryview(body)[length:]


def parse_request(
    text: bytes,
    rest: bytes | memoryview = b"",
    arrays: Sequence[Any] = (),
    largest_batch: int | None = None,
) -> InferenceRequest:
    """Parse a request: JSON, and the binary tensors after it.

    `arrays` are the `InputArray`s of a model with several inputs; they are packed into one tensor. A batch of
    more than `largest_batch` inputs is refused before it is converted.

    **Raises:** `RequestError`, one line that names the problem and its place.
    """
    document = json_object(text)
    check_names(document, FIELDS, unused=UNUSED_FIELDS, what="field")
    parameters = _mapping(document, "parameters")
    check_names(parameters, PARAMETERS, unused=UNUSED_PARAMETERS)
    inputs = document.get("inputs")
    most = max(1, len(arrays))
    if not isinstance(inputs, list) or not 1 <= len(inputs) <= most or not _objects(inputs):
        tensors = "one tensor" if most == 1 else f"one to {most} tensors"
        raise RequestError(f"`inputs` must be a list with {tensors}: name, shape, datatype, data")
    if largest_batch is not None:
        _check_batch(inputs, largest_batch)
    identifier = document.get("id")
    if identifier is not None and not isinstance(identifier, str):
        raise RequestError("`id` must be text")
    return InferenceRequest(
        identifier,
        _packed(inputs, rest, arrays),
        _outputs(document.get("outputs"), parameters.get("binary_data_output") is True),
        positive(parameters, "latency_slo_ms"),
        timeout(parameters),
        priority(parameters.get("priority")),
        place(parameters.get("place")),
    )


def json_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises `RequestError`."""
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise RequestError("the body must be a JSON object")
    return document


def render_response(
    head: dict[str, Any], answers: Sequence[Any], class_names: Sequence[str] | None, wanted: Sequence[Output]
) -> tuple[bytes, int | None]:
    """Return the body of a response and, if binary tensors follow it, the length of its JSON."""
    outputs, tail = [], []
    for output in wanted:
        datatype, shape, values = _values(output.name, answers, class_names)
        entry: dict[str, Any] = {"name": output.name, "datatype": datatype, "shape": shape}
        if output.binary:
            data = (
                packed_texts(values) if datatype == BYTES else np.array(values, DATATYPES[datatype]).tobytes()
            )
            entry["parameters"] = {"binary_data_size": len(data)}
            tail.append(data)
        else:
            entry["data"] = values
        outputs.append(entry)
    text = orjson.dumps({**head, "outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)
    return b"".join((text, *tail)), len(text) if tail else None


def _values(
    name: str, answers: Sequence[Any], class_names: Sequence[str] | None
) -> tuple[str, list[int], Any]:
    """Return datatype, shape and flat values of an output."""
    count = len(answers)
    if name == "probabilities":
        rows = [np.frombuffer(each.probabilities, "<f4") for each in answers]
        together = rows[0] if count == 1 else np.stack(rows)
        return "FP32", [count, together.size // count], together.ravel()
    if name == "exit":
        return BYTES, [count], [each.exit for each in answers]
    indices = [each.class_index for each in answers]
    if name == "class_index":
        return "INT64", [count], indices
    names = map(str, indices) if class_names is None else (class_names[index] for index in indices)
    return BYTES, [count], list(names)


# --------------------------------------------------------------------------------------------------------


def _mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise RequestError(f"`{name}` must be an object")
    return found


def _objects(values: list[Any]) -> bool:
    return all(isinstance(each, dict) for each in values)


def _check_batch(entries: list[dict[str, Any]], largest: int) -> None:
    for shape in (entry.get("shape") for entry in entries):
        if isinstance(shape, list) and shape and _is_whole(shape[0]) and shape[0] > largest:
            raise RequestError(f"a batch of {shape[0]} inputs; send 1 to {largest} at a time")


def _packed(entries: list[dict[str, Any]], rest: bytes | memoryview, arrays: Sequence[Any]) -> Any:
    """Return the tensor of a request; several arrays are packed into one."""
    if len(entries) == 1 and entries[0].get("name") in _INPUT_NAMES:
        return _tensor(entries[0], rest)
    names = [each.name for each in arrays]
    given: list[str] = []
    for name in (entry.get("name") for entry in entries):
        if not (isinstance(name, str) and name in (*_INPUT_NAMES, *names)):
            listed = "; the input is `input`" if not names else f"; there are {', '.join(names)}"
            raise RequestError(f"no input is called {shown(name)!r}{listed}")
        given.append(name)
    if len(entries) == 1 and len(names) == 1:
        return _tensor(entries[0], rest)
    if sorted(given) != sorted(names):
        raise RequestError(f"the model takes {', '.join(names)}, each once; got {', '.join(given)}")
    tensors, start = {}, 0
    for name, entry in zip(given, entries, strict=True):
        size = _mapping(entry, "parameters").get("binary_data_size", 0)
        end = start + (size if _is_whole(size) else 0)
        tensors[name], start = _tensor(entry, rest[start:end]), end
    if start < len(rest):
        raise RequestError(f"{len(rest) - start} bytes follow the last input; correct `binary_data_size`")
    return _together([tensors[name] for name in names], arrays)


def _together(tensors: Sequence[Any], arrays: Sequence[Any]) -> Any:
    values = [from_bytes(each.datatype, each.shape, each.data) for each in tensors]
    for value, taken in zip(values, arrays, strict=True):
        if not value.ndim:
            shown = ", ".join(map(str, taken.shape))
            raise RequestError(f"`{taken.name}` has shape []; give [batch, {shown}], one row for each input")
    for value, taken in zip(values, arrays, strict=True):
        if not _fits(value, values[0], taken):
            shorter = " or shorter (all inputs of one length)," if taken.shorter else ","
            raise RequestError(
                f"`{taken.name}` has shape {list(value.shape)}; give [{len(values[0])}, "
                f"{', '.join(map(str, taken.shape))}]{shorter} with as many rows as `{arrays[0].name}`"
            )
        if (value.dtype.kind == "f") != (taken.datatype == "FP32") or value.dtype == np.uint64:
            raise RequestError(f"`{taken.name}` has datatype {datatype_of(value)}; send {taken.datatype}")
    kind = np.float32 if arrays[0].datatype == "FP32" else np.int64
    return to_tensor(one_of([value.astype(kind) for value in values]))


def _fits(value: NDArray[Any], first: NDArray[Any], taken: Any) -> bool:
    """Whether an array has the expected shape, and as many rows as the first array of the request."""
    longest = tuple(taken.shape)
    if taken.shorter and value.ndim == 2 and 0 < value.shape[1] <= longest[0]:
        return value.shape == first.shape
    return value.shape[1:] == longest and len(value) == len(first)


def _tensor(entry: dict[str, Any], rest: bytes | memoryview) -> Any:
    datatype, shape = entry.get("datatype"), entry.get("shape")
    if not isinstance(datatype, str) or datatype not in _DATATYPES:
        raise RequestError(f"`datatype` is {shown(datatype)!r}; choose one of {', '.join(_DATATYPES)}")
    if not isinstance(shape, list) or not all(map(_is_whole, shape[:9])):
        raise RequestError("`shape` must be a list of whole numbers, 0 or larger")
    size = _mapping(entry, "parameters").get("binary_data_size")
    if size is None:
        if rest:
            raise RequestError("binary data follow the JSON, but the input has no `binary_data_size`")
        if datatype == BYTES and entry.get("name") == _RECORDING:
            raise RequestError(
                "recordings cannot be sent in JSON; send them in binary, with `binary_data_size`"
            )
        if datatype == BYTES:
            return _text(entry.get("data"), shape)
        return to_tensor(_array(entry.get("data"), datatype, shape))
    if "data" in entry:
        raise RequestError("the input has both `data` and `binary_data_size`; send one")
    if size != len(rest):
        raise RequestError(f"`binary_data_size` is {shown(size)}, but {len(rest)} bytes follow the JSON")
    found = Tensor(datatype, shape, rest if len(rest) > LARGE_BYTES else bytes(rest))
    if datatype == BYTES and entry.get("name") == _RECORDING:
        recordings_of(found)
    elif datatype == BYTES:
        check_texts(found)
    else:
        check_bytes(datatype, shape, len(rest))
    return found


def _text(data: Any, shape: list[int]) -> Any:
    """Return texts from JSON: a list, or a list of lists with one each. Raises `RequestError`."""
    if not isinstance(data, list):
        raise RequestError("the input has no `data`; give a list of texts")
    if len(data) != elements(shape):
        raise RequestError(
            f"`data` has {len(data)} texts and shape {shape} takes {elements(shape)}; correct one"
        )
    texts = [each[0] if isinstance(each, list) and len(each) == 1 else each for each in data]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError("`data` is not a BYTES tensor; give a list of texts")
    found = text_tensor(texts)
    found.shape = shape
    return found


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _array(data: Any, datatype: str, shape: list[int]) -> NDArray[Any]:
    """Return nested or flat data as an array of shape `shape`. Raises `RequestError`."""
    if not isinstance(data, list):
        raise RequestError("the input has no `data`; give a list of numbers")
    expected = elements(shape)  # checks the shape before the data is converted
    try:
        array = array_of(data, DATATYPES[datatype])
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError(f"`data` is not a valid {datatype} tensor ({first_line(error)})") from error
    if array.size != expected:
        raise RequestError(f"`data` has {array.size} numbers and shape {shape} takes {expected}; correct one")
    nested, wanted = _counts(array.shape), _counts(shape)  # one may have merged axes of the other
    if not (nested <= wanted or wanted <= nested):
        raise RequestError(
            f"`data` is nested as {list(array.shape)} but `shape` is {shape}; correct one, or send it flat"
        )
    return array.reshape(shape)


def _counts(shape: Sequence[int]) -> set[int]:
    """How many entries there are at each depth."""
    return {1, *accumulate(shape, mul)}


def _outputs(entries: Any, binary: bool) -> tuple[Output, ...]:
    if entries is None or entries == []:
        return tuple(Output(name, binary) for name in OUTPUTS)
    if not isinstance(entries, list):
        raise RequestError("`outputs` must be a list")
    if len(entries) > _MOST_OUTPUTS:
        raise RequestError(f"`outputs` has {len(entries)} entries; there are {', '.join(OUTPUTS)}")
    found = []
    for entry in entries:
        if not isinstance(entry, dict) or not _is_output(entry.get("name")):
            named = entry.get("name") if isinstance(entry, dict) else entry
            raise RequestError(f"no output is called {shown(named)!r}; there are {', '.join(OUTPUTS)}")
        parameters = _mapping(entry, "parameters")
        if "classification" in parameters or "shared_memory_region" in parameters:
            raise RequestError(
                "`classification` and `shared_memory_region` are not supported; outputs are returned in full"
            )
        found.append(Output(entry["name"], parameters.get("binary_data", binary) is True))
    return tuple({output.name: output for output in found}.values())


def _is_output(name: Any) -> bool:
    return isinstance(name, str) and name in OUTPUTS
