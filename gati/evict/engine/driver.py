"""A thread that steps an engine while there is work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from gati.errors import UnavailableError
from gati.evict.engine.engine import PrefixEngine

_log = logging.getLogger("gati.engine")


class EngineDriver:
    """Steps `engine` in its own thread between `start` and `stop`.

    If a step fails, the engine and all requests end; `failed` is called with the error.
    """

    def __init__(self, engine: PrefixEngine, failed: Callable[[BaseException], None]) -> None:
        self._engine = engine
        self._failed = failed
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefix-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Wait for the current step, end all requests, and return every page to the pool."""
        self._stopping.set()
        self._engine.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._engine.close(UnavailableError("the engine is shutting down"))

    def _run(self) -> None:
        engine = self._engine
        try:
            while not self._stopping.is_set():
                if not engine.step() and not self._stopping.is_set():  # it may have cleared the wake-up
                    engine.wait_for_work()
        except Exception as error:  # after any error, no request may wait for this engine
            _log.exception("a step failed")
            self._failed(error)
