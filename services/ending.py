"""When a process that serves is to end: SIGTERM, SIGINT, or the end of its stdin where another started it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from contextlib import suppress

__all__ = ["ended"]


async def ended(*, with_stdin: bool) -> None:
    """Wait until this process is to end."""
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
