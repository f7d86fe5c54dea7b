"""Thrift messages to and from the bytes of a frame, with limits set on purpose."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from thrift.protocol.TBinaryProtocol import TBinaryProtocol, TBinaryProtocolAccelerated
from thrift.Thrift import TApplicationException, TException, TMessageType
from thrift.transport.TTransport import TMemoryBuffer

from gati.errors import GatiError, RequestError

__all__ = ["Limits", "Message", "Service", "encode", "frame_length"]

_LARGE_BYTES = 256 * 1024  # from here on the accelerated codec, which copies, is the slower one
_LENGTH = struct.Struct("!i")


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
    buffer = TMemoryBuffer()
    protocol = TBinaryProtocolAccelerated(buffer)
    if _is_large(body):
        protocol = TBinaryProtocol(buffer)
    try:
        protocol.writeMessageBegin(name, kind, sequence)
        body.write(protocol)
        protocol.writeMessageEnd()
    except (TException, TypeError, struct.error, OverflowError) as error:
        raise RequestError(f"cannot be said in Thrift: {error}") from error
    payload: bytes = buffer.getvalue()
    if len(payload) > limits.frame_bytes:
        raise RequestError(f"a message of {len(payload)} bytes, the limit is {limits.frame_bytes}; send less")
    return _LENGTH.pack(len(payload)) + payload


def frame_length(header: bytes, limits: Limits) -> int:
    """The length of the frame that follows. Raises `RequestError` when it cannot be one."""
    length = int(_LENGTH.unpack(header)[0])
    if not 0 < length <= limits.frame_bytes:
        raise RequestError(f"a frame of {length} bytes, allowed are 1 to {limits.frame_bytes}")
    return length


def _protocol(frame: bytes, limits: Limits) -> Any:
    kind = TBinaryProtocol if len(frame) > _LARGE_BYTES else TBinaryProtocolAccelerated
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
        if any(isinstance(value, bytes) and len(value) > _LARGE_BYTES for value in fields):
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
