"""Encodes Thrift messages to frames and decodes them, within limits."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from thrift.protocol.TBinaryProtocol import TBinaryProtocol
from thrift.Thrift import TApplicationException, TException, TMessageType, TType
from thrift.transport.TTransport import TMemoryBuffer, TTransportBase

from gati.errors import GatiError, RequestError

LARGE_BYTES = 256 * 1024  # above this, the accelerated codec is slower than Python's, because it copies
READ_BYTES = 256 * 1024  # most to read at a time
_LENGTH = _SEQUENCE = struct.Struct("!i")
_TITLE = struct.Struct("!ii")  # version and kind of a message; length of its name
_CALLS = (TMessageType.CALL, TMessageType.ONEWAY)

_encode: Callable[[Any, list[Any]], bytes] | None = None
_decode: Callable[[Any, Any, list[Any]], None] | None = None
with suppress(ImportError):  # a C extension that is not built everywhere
    from thrift.protocol import fastbinary

    _encode, _decode = fastbinary.encode_binary, fastbinary.decode_binary


@dataclass(frozen=True)
class Limits:
    """Limits on messages: bytes of a frame (and of a string in it), entries of a list or map."""

    frame_bytes: int = 64 * 2**20
    container_entries: int = 2**20


@dataclass(frozen=True)
class Message:
    """One decoded message; `body` is a call's arguments, a call's result, or an exception of the protocol."""

    name: str
    kind: int  # TMessageType
    sequence: int
    body: Any


class Service:
    """A service of the IDL: the structs of its calls' arguments and results, from its generated module."""

    def __init__(self, module: Any) -> None:
        self.arguments: dict[str, Any] = {}
        self.results: dict[str, Any] = {}
        for name in vars(module):
            if name.endswith("_args"):
                self.arguments[name.removesuffix("_args")] = getattr(module, name)
            elif name.endswith("_result"):
                self.results[name.removesuffix("_result")] = getattr(module, name)

    def decode(self, frame: bytes, limits: Limits) -> Message:
        """Decode a frame. Raises `RequestError` for anything but a complete message of this service."""
        try:
            name, kind, sequence, start = _title_of(frame)
            body = self._body(name, kind)
            body.read(_Reader(frame, start, limits))
            _check(body)
            if name in self.arguments and None in vars(body).values() and kind in _CALLS:
                raise RequestError(f"the call '{name}' lacks an argument")
        except GatiError:
            raise
        except Exception as error:  # invalid bytes make the codecs raise errors of any type
            raise RequestError(f"not a Thrift message of this service ({type(error).__name__})") from error
        return Message(name, kind, sequence, body)

    def _body(self, name: str, kind: int) -> Any:
        if kind == TMessageType.EXCEPTION:
            return TApplicationException()
        structs = self.results if kind == TMessageType.REPLY else self.arguments
        if name not in structs:
            return _Unknown()
        return structs[name]()


class _Unknown:
    """The arguments of a call that this service does not have; `read` skips them."""

    def read(self, protocol: Any) -> None:
        protocol.skip(TType.STRUCT)


def encode_parts(
    name: str, kind: int, sequence: int, body: Any, limits: Limits
) -> list[bytes | bytearray | memoryview]:
    """A message as a frame, its length first, in parts to send in this order.

    Large fields, which may be views, are not copied. Raises `RequestError` if it is too large or invalid.
    """
    frame = _Frame()
    try:
        frame.write(_title(name, kind))
        frame.write(_SEQUENCE.pack(sequence))
        spec = getattr(body, "thrift_spec", None)
        if _encode is None or spec is None or _is_large(body):
            body.write(TBinaryProtocol(frame))
        else:
            frame.write(_encode(body, [type(body), spec]))
    except (TException, TypeError, struct.error, OverflowError, UnicodeError) as error:
        raise RequestError(f"cannot be encoded in Thrift: {error}") from error
    length = sum(map(len, frame.parts)) - _LENGTH.size
    if length > limits.frame_bytes:
        raise RequestError(f"a message of {length} bytes, the limit is {limits.frame_bytes}; send less")
    _LENGTH.pack_into(frame.head, 0, length)
    return frame.parts


@lru_cache(64)
def _title(name: str, kind: int) -> bytes:
    """The beginning of a message, up to its sequence number."""
    said = name.encode()
    return _TITLE.pack(TBinaryProtocol.VERSION_1 | kind, len(said)) + said


