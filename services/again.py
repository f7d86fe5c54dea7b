"""Repeats a task despite errors, with exponential back-off."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NoReturn

from gati.errors import GatiError
from services.logs import log_failure

_log = logging.getLogger("gati.again")


@dataclass
class Backoff:
    """Pauses that double with every consecutive failure, with some jitter.

    A failure after a run of more than `healthy_s` counts as the first one.
    """

    first_s: float
    longest_s: float
    healthy_s: float = 30.0
    failures: int = 0

    def after_s(self, lasted_s: float) -> float:
        """The pause after a run that lasted `lasted_s` and failed."""
        self.failures = 1 if lasted_s > self.healthy_s else self.failures + 1
        pause_s = min(self.longest_s, self.first_s * 2.0 ** min(self.failures - 1, 30))
        return pause_s * random.uniform(0.75, 1.25)


async def keep_on(
    what: str,
    once: Callable[[], Awaitable[None]],
    *,
    every_s: float,
    longest_s: float,
    failed: Callable[[Exception], None] = lambda error: None,
    level: int = logging.WARNING,
) -> NoReturn:
    """Await `once()` every `every_s` seconds until cancelled, even if it raises.

    After each exception `failed` is called with it; while exceptions continue, the pauses grow up to
    `longest_s`. A `GatiError` is logged in one line at `level`, any other exception as an error with its
    traceback. `what` names the task in the log.
    """
    backoff = Backoff(every_s, longest_s)
    while True:
        began_s = time.monotonic()
        try:
            await once()
            backoff.failures = 0
            pause_s = every_s
        except Exception as error:
            of_kind = level if isinstance(error, GatiError) else logging.ERROR
            log_failure(_log, "failed", error, level=of_kind, what=what)
            failed(error)
            pause_s = backoff.after_s(time.monotonic() - began_s)
        await asyncio.sleep(pause_s)
