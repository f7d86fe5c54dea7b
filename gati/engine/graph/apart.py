"""Conversion in a separate process, for background threads while the process serves requests.

torch's exporter is pure Python: it holds the GIL for seconds, and its garbage keeps the collector busy for a
quarter of a second. Threads that answer requests in the same process would have to wait.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import FunctionType
from typing import IO, TYPE_CHECKING, Any

from gati.errors import ModelError
from gati.model.program import compiled, packed

if TYPE_CHECKING:
    from torch import Tensor, nn

IDLE_S = 60.0  # after which the process ends: it holds some 400 MB, and versions are minutes apart
_LENGTH = struct.Struct(">Q")

_log = logging.getLogger(__name__)


@contextmanager
def converting_apart() -> Iterator[Apart]:
    """Run this thread's conversions inside the context in a separate process, started when needed."""
    process = Apart()
    token = _process.set(process)
    try:
        yield process
    finally:
        _process.reset(token)
        process.close()


def process_apart() -> Apart | None:
    """The process that converts for the calling thread, if there is one."""
    return _process.get()


class Apart:
    """A process that converts, started on first use. Not thread-safe; must be closed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def convert(self, module: nn.Module, example: tuple[Tensor, ...], name: str) -> bytes | None:
        """The module as an ONNX model; None if the process cannot convert it, so this one should.

        **Raises:** `ModelError` for an operator that ONNX does not have.
        """
        request = _pickled((module, example, name))
        if request is None:
            return None
        for _ in range(2):  # it may just have ended because it was idle
            try:
                kind, answer = self._ask(request)
            except (OSError, EOFError) as error:
                _log.debug("the process that converts has ended: %s", error)
                self.close()
                continue
            if kind == "refused":
                raise ModelError(str(answer))
            if kind == "converted":
                return bytes(answer)
            _log.info("%s cannot be converted in a separate process: %s", name, answer)
            return None
        return None

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # unsent data does not matter
                    pipe.close()
        process.kill()  # it has no state to lose
        process.wait()

    def _ask(self, request: bytes) -> tuple[str, Any]:
        if self._process is None:
            self._process = _started()
        asked, answered = self._process.stdin, self._process.stdout
        if asked is None or answered is None:
            raise AssertionError("the process was started with pipes")
        write_message(asked, request)
        reply: tuple[str, Any] = pickle.loads(read_message(answered))
        return reply


def _started() -> subprocess.Popen[bytes]:
    """Start the process; it inherits the priority of the calling thread."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "gati.engine.graph.converting"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )


class _Pickler(pickle.Pickler):
    """Pickles the functions of a traced network, which belong to no module, by their source."""

    def reducer_override(self, value: Any) -> Any:
        """As `pickle.Pickler.reducer_override`."""
        if isinstance(value, FunctionType) and hasattr(value, "source"):
            return compiled, packed(value)
        return NotImplemented


def _pickled(value: Any) -> bytes | None:
    """Pickle a value; None if that is impossible, such as for a class that was defined in a function."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=5).dump(value)
    except Exception as error:  # pickling user objects may raise anything
        _log.info("cannot be sent to another process: %s", error)
        return None
    return buffer.getvalue()


def write_message(pipe: IO[bytes], message: bytes) -> None:
    """Write a message, preceded by its length."""
    pipe.write(_LENGTH.pack(len(message)))
    pipe.write(message)
    pipe.flush()


def read_message(pipe: IO[bytes]) -> bytes:
    """Read what `write_message` wrote. Raises EOFError if the other side has closed the pipe."""
    (length,) = _LENGTH.unpack(_exactly(pipe, _LENGTH.size))
    return _exactly(pipe, length)


def _exactly(pipe: IO[bytes], count: int) -> bytes:
    parts: list[bytes] = []
    while count > 0:
        part = pipe.read(count)
        if not part:
            raise EOFError("the other side has closed the pipe")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


_process: ContextVar[Apart | None] = ContextVar("_process", default=None)
