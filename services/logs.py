"""Structured logs: one JSON object per line, on stderr."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from gati.errors import GatiError, first_line

_encode = json.JSONEncoder(default=str).encode
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class _JsonLines(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service
        self._second = (0, "")  # the last one, formatted: most lines share it

    def format(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if second != self._second[0]:
            self._second = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        line = {
            "time": f"{self._second[1]}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return _encode(line)


def log_failure(
    log: logging.Logger, text: str, error: Exception, *, level: int = logging.WARNING, **extra: Any
) -> None:
    """Log why something failed: a `GatiError` in one line, any other exception with its traceback."""
    trace = None if isinstance(error, GatiError) else error
    log.log(level, text, extra={**extra, "reason": first_line(error)}, exc_info=trace)


def configure(service: str, level: str) -> None:
    """Log to stderr, from `level` (debug, info, warning, error) up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for other in ("asyncio", "uvicorn.error"):  # where a server starts and ends, our own lines say more
        logging.getLogger(other).setLevel(max(logging.WARNING, logging.getLogger().level))
