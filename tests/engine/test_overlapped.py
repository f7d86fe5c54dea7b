"""Lookups in parallel with the network: whenever they end, every request gets its own answer."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from gati.engine.engine import Engine
from gati.engine.exits import EngineExit, Lookup
from gati.engine.paths.overlapped import OverlappedPath
from gati.engine.placement import Answer, ParallelLookups
from gati.model.segments import TracedModel, trace
from tests.engine.networks import CLASSES, Cache, ready, selective_exits, traced_network
from tests.engine.networks import inputs as pictures
from tests.waiting import LONG_S


class AtTheLastMoment(ParallelLookups):
    """Makes each lookup when its answer is waited for."""

    def __init__(self) -> None:
        self._submitted: tuple[Lookup, Tensor] | None = None

    def submit(self, lookup: Lookup, hidden: Tensor) -> None:
        assert self._submitted is None, "the answer to the one before is still to come"
        self._submitted = lookup, hidden

    def finished(self) -> bool:
        return False

    def answer(self) -> Answer:
        assert self._submitted is not None
        (lookup, hidden), self._submitted = self._submitted, None
        probabilities, score = lookup(hidden)
        return Answer(probabilities, score.item())

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass


def late(traced: TracedModel, exits: list[EngineExit]) -> tuple[Engine, OverlappedPath]:
    """An engine whose lookups all end at the last moment."""
    engine = Engine(traced, exits)
    path = engine._path
    assert isinstance(path, OverlappedPath)
    path._lookups = AtTheLastMoment()
    return engine, path


class Changing(nn.Module):
    """The hidden output of its block is changed in place afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.relu, self.head = nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.relu(self.block(x)))
        return result


class FlatCache(Cache):
    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(hidden[:, :, None, None])


def test_a_late_lookup_reads_what_its_block_passed_on_though_it_was_changed_since() -> None:
    torch.manual_seed(0)
    traced = trace(ready(Changing()), torch.randn(2, 4), ["block"])
    engine, _ = late(traced, [EngineExit("block", ready(FlatCache()), 0.6, "overlapped")])
    rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(1)).split(1)
    answers = [engine(row)[0] for row in rows]
    assert {answer.exit for answer in answers} == {"block", "base"}
    for answer, row in zip(answers, rows, strict=True):
        (inline,) = engine.inline(row)
        assert answer.exit == inline.exit and torch.equal(answer.probabilities, inline.probabilities)


def test_a_late_score_that_equals_its_threshold_is_a_hit() -> None:
    torch.manual_seed(0)
    traced, cache, x = (
        trace(ready(Changing()), torch.randn(2, 4), ["block"]),
        ready(FlatCache()),
        torch.ones(1, 4),
    )
    with torch.inference_mode():
        probabilities, score = cache(traced.cut(["block"])[0].run(x)[0])
    engine, _ = late(traced, [EngineExit("block", cache, float(score), "overlapped")])
    for (answer,) in (engine(x), engine.inline(x)):
        assert answer.exit == "block" and torch.equal(answer.probabilities, probabilities[0])


def test_after_a_network_that_failed_the_next_request_gets_its_own_lookup() -> None:
    traced = traced_network()
    engine, path = late(traced, selective_exits(traced, "overlapped"))
    whole = list(path._steps)

    def fails(*carried: Tensor) -> Tensor:
        raise RuntimeError("out of memory")

    path._steps = [whole[0], whole[1]._replace(run=fails), *whole[2:]]
    with pytest.raises(RuntimeError, match="out of memory"):
        engine(pictures(1))
    path._steps = whole
    for row in pictures(20).split(1):
        assert engine(row)[0].exit == engine.inline(row)[0].exit


def test_a_request_next_to_another_one_makes_its_lookups_itself() -> None:
    """There is one place for parallel lookups, and a request must not take the answer of another."""
    begun, may_end = threading.Event(), threading.Event()

    class Waits(Cache):
        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
            if float(hidden.abs().sum()) > 1e6:
                begun.set()
                assert may_end.wait(LONG_S)
            return super().forward(hidden)

    traced = traced_network()
    with Engine(traced, [EngineExit("blocks.0", ready(Waits()), 0.5, "overlapped")]) as engine:
        slow, others = 1e6 * pictures(1), pictures(20).split(1)
        expected = [engine.inline(row)[0] for row in others]
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(engine, slow)
            assert begun.wait(LONG_S)
            found = [engine(row)[0] for row in others]
            may_end.set()
            (last,) = answer.result(LONG_S)
        assert [each.exit for each in found] == [each.exit for each in expected]
        assert last.exit == engine.inline(slow)[0].exit
