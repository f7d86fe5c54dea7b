"""Hiding what converters tell their developers, for several threads at once."""

from __future__ import annotations

import logging
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

from gati.engine.graph.silence import silenced
from tests.waiting import LONG_S


def test_what_threads_hide_at_the_same_time_is_shown_again() -> None:
    entered, leave = threading.Event(), threading.Event()
    before, level = list(warnings.filters), logging.getLogger("gati.loud").level

    def first() -> None:
        with silenced("gati.loud"):
            entered.set()
            leave.wait(0.1)  # the second would enter meanwhile

    def second() -> None:
        assert entered.wait(LONG_S)
        with silenced("gati.loud"), silenced("gati.loud"):
            leave.set()
            threading.Event().wait(0.1)  # the first would leave meanwhile

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(first), threads.submit(second)]:
            done.result(LONG_S)
    assert warnings.filters == before
    assert logging.getLogger("gati.loud").level == level
