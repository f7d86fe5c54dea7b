"""Cores that overlapped lookups reserve: for one engine at a time, and no longer than it serves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gati.adaptation.answering import AnsweringEngines
from gati.adaptation.deployments import Deployed
from gati.cores import usable_cores
from gati.engine.engine import Engine
from gati.errors import DataError
from tests.engine.networks import inputs, selective_exits, traced_network

X = inputs(1)


@pytest.fixture(autouse=True)
def nothing_stays_reserved() -> Iterator[None]:
    before = reserved()
    yield
    assert reserved() == before


def reserved() -> tuple[int, set[int], int]:
    """Threads for lookups, and the cores and torch threads that are left to this one."""
    workers = sum(thread.name == "gati-lookup" for thread in threading.enumerate())
    return workers, usable_cores(), torch.get_num_threads()


def overlapped() -> Engine:
    return Engine(traced_network(), selective_exits(traced_network(), "overlapped"))


def by(engine: Engine, *, lookups: bool = True, may_hit: bool = True) -> Any:
    """A decision that `engine` answers the next request."""
    served: Any = SimpleNamespace(engine=engine)
    return SimpleNamespace(deployed=Deployed(0, served), lookups=lookups, may_hit=may_hit)


def test_the_engine_that_served_before_gives_its_core_back() -> None:
    first, second, inline = overlapped(), overlapped(), Engine(traced_network())
    answer = AnsweringEngines(inline, inline)
    free = reserved()
    answer(X, by(first))
    taken = reserved()
    assert taken[0] == free[0] + 1
    answer(X, by(second))
    assert reserved() == taken
    answer(X, by(inline))
    assert reserved() == free
    answer(X, by(second))
    assert reserved() == taken
    answer.close()


@pytest.mark.parametrize("may_hit", [True, False])
def test_the_core_is_given_back_where_lookups_pause_or_end(may_hit: bool) -> None:
    engine, base = overlapped(), Engine(traced_network())
    answer = AnsweringEngines(base, base)
    free = reserved()
    answer(X, by(engine))
    taken = reserved()
    answer(X, by(engine, lookups=False, may_hit=may_hit))
    assert reserved() == free
    answer(X, by(engine))
    assert reserved() == taken
    answer.close()


def test_the_core_is_free_while_the_base_model_is_timed() -> None:
    engine, base = overlapped(), Engine(traced_network())
    answer = AnsweringEngines(base, base)
    free = reserved()
    with answer.released():  # nothing to release yet
        assert reserved() == free
    assert reserved() == free
    answer(X, by(engine))
    taken = reserved()
    with answer.released():
        assert reserved() == free
    assert reserved() == taken
    answer.close()


@pytest.mark.parametrize("shape", [(2, 1, 6, 6), (1, 1, 6, 5), (1, 6, 6), (0, 1, 6, 6)])
def test_what_is_not_one_input_of_the_network_is_refused(shape: tuple[int, ...]) -> None:
    """Of two inputs, the second one had no answer, and memory failed to compare others with what it knows."""
    base = Engine(traced_network())
    answer = AnsweringEngines(base, base)
    answer.check(X)
    with pytest.raises(DataError, match=r"\[1, \.\.\.\]|takes a tensor of shape"):
        answer.check(torch.zeros(shape))
