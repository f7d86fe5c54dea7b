"""Conversion in a process of its own, for threads that work beside the serving of requests.

torch's exporter is Python from end to end: for seconds it hardly lets go of the interpreter, and what it
leaves behind keeps the garbage collector busy for a quarter of a second. Whoever answers requests in the same
process would wait for all of that.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import select
import signal
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

__all__ = ["Apart", "converting_apart", "process_apart"]

_IDLE_S = 60.0  # then the process ends: it holds some 400 MB, and versions are minutes apart
_LENGTH = struct.Struct(">Q")

_log = logging.getLogger(__name__)


@contextmanager
def converting_apart() -> Iterator[Apart]:
    """Have what this thread converts in this context converted in a process that begins when it is needed."""
    process = Apart()
    token = _process.set(process)
    try:
        yield process
    finally:
        _process.reset(token)
        process.close()


def process_apart() -> Apart | None:
    """The process that converts for the calling thread, if there is to be one."""
    return _process.get()


class Apart:
    """A process that converts, started when first asked; one thread at a time asks. Close it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def convert(self, module: nn.Module, example: tuple[Tensor, ...], name: str) -> bytes | None:
        """The module as an ONNX model; None where the process cannot do that: try it here.

        **Raises:** `ModelError` for an operator that ONNX does not have.
        """
        request = _pickled((module, example, name))
        if request is None:
            return None
        for _ in range(2):  # it may just have ended, having had nothing to do
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
            _log.info("%s cannot be converted in a process of its own: %s", name, answer)
            return None
        return None

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was not sent any more
                    pipe.close()
        process.kill()  # it holds nothing that could be lost
        process.wait()

    def _ask(self, request: bytes) -> tuple[str, Any]:
        if self._process is None:
            self._process = _started()
        asked, answered = self._process.stdin, self._process.stdout
        if asked is None or answered is None:
            raise AssertionError("the process was started with pipes")
        _write(asked, request)
        reply: tuple[str, Any] = pickle.loads(_read(answered))
        return reply


def _started() -> subprocess.Popen[bytes]:
    """A child inherits the priority of the thread that starts it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "gati.engine.graph.apart"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )


class _Pickler(pickle.Pickler):
    """Knows the functions that a traced network is made of, which no module has."""

    def reducer_override(self, value: Any) -> Any:
        """As `pickle.Pickler` asks for it."""
        if isinstance(value, FunctionType) and hasattr(value, "source"):
            return compiled, packed(value)
        return NotImplemented


def _pickled(value: Any) -> bytes | None:
    """None for what cannot be sent, such as a class that was made in a function."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=5).dump(value)
    except Exception as error:  # pickling raises whatever the pickled raise
        _log.info("nothing to be sent to another process: %s", error)
        return None
    return buffer.getvalue()


def _write(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(_LENGTH.pack(len(message)))
    pipe.write(message)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(pipe, _LENGTH.size))
    return _exactly(pipe, length)


def _exactly(pipe: IO[bytes], count: int) -> bytes:
    parts: list[bytes] = []
    while count > 0:
        part = pipe.read(count)
        if not part:
            raise EOFError("the other side has gone")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


_process: ContextVar[Apart | None] = ContextVar("_process", default=None)


def main() -> None:
    """Convert what comes in, until nothing does any more or who asks has gone."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for who asks to heed
    torch.set_num_threads(1)
    with open(0, "rb", buffering=0) as requests, os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # whatever is printed is no answer
        with suppress(EOFError, BrokenPipeError):
            while select.select([requests], [], [], _IDLE_S)[0]:
                _write(answers, pickle.dumps(_answer(_read(requests))))


def _answer(request: bytes) -> tuple[str, Any]:
    from gati.engine.graph.convert import convert_here

    try:
        module, example, name = pickle.loads(request)
        return "converted", convert_here(module, example, name).SerializeToString()
    except ModelError as error:
        return "refused", str(error)
    except Exception as error:  # classes that are not to be found here, for example
        return "failed", f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
