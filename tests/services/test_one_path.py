"""A stream and a served model reach the same decisions from the same requests, audit by audit."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.promise_streams import AGREEMENT, RIGHT, TRUE, WRONG
from tests.adaptation.test_follow import Requests
from tests.services.test_line import HIT, MISS, House, settle

ANSWERS = {"agrees": (RIGHT, HIT, 0), "disagrees": (WRONG, HIT, 1), "misses": (TRUE, MISS, 0)}


async def served(kinds: list[str]) -> list[object]:
    house = House()
    house.base.at_once = True
    version = house.version("a", agreement=AGREEMENT)
    stands: list[object] = []
    for kind in kinds:
        _, exit, class_index = ANSWERS[kind] if version.may_hit else ANSWERS["misses"]
        await house.answer(version, exit, class_index)
        await settle()
        assert version.watch is not None
        stands.append((version.may_hit, version.watch.audits, version.watch.losses, version.watch.epoch))
    return stands


def streamed(kinds: list[str]) -> list[object]:
    requests = Requests()
    stands: list[object] = []
    for kind in kinds:
        requests(ANSWERS[kind][0])
        requests.settle()
        watch = requests.succession.serving.watch
        stands.append((watch.may_hit, watch.audits, watch.losses, watch.epoch))
    return stands


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(sorted(ANSWERS)), max_size=40))
def test_every_audit_counts_alike(kinds: list[str]) -> None:
    assert asyncio.run(served(kinds)) == streamed(kinds)


@pytest.mark.parametrize("kinds", [["disagrees"] * 30, ["misses", "agrees", "disagrees"] * 20])
def test_an_alarm_comes_with_the_same_audit(kinds: list[str]) -> None:
    found = asyncio.run(served(kinds))
    assert found == streamed(kinds) and any(not stands[0] for stands in found)  # type: ignore[index]
