"""Whole commands on a population with known truth: what they certify is false no more often than delta."""

from __future__ import annotations

import pytest

from benchmarks.promise_offline import (
    SCENARIOS,
    World,
    allowed,
    check_against_whole_command,
    entrants_of,
    false_share,
    make_world,
)

pytestmark = pytest.mark.slow
DRAWS = 300


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("promise") / "library")


@pytest.mark.parametrize("command", SCENARIOS)
def test_what_is_certified_is_false_no_more_often_than_delta(world: World, command: str) -> None:
    assert false_share(SCENARIOS[command](world), DRAWS, shared=True) <= allowed(DRAWS)


@pytest.mark.parametrize("command", ["auto", "pareto", "certify"])
def test_the_same_simulation_catches_every_test_at_the_full_delta(world: World, command: str) -> None:
    assert false_share(SCENARIOS[command](world), DRAWS, shared=False) > allowed(DRAWS)


def test_four_engines_take_part_and_the_whole_command_deploys_the_same(world: World) -> None:
    assert len(entrants_of(world)) == 4
    check_against_whole_command(world, 3)
