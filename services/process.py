"""What the process of a service is told, how it begins, and when it is to end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import uvloop
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gati.errors import GatiError
from services import logs

__all__ = ["ProcessSettings", "ended", "run"]


class ProcessSettings(BaseModel):
    """Where a service listens (port 0: a free one), when it ends, what it logs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    end_with_stdin: bool = False
    log_level: str = "info"


S = TypeVar("S", bound=ProcessSettings)


def run(
    kind: type[S], name: Callable[[S], str], serve: Callable[[S], Coroutine[Any, Any, None]]
) -> int:
    """Serve as the settings on the command line say; the exit status is 2 for what the user can mend."""
    try:
        settings = kind.model_validate_json(sys.argv[1])
    except (IndexError, ValidationError) as error:
        print(f"error: settings as JSON are needed: {error}", file=sys.stderr)
        return 2
    logs.configure(name(settings), settings.log_level)
    try:
        uvloop.run(serve(settings))
    except GatiError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    finally:
        gc.freeze()  # ending, the interpreter would search all of torch for garbage: a second of a core
    return 0


async def ended(*, with_stdin: bool) -> None:
    """Wait until this process is to end: SIGTERM, SIGINT, or its stdin ends where another started it."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, stopped.set)
    if with_stdin:
        threading.Thread(target=_read_to_the_end, args=(loop, stopped), daemon=True).start()
    await stopped.wait()


def _read_to_the_end(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    stdin = sys.stdin.fileno()
    while os.read(stdin, 4096):
        continue
    with suppress(RuntimeError):  # the loop has ended before
        loop.call_soon_threadsafe(stopped.set)
