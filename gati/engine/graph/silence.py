"""Hiding what converters and quantisers tell their own developers."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_ALONE = threading.RLock()  # warning filters and levels belong to the process


@contextmanager
def silenced(*loggers: str) -> Iterator[None]:
    """Hide warnings, and what these loggers have to say below errors; "" is the root logger.

    One thread at a time is inside.
    """
    found = [logging.getLogger(name) for name in loggers]
    with _ALONE:
        levels = [logger.level for logger in found]
        try:
            for logger in found:
                logger.setLevel(logging.ERROR)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            for logger, level in zip(found, levels, strict=True):
                logger.setLevel(level)
