"""Thrift messages to and from the bytes of a frame, with limits set on purpose."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from thrift.protocol.TBinaryProtocol import TBinaryProtocol, TBinaryProtocolAccelerated
from thrift.Thrift import TApplicationException, TException, TMessageType
from thrift.transport.TTransport import TMemoryBuffer, TTransportBase

from gati.errors import GatiError, RequestError

LARGE_BYTES = 256 * 1024  # from here on the accelerated codec, which copies, is the slower one
_LENGTH = struct.Struct("!i")
_CALLS = (TMessageType.CALL, TMessageType.ONEWAY)


@dataclass(frozen=True)
class Limits:
    """Limits for a peer: bytes of a frame (and of a string in it), entries of a list or map."""

    frame_bytes: int = 64 * 2**20
    container_entries: int = 2**20


@dataclass(frozen=True)
class Message:
    """One decoded message: a call's arguments, a call's result, or an exception of the protocol."""

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
        """Read a frame. Raises `RequestError` for anything that is not a whole message of this service."""
        protocol = _protocol(frame, limits)
        try:
            name, kind, sequence = protocol.readMessageBegin()
            body = self._body(name, kind)
            body.read(protocol)
            protocol.readMessageEnd()
            _check(body)
            if name in self.arguments and None in vars(body).values() and kind in _CALLS:
                raise RequestError(f"the call '{name}' lacks an argument")
        except GatiError:
            raise
        except Exception as error:  # the codecs raise whatever the bytes provoke
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
    """The arguments of a call that this service does not have: read over."""

    def read(self, protocol: Any) -> None:
        from thrift.Thrift import TType

        protocol.skip(TType.STRUCT)


def encode(name: str, kind: int, sequence: int, body: Any, limits: Limits) -> bytes:
    """A message as a frame with its length in front. Raises `RequestError` when it is too large."""
    return b"".join(encode_parts(name, kind, sequence, body, limits))


def encode_parts(
    name: str, kind: int, sequence: int, body: Any, limits: Limits
) -> list[bytes | bytearray | memoryview]:
    """As `encode`, in parts to be sent in this order: large fields, which may be views, are not copied."""
    frame = _Frame()
    protocol = TBinaryProtocol(frame) if _is_large(body) else TBinaryProtocolAccelerated(frame)
    try:
        protocol.writeMessageBegin(name, kind, sequence)
        body.write(protocol)
        protocol.writeMessageEnd()
    except (TException, TypeError, struct.error, OverflowError) as error:
        raise RequestError(f"cannot be said in Thrift: {error}") from error
    length = sum(map(len, frame.parts)) - _LENGTH.size
    if length > limits.frame_bytes:
        raise RequestError(f"a message of {length} bytes, the limit is {limits.frame_bytes}; send less")
    _LENGTH.pack_into(frame.head, 0, length)
    return frame.parts


class _Frame(TTransportBase):  # type: ignore[misc]  # thrift has no types
    """Takes what a protocol writes, with room for the length in front."""

    def __init__(self) -> None:
        self.head = bytearray(_LENGTH.size)
        self.parts: list[bytes | bytearray | memoryview] = [self.head]
        self._open: bytearray | None = self.head  # what small parts are added to

    def write(self, data: bytes | memoryview) -> None:
        """Take in what comes next."""
        if len(data) > LARGE_BYTES:
            self.parts.append(data)
            self._open = None
        elif self._open is None:
            self._open = bytearray(data)
            self.parts.append(self._open)
        else:
            self._open += data


def frame_length(header: bytes, limits: Limits) -> int:
    """The length of the frame that follows. Raises `RequestError` when it cannot be one."""
    length = int(_LENGTH.unpack(header)[0])
    if not 0 < length <= limits.frame_bytes:
        raise RequestError(f"a frame of {length} bytes, allowed are 1 to {limits.frame_bytes}")
    return length


def _protocol(frame: bytes, limits: Limits) -> Any:
    kind = TBinaryProtocol if len(frame) > LARGE_BYTES else TBinaryProtocolAccelerated
    return kind(
        TMemoryBuffer(frame),
        strictRead=True,
        string_length_limit=limits.frame_bytes,
        container_length_limit=limits.container_entries,
    )


def _is_large(body: Any) -> bool:
    """Whether a binary field near the top makes the message a large one."""
    structs = [body]
    for _ in range(3):  # a call's arguments, its request, the tensor in it
        fields = [value for inner in structs for value in vars(inner).values()]
        if any(isinstance(value, bytes | memoryview) and len(value) > LARGE_BYTES for value in fields):
            return True
        structs = [value for value in fields if hasattr(value, "thrift_spec")]
    return False


def _check(body: Any) -> None:
    """Required fields are there, all the way down; reading does not check that by itself."""
    if hasattr(body, "validate"):
        body.validate()
    if isinstance(body, list):
        for entry in body:
            _check(entry)
    elif hasattr(body, "thrift_spec"):
        for entry in vars(body).values():
            if isinstance(entry, list) or hasattr(entry, "thrift_spec"):
                _check(entry)
