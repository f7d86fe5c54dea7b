"""Lookups pause if they do not pay, by the composition's measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gati.adaptation.rest import Rest
from gati.composition.composition import Composition, Exit, Expected
from gati.engine.exits import BASE
from gati.types import TrialId

EXIT = Exit(TrialId("t"), "early", 0, "grid(8)", "entropy", 0.5, "inline", 0.5, 0.99, 0.2, 10, 0.4)
COMPOSITION = Composition(
    name="default", objective="exact", solver="highs", gap=0.0, alpha=None, accuracy_target=0.95,
    confidence=0.95, memory_limit_bytes=None, backend="torch", placement="inline", exits=(EXIT,),
    expected=Expected(1.0, 2.0, 2.0, 0.8, 0.99, 10), certificate=None, checkpoint_sha256="0" * 64,
    created="2026-01-01T00:00:00Z",
)  # fmt: skip


def feed(rest: Rest, hit_rate: float, requests: int) -> int | None:
    """Answer requests of which that share leaves early; after how many a rest begins."""
    for number in range(requests):
        hit = int((number + 1) * hit_rate) > int(number * hit_rate)
        if rest.answered("early" if hit and rest.lookups_pay else BASE):
            return number + 1
    return None


# A hit saves 1.6 of 2 ms, a miss costs 0.2: it pays from 11 % on.
@pytest.mark.parametrize(("hit_rate", "rests"), [(0.0, True), (0.08, True), (0.2, False), (0.9, False)])
def test_below_the_break_even_hit_rate_lookups_rest(hit_rate: float, rests: bool) -> None:
    rest = Rest()
    rest.replaced(COMPOSITION)
    assert (feed(rest, hit_rate, 900) is not None) == rests
    assert rest.lookups_pay != rests


def test_they_are_tried_again_and_the_rests_grow_longer() -> None:
    rest = Rest()
    rest.replaced(COMPOSITION)
    lengths = []
    for _ in range(3):
        assert feed(rest, 0.0, 1000) == 60
        begun = 0
        while not rest.lookups_pay:
            rest.answered(BASE)
            begun += 1
        lengths.append(begun)
    assert lengths == [1000, 2000, 4000]


def test_new_caches_are_tried_at_once() -> None:
    rest = Rest()
    rest.replaced(COMPOSITION)
    feed(rest, 0.0, 100)
    rest.replaced(replace(COMPOSITION, name="next"))
    assert rest.lookups_pay and feed(rest, 0.5, 500) is None


def test_they_rest_while_memory_answers_more_without_them() -> None:
    """Half of the requests hit, which saves a third; memory would answer three quarters, or none."""
    rest = Rest()
    rest.replaced(COMPOSITION)
    assert feed(rest, 0.5, 500) is None
    begun = [rest.answered(exit, 0.75) for exit in ("early", BASE) * 100]
    assert sum(begun) == 1 and not rest.lookups_pay
    rest.answered(BASE, 0.2)
    assert rest.lookups_pay, "memory answers less now"


def rest_lengths(rest: Rest, count: int) -> list[int]:
    """How many requests each of the next rests takes, of caches that never hit."""
    lengths = []
    for _ in range(count):
        assert feed(rest, 0.0, 500) is not None
        lengths.append(1)
        while not rest.answered(BASE) and not rest.lookups_pay and lengths[-1] < 20_000:
            lengths[-1] += 1
    return lengths


def test_a_rest_is_never_longer_than_16000_requests() -> None:
    rest = Rest()
    rest.replaced(COMPOSITION)
    assert rest_lengths(rest, 7) == [1000, 2000, 4000, 8000, 16_000, 16_000, 16_000]


@pytest.mark.parametrize("why", ["they have paid", "they are other caches"])
def test_rests_begin_short_again(why: str) -> None:
    rest = Rest()
    rest.replaced(COMPOSITION)
    assert rest_lengths(rest, 3) == [1000, 2000, 4000]
    if why == "they have paid":
        assert feed(rest, 0.9, 200) is None
    else:
        rest.replaced(replace(COMPOSITION, name="next"))
    assert rest_lengths(rest, 2) == [1000, 2000]


def test_an_early_answer_that_takes_longer_than_the_network_does_not_pay() -> None:
    """What counts is the time of each exit, not how many leave early."""
    late = replace(EXIT, lookup_ms=1.8, exit_ms=2.2)
    rest = Rest()
    rest.replaced(replace(COMPOSITION, exits=(late,)))
    assert feed(rest, 0.99, 200) == 60
