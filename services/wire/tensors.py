"""Arrays on the wire: the datatypes of the Open Inference Protocol, row-major and little-endian."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gati.errors import RequestError
from services.wire.gen.ttypes import Tensor

BYTES = "BYTES"  # the datatype of text and files
LONGEST_TEXT = 64 * 1024  # characters, even if the tokenizer keeps only a few tokens
LONGEST_TEXT_BYTES = 4 * LONGEST_TEXT
LONGEST_PLACE = 128  # characters of the name of a place

DATATYPES = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
_NAMES = {dtype: name for name, dtype in DATATYPES.items()}
_MOST_DIMENSIONS = 8
_LARGEST_SIZE = 2**40
_MOST_PIECES = 2**16


def datatype_of(array: NDArray[Any]) -> str:
    """The protocol's name for an array's dtype."""
    return _NAMES[array.dtype.newbyteorder("<")]


def inputs_in(tensor: Any) -> int:
    """The number of inputs in a wire's `Tensor` [n, ...]; a scalar counts as one."""
    return int(tensor.shape[0]) if tensor.shape else 1


def to_tensor(array: NDArray[Any]) -> Any:
    """An array as the wire's `Tensor`."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return Tensor(_NAMES[little.dtype], list(array.shape), np.ascontiguousarray(little).tobytes())


def from_tensor(tensor: Any) -> NDArray[Any]:
    """The array in a wire's `Tensor`, as a writable copy. Raises `RequestError`."""
    return from_bytes(tensor.datatype, tensor.shape, tensor.data).copy()


def text_tensor(texts: Sequence[str]) -> Any:
    """Texts as the wire's `Tensor`, BYTES [n]."""
    return Tensor(BYTES, [len(texts)], packed_texts(texts))


def packed_texts(texts: Sequence[str]) -> bytes:
    """Texts in the protocol's binary form: for each, its length in four bytes, then UTF-8."""
    return packed_files([text.encode() for text in texts])


def packed_files(contents: Sequence[bytes]) -> bytes:
    """Files in the protocol's binary form: for each, its length in four bytes, then its content."""
    return b"".join(struct.pack("<I", len(each)) + each for each in contents)


def texts_of(tensor: Any) -> list[str]:
    """The texts in a wire's `Tensor`, BYTES [n] or [n, 1].

    **Raises:** `RequestError` for another shape, data that do not fit it, too many texts, or a text that is
    too long or not UTF-8.
    """
    return list(_texts(tensor))


def check_texts(tensor: Any) -> None:
    """Raise as `texts_of`. Decodes one text at a time, because a `str` may take four times the memory."""
    for _ in _texts(tensor):
        continue


def recordings_of(tensor: Any) -> list[memoryview]:
    """The files in a wire's `Tensor`, BYTES [n] or [n, 1]. Raises `RequestError`."""
    return list(_pieces(tensor, "recording"))


def _texts(tensor: Any) -> Iterator[str]:
    for number, piece in enumerate(_pieces(tensor, "text")):
        if len(piece) > LONGEST_TEXT_BYTES:
            raise RequestError(f"text {number} has {len(piece)} bytes; send at most {LONGEST_TEXT_BYTES}")
        try:
            yield str(piece, "utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(f"text {number} is not UTF-8; send UTF-8") from error


def _pieces(tensor: Any, what: str) -> Iterator[memoryview]:
    """The elements of BYTES [n] or [n, 1]: for each, its length in four bytes, then its content."""
    shape, data = list(tensor.shape), memoryview(tensor.data)
    if len(shape) not in (1, 2) or shape[1:] not in ([], [1]):
        raise RequestError(f"{what} has shape {shape[:_MOST_DIMENSIONS]}; send BYTES [batch] or [batch, 1]")
    count, found, start = elements(shape), 0, 0
    if count > _MOST_PIECES:
        raise RequestError(f"{count} {what}s; send at most {_MOST_PIECES} at a time")
    while start < len(data) and found < count:
        length = int.from_bytes(data[start : start + 4], "little")
        start, end = start + 4, start + 4 + length
        if end > len(data):
            break
        yield data[start:end]
        found, start = found + 1, end
    if found != count or start != len(data):
        raise RequestError(f"shape {shape} of BYTES does not fit {len(data)} bytes; correct it")


def elements(shape: Sequence[int]) -> int:
    """How many values an array of that shape has. Raises `RequestError` for an invalid shape.

    The limits on the number of dimensions and their sizes keep the product cheap to compute.
    """
    few = len(shape) <= _MOST_DIMENSIONS
    if not (few and all(0 <= size < _LARGEST_SIZE for size in shape)):
        raise RequestError(
            f"shape {list(shape[:_MOST_DIMENSIONS])} is invalid; give up to {_MOST_DIMENSIONS} sizes from 0"
        )
    return math.prod(shape)


def from_bytes(datatype: str, shape: Sequence[int], data: bytes | memoryview) -> NDArray[Any]:
    """A view of `data` as an array, not writable if `data` are `bytes`.

    **Raises:** `RequestError` for an unknown datatype, or a shape that does not fit the number of bytes.
    """
    return np.frombuffer(data, check_bytes(datatype, shape, len(data))).reshape(shape)


def check_bytes(datatype: str, shape: Sequence[int], count: int) -> np.dtype[Any]:
    """The dtype of an array that should take `count` bytes. Raises as `from_bytes`."""
    dtype = DATATYPES.get(datatype)
    if dtype is None:
        raise RequestError(f"datatype {datatype[:40]!r} is not one of {', '.join(DATATYPES)}")
    expected = elements(shape) * dtype.itemsize
    if count != expected:
        raise RequestError(
            f"shape {list(shape)} of {datatype} takes {expected} bytes, got {count}; correct the shape"
        )
    return dtype
