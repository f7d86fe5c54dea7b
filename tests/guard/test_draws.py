"""Requests are drawn before their answers are known, all with the same probability."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gati.errors import AdaptError
from gati.guard.draws import Draws


def test_the_share_of_losses_among_audits_is_that_among_requests() -> None:
    """Also where hits become more, and losses with them: 3.6 % a request once were 2.9 % an audit."""
    random = np.random.default_rng(3)
    draws = Draws(0.05, 0.1, seed=2)
    audits = audited_losses = losses = 0
    requests = 120_000
    for request in range(requests):
        hits, errs = (0.2, 0.01) if request < requests // 2 else (0.95, 0.06)
        drawn = draws.draw()
        lost = bool(random.random() < hits) and bool(random.random() < errs)
        losses += lost
        audits += drawn.audit
        audited_losses += drawn.audit and lost
    share = losses / requests
    assert abs(audited_losses / audits - share) <= 2.6 * math.sqrt(share * (1.0 - share) / audits)


@pytest.mark.parametrize("more", [0.0, 0.5, 1.0])
def test_the_rate_of_audits_stays_what_it_is(more: float) -> None:
    draws, rate = Draws(0.05, 0.1, 0.5, seed=0), 1.0 - 0.95 * 0.9
    drawn = [draws.draw(more) for _ in range(20_000)]
    for share, expected in (
        (np.mean([each.audit for each in drawn]), rate),
        (np.mean([each.sample for each in drawn]), max(0.1, more)),
        (np.mean([each.trial for each in drawn]), 1.0 - (1.0 - rate) * 0.5),
    ):
        assert abs(share - expected) <= 3.0 * math.sqrt(0.25 / 20_000)
    assert all(each.trial for each in drawn if each.audit)


def test_audits_and_samples_do_not_come_from_the_same_numbers() -> None:
    """One seed for both drew audits from among the samples."""
    draws = Draws(0.1, 0.0, 0.1, seed=0)
    drawn = [draws.draw() for _ in range(20_000)]
    assert np.mean([each.audit for each in drawn]) == pytest.approx(0.1, abs=0.01)
    assert np.mean([each.trial and not each.audit for each in drawn]) == pytest.approx(0.09, abs=0.01)


def test_live_nobody_can_know_what_will_be_drawn() -> None:
    one, other = ([draws.draw().audit for _ in range(400)] for draws in (Draws(0.5), Draws(0.5)))
    assert one != other
    seeded = ([draws.draw().audit for _ in range(400)] for draws in (Draws(0.5, seed=1), Draws(0.5, seed=1)))
    assert next(seeded) == next(seeded)


@pytest.mark.parametrize("wrong", [(-0.1, 0.0), (0.1, 1.5)])
def test_shares_that_are_none_are_refused(wrong: tuple[float, float]) -> None:
    with pytest.raises(AdaptError, match="must be from 0 to 1"):
        Draws(*wrong)
