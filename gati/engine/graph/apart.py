"""Conversion in a separate process, for background threads while the process serves requests.

torch's exporter is pure Python: it holds the GIL for seconds, and collecting its garbage takes a quarter of a
second. Threads that answer requests in the same process would have to wait.
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

IDLE_S = 60.0  # without requests, then the process exits: it holds some 400 MB, versions are minutes apart
_LENGTH = struct.Struct(">Q")

_log = logging.getLogger(__name__)


@contextmanager
def converting_apart() -> Iterator[Apart]:
    """Run this thread's conversions inside the context in a separate process, started on first use."""
    process = Apart()
    token = _process.set(process)
    try:
        yield process
    finally:
        _process.reset(token)
        process.close()


def process_apart() -> Apart | None:
    """The calling thread's conversion process, if there is one."""
    return _process.get()


class Apart:
    """A conversion process, started on first use. Not thread-safe; must be closed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def convert(self, module: nn.Module, example: tuple[Tensor, ...], name: str) -> bytes | None:
        """The module as an ONNX model; None if the caller should convert it in its own process instead.

        **Raises:** `ModelError` for an operator that ONNX does not have.
        """
        request = _pickled((module, example, name))
        if request is None:
            return None
        for _ in range(2):  # again, because the process may just have exited after being idle
            try:
                kind, answer = self._ask(request)
            except (OSError, EOFError) as error:
                _log.debug("the conversion process has ended: %s", error)
                self.close()
                continue
            if kind == "refused":
                raise ModelError(str(answer))
            if kind == "converted":
                return bytes(answer)
            _log.info("cannot convert %s in a separate process: %s", name, answer)
            return None
        return None

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # unsent data is flushed, to a process that may have exited
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
    """Start the conversion process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "gati.engine.graph.converting"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )


class _Pickler(pickle.Pickler):
    """Pickles functions of a traced network by their source, because no module can import them."""

    def reducer_override(self, value: Any) -> Any:
        """As `pickle.Pickler.reducer_override`."""
        if isinstance(value, FunctionType) and hasattr(value, "source"):
            return compiled, packed(value)
        return NotImplemented


def _pickled(value: Any) -> bytes | None:
    """Pickle a value; None if that fails, for example for a class defined inside a function."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=5).dump(value)
    except Exception as error:  # pickling user objects may raise anything
        _log.info("cannot pickle the network for the conversion process: %s", error)
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
