"""Whole commands on a population with known truth: what they certify is false no more often than delta."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from benchmarks.promise_offline import (
    SCENARIOS,
    Judge,
    World,
    allowed,
    check_against_whole_command,
    false_share,
    make_world,
)

pytestmark = pytest.mark.slow
DRAWS = 300
FEWER = {"certify": 200}  # each draw writes a ledger twelve times


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        # most of a draw's time, to say how far from the best a choice may be; nothing is decided by it
        patch.setattr("gati.composition.exact.priced_bound_ms", lambda *_: 0.0)
        yield make_world(tmp_path_factory.mktemp("promise") / "library")


@pytest.fixture(scope="module")
def judge_of(world: World) -> Callable[[str], Judge]:
    """What is proposed on the select split takes longer than the draws, and is the same for both tests."""
    return cache(lambda command: SCENARIOS[command](world))


@pytest.mark.parametrize("command", SCENARIOS)
def test_what_is_certified_is_false_no_more_often_than_delta(
    judge_of: Callable[[str], Judge], command: str
) -> None:
    draws = FEWER.get(command, DRAWS)
    assert false_share(judge_of(command), draws, shared=True) <= allowed(draws)


@pytest.mark.parametrize("command", ["auto", "pareto", "certify"])
def test_the_same_simulation_catches_every_test_at_the_full_delta(
    judge_of: Callable[[str], Judge], command: str
) -> None:
    assert false_share(judge_of(command), DRAWS, shared=False) > allowed(DRAWS)


def test_four_engines_take_part_and_the_whole_command_deploys_the_same(world: World) -> None:
    assert len(world.entrants) == 4
    check_against_whole_command(world, 1)
