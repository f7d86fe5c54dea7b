"""Reusing torch's table of ONNX operators across exports: building it takes half the time of an export."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Any

_log = logging.getLogger(__name__)
_exporting = threading.RLock()


@contextmanager
def one_table_of_operators() -> Iterator[None]:
    """Let exports inside the context share one operator table; other threads wait to enter the context.

    The table is internal to torch: if a release moves it, exports are slower but still work, and no thread
    waits.
    """
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        made = ONNXRegistry.__dict__["from_torchlib"]
    except (ImportError, KeyError) as error:
        _log.info("cannot find torch's table of ONNX operators (%s): exports will be slower", error)
        yield
        return
    with _exporting:
        kept = staticmethod(lambda *args, **kwargs: _table(made, *args, **kwargs))
        ONNXRegistry.from_torchlib = kept  # type: ignore[method-assign]
        try:
            yield
        finally:
            ONNXRegistry.from_torchlib = made  # type: ignore[method-assign]


def _table(made: Any, *args: Any, **kwargs: Any) -> Any:
    """A copy of the table, because an export may add to it."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    table = copy(_tables(made.__get__(None, ONNXRegistry), args, tuple(kwargs.items())))
    table.functions = {operator: list(known) for operator, known in table.functions.items()}
    return table


@cache
def _tables(make: Callable[..., Any], args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Any:
    return make(*args, **dict(kwargs))