def _title_of(frame: bytes) -> tuple[str, int, int, int]:
    """Name, kind and sequence number of a message, and the offset of its body."""
    said, length = _TITLE.unpack_from(frame)
    if said & TBinaryProtocol.VERSION_MASK != TBinaryProtocol.VERSION_1 or length < 0:
        raise RequestError("not a Thrift message of this version")
    end = _TITLE.size + length
    (sequence,) = _SEQUENCE.unpack_from(frame, end)
    name = frame[_TITLE.size : end].decode("utf-8")
    return name, said & TBinaryProtocol.TYPE_MASK, sequence, end + _SEQUENCE.size


class _Frame(TTransportBase):  # type: ignore[misc]  # thrift has no types
    """Collects what a protocol writes, after four bytes for the length."""

    def __init__(self) -> None:
        self.head = bytearray(_LENGTH.size)
        self.parts: list[bytes | bytearray | memoryview] = [self.head]
        self._open: bytearray | None = self.head  # the part that small data are appended to

    def write(self, data: bytes | memoryview) -> None:
        """Add the next bytes."""
        if len(data) > LARGE_BYTES:
            self.parts.append(data)
            self._open = None
        elif self._open is None:
            self._open = bytearray(data)
            self.parts.append(self._open)
        else:
            self._open += data


class Frames:
    """Splits the data from a connection into frames."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._rest = bytearray()

    @property
    def partial(self) -> bool:
        """Whether part of a frame has arrived."""
        return bool(self._rest)

    def take(self, data: bytes) -> list[bytes]:
        """Add data; returns the frames that are complete now. Raises `RequestError` for an invalid length."""
        self._rest += data
        found, start, size = [], 0, len(self._rest)
        with memoryview(self._rest) as rest:
            while size - start >= _LENGTH.size:
                begin = start + _LENGTH.size
                end = begin + frame_length(rest[start:begin], self._limits)
                if end > size:
                    break
                found.append(bytes(rest[begin:end]))
                start = end
        del self._rest[:start]
        return found


def frame_length(header: bytes | memoryview, limits: Limits) -> int:
    """The length of the frame that follows. Raises `RequestError` if it is not within the limits."""
    length = int(_LENGTH.unpack(header)[0])
    if not 0 < length <= limits.frame_bytes:
        raise RequestError(f"a frame of {length} bytes; 1 to {limits.frame_bytes} are allowed")
    return length


class _Reader(TBinaryProtocol):  # type: ignore[misc]  # thrift has no types
    """Reads a frame from the offset `start`."""

    def __init__(self, frame: bytes, start: int, limits: Limits) -> None:
        super().__init__(
            TMemoryBuffer(frame, start),
            string_length_limit=limits.frame_bytes,
            container_length_limit=limits.container_entries,
        )
        self._fast_decode = _decode if len(frame) <= LARGE_BYTES else None


@dataclass(frozen=True)
class _Fields:
    """The fields of a struct that hold bytes, a struct, or a list of structs.

    `validates`: the struct has a method that raises for missing required fields.
    """

    binary: tuple[str, ...]
    structs: tuple[str, ...]
    lists: tuple[str, ...]
    validates: bool


@cache
def _fields(kind: type) -> _Fields:
    binary, structs, lists = [], [], []
    for _, type_of, name, inner, _ in filter(None, getattr(kind, "thrift_spec", None) or ()):
        if type_of == TType.STRUCT:
            structs.append(name)
        elif type_of == TType.LIST and inner[0] == TType.STRUCT:
            lists.append(name)
        elif type_of == TType.STRING and inner == "BINARY":
            binary.append(name)
    return _Fields(tuple(binary), tuple(structs), tuple(lists), hasattr(kind, "validate"))


def _is_large(body: Any, depth: int = 3) -> bool:
    """Whether a struct has a large binary field, at most `depth` levels deep."""
    fields = _fields(body.__class__)
    for name in fields.binary:
        value = getattr(body, name)
        if value is not None and len(value) > LARGE_BYTES:
            return True
    if depth > 1:  # a call's arguments, its request, the tensor in it
        for name in fields.structs:
            value = getattr(body, name)
            if value is not None and _is_large(value, depth - 1):
                return True
    return False


def _check(body: Any) -> None:
    """Check that all required fields are present, at every level; decoding does not check that."""
    fields = _fields(body.__class__)
    if fields.validates:
        body.validate()
    for name in fields.structs:
        value = getattr(body, name)
        if value is not None:
            _check(value)
    for name in fields.lists:
        for value in getattr(body, name) or ():
            _check(value)
