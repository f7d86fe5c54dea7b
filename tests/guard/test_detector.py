"""The guard: few false alarms on any stream, and a prompt alarm when agreement falls."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.errors import AdaptError
from gati.guard.detector import Guard, growth_optimal_bet

AGREEMENT, R = 0.97, 10_000.0


def expected_delay(disagreement: float, alpha: float, audits_to_false_alarm: float) -> float:
    """Audits until the alarm when more losses than tolerated come: ln R / KL(q || alpha)."""
    q = disagreement
    divergence = q * math.log(q / alpha) + (1.0 - q) * math.log((1.0 - q) / (1.0 - alpha))
    return math.log(audits_to_false_alarm) / divergence


def audits_to_alarm(disagreement: float, most: int, seed: int, guard: Guard | None = None) -> int | None:
    guard = guard or Guard(AGREEMENT, R)
    for number, loss in enumerate(np.random.default_rng(seed).random(most) < disagreement, start=1):
        if guard.audit(agreed=not loss):
            return number
    return None


def test_clean_streams_raise_no_more_alarms_than_promised() -> None:
    """100 streams of 20,000 requests, of which one in twenty is audited: 1,000 audits each at R = 10,000."""
    audits = 1_000
    alarms = sum(audits_to_alarm(1.0 - AGREEMENT, audits, seed) is not None for seed in range(100))
    expected = 100 * audits / R
    assert alarms <= expected + 1.645 * math.sqrt(expected * (1.0 - audits / R))


def test_time_to_a_false_alarm_is_at_least_r_on_average() -> None:
    """On the worst stream allowed, with a small R, so that there are alarms to count."""
    most, small = 20_000, 50.0
    times = [audits_to_alarm(0.03, most, seed, Guard(0.97, small)) or most for seed in range(200)]
    mean, error = float(np.mean(times)), float(np.std(times)) / math.sqrt(len(times))
    assert mean + 1.645 * error >= small


def test_a_stream_that_knows_the_evidence_raises_no_more_false_alarms() -> None:
    """Losses that hang on all that went before, as on video, never likelier than tolerated given the past."""
    alarms, audits, often = 0, 100, 1_000.0
    for seed in range(200):
        guard, draws = Guard(0.8, often), np.random.default_rng(seed).random(audits)
        for draw in draws:
            likely = 0.2 if guard.evidence < often / 4 or guard.audits % 3 else 0.0
            guard.audit(agreed=not draw < likely)
        alarms += guard.alarmed
    expected = 200 * audits / often
    assert alarms <= expected + 1.645 * math.sqrt(expected)


@pytest.mark.parametrize("disagreement", [0.1, 0.2, 0.5])
def test_the_alarm_comes_within_twice_the_audits_that_theory_gives(disagreement: float) -> None:
    times = [audits_to_alarm(disagreement, 5_000, seed) for seed in range(100)]
    assert all(time is not None for time in times)
    assert np.mean([time for time in times if time is not None]) <= 2.0 * expected_delay(
        disagreement, 1.0 - AGREEMENT, R
    )


@given(st.floats(0.01, 0.5), st.integers(0, 3), st.lists(st.booleans(), max_size=40))
@settings(max_examples=60, deadline=None)
def test_evidence_is_that_of_the_recursion(alpha: float, which: int, losses: list[bool]) -> None:
    against = alpha + (0.95 - alpha) * (which + 1) / 5
    guard = Guard(1.0 - alpha, 50.0, [against])
    bet, evidence, highest = growth_optimal_bet(against, 1.0 - guard.agreement), 0.0, 0.0
    for loss in losses:
        evidence = (1.0 + evidence) * (1.0 + bet * (loss - guard.alpha))
        highest = max(highest, evidence)
        assert guard.audit(agreed=not loss) == (highest >= 50.0) or highest == pytest.approx(50.0)
        assert guard.evidence >= 0.0
    assert guard.evidence == pytest.approx(evidence)


def test_the_alarm_comes_when_the_mean_over_all_bets_is_large_enough_not_when_one_is() -> None:
    """The largest of several detectors alarms too early: it may be several times the mean."""
    against, losses = (0.2, 0.4, 0.8), (True, False, False, True, True, False, True)
    guard, alone = Guard(0.9, 1e9, against), [Guard(0.9, 1e9, [each]) for each in against]
    for loss in losses:
        for each in (guard, *alone):
            each.audit(agreed=not loss)
        assert guard.evidence == pytest.approx(np.mean([each.evidence for each in alone]))
    assert max(each.evidence for each in alone) > 1.2 * guard.evidence
    for often, alarmed in ((1.01 * guard.evidence, False), (0.99 * guard.evidence, True)):
        again = Guard(0.9, often, against)
        assert [again.audit(agreed=not loss) for loss in losses][-1] == alarmed


@given(st.floats(0.01, 0.4), st.floats(0.0, 1.0))
def test_no_bet_can_lose_more_than_there_is(alpha: float, disagreement: float) -> None:
    bet = growth_optimal_bet(min(disagreement, 0.999), alpha)
    assert 0.0 <= bet <= 1.0 / alpha
    if bet:
        assert 1.0 - bet * alpha >= 0.0


def test_an_alarm_stays_until_the_guard_is_reset() -> None:
    guard = Guard(0.9, 20.0)
    while not guard.audit(agreed=False):
        pass
    assert guard.audit(agreed=True)
    guard.reset()
    assert not guard.alarmed and guard.audits == 0 and not guard.audit(agreed=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"agreement": 1.0}, "agreement is 1.0, must lie strictly between 0 and 1"),
        ({"agreement": 0.9, "audits_to_false_alarm": 1.0}, "audits_to_false_alarm is 1.0, must be above 1"),
        ({"agreement": 0.9, "alternatives": [0.05]}, "alternatives must lie between 0.1 and 1"),
    ],
)
def test_what_promises_nothing_is_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(AdaptError, match=message):
        Guard(**arguments)  # type: ignore[arg-type]
