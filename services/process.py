"""The process of a service: its settings, startup and shutdown."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gati.errors import GatiError, StorageError, UnavailableError
from gati.priority import take_turns_often
from services import logs
from services.invalid import first_invalid, no_such_setting

USAGE = 2  # exit status: invalid settings; a restart would fail again
_STDIN = 0
_TRY_AGAIN = 75  # exit status: the cause, such as a missing disk or server, may disappear


class ProcessSettings(BaseModel):
    """The address of a service (port 0: a free one), when it ends, and its log level.

    `socket`, the path of a Unix socket, takes precedence over `host` and `port`. If other machines can reach
    these, `secret_file` has the secret that clients need; `certificate` and `certificate_key` are for TLS.
    With `end_with_stdin` the process ends when its stdin closes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    socket: Path | None = None
    secret_file: Path | None = None
    certificate: Path | None = None
    certificate_key: Path | None = None
    end_with_stdin: bool = False
    log_level: str = "info"


S = TypeVar("S", bound=ProcessSettings)


def run(kind: type[S], name: Callable[[S], str], serve: Callable[[S], Coroutine[Any, Any, None]]) -> int:
    """Serve with settings from JSON on the command line or, if that is `-`, in the first line of stdin.

    Returns the exit status: 2 for an error that the user must fix, 75 for one that a retry may fix.
    """
    given = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        settings = kind.model_validate_json(sys.stdin.buffer.readline() if given == "-" else given)
    except ValidationError as error:
        print(f"error: {_why_not(kind, error)}", file=sys.stderr)
        return USAGE
    logs.configure(name(settings), settings.log_level)
    take_turns_often()
    try:
        uvloop.run(serve(settings))
    except GatiError as error:
        print(f"error: {error}", file=sys.stderr)
        return _TRY_AGAIN if isinstance(error, StorageError | UnavailableError) else error.exit_status
    finally:
        gc.freeze()  # otherwise the exiting interpreter collects garbage in all of torch, for a second
    return 0


def _why_not(kind: type[ProcessSettings], error: ValidationError) -> str:
    invalid = first_invalid(error.errors(include_input=False))  # they may contain passwords
    if not invalid.place:
        return f"give the settings as JSON ({invalid.reason})"
    unknown = invalid.kind == "extra_forbidden"
    reason = no_such_setting(invalid.where, kind.model_fields) if unknown else invalid.reason
    return f"setting '{invalid.where}': {reason}"


def on_signals(end: Callable[[], object], reload: Callable[[], object] | None = None) -> None:
    """From now on call `end` at each SIGTERM and SIGINT, and `reload`, if given, at each SIGHUP.

    A terminal that is closed sends SIGHUP, too, to the processes in its foreground: then `end` is called.
    Call it in the running event loop, which makes the calls.
    """
    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, end)
    if reload is None:
        return
    in_foreground = _in_foreground()

    def hung_up() -> None:
        if in_foreground and not os.isatty(_STDIN):
            loop.add_signal_handler(signal.SIGHUP, lambda: None)  # the shell sends another one
            end()
        else:
            reload()

    loop.add_signal_handler(signal.SIGHUP, hung_up)


def _in_foreground() -> bool:
    """Whether this process is in the foreground of the terminal that is its stdin."""
    try:
        return os.tcgetpgrp(_STDIN) == os.getpgrp()
    except OSError:  # it is no terminal
        return False


def end_after(seconds: float) -> None:
    """End this process after that time in any case: a thread that hangs would keep it alive for ever."""
    timer = threading.Timer(seconds, os._exit, (_TRY_AGAIN,))
    timer.daemon = True
    timer.start()


async def ended(*, with_stdin: bool, reload: Callable[[], object] = lambda: None) -> None:
    """Wait until this process should end: on SIGTERM, SIGINT or, `with_stdin`, when its stdin closes.

    With stdin, signals are ignored: a terminal or systemd sends them to every process of a service, but this
    one must keep answering its parent while that drains. `reload` is called at each SIGHUP.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    on_signals((lambda: None) if with_stdin else stopped.set, reload=reload)
    if with_stdin:
        threading.Thread(target=_read_to_the_end, args=(loop, stopped), daemon=True).start()
    await stopped.wait()


def _read_to_the_end(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    stdin = sys.stdin.fileno()
    while os.read(stdin, 4096):
        continue
    with suppress(RuntimeError):  # the loop is already closed
        loop.call_soon_threadsafe(stopped.set)
