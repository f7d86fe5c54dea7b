"""A confidence sequence covers at all times simultaneously; a fixed-time interval does not."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest

from gati.evaluation.by_class import exact_interval
from gati.guard.confidence import _BETS, watched_agreement

STREAMS = 100
CHECKED = np.unique(np.geomspace(20, 2_000, 40).astype(int)).tolist()
watched = cache(watched_agreement)  # most streams have the same few numbers of losses


def missed(kind: str) -> float:
    """Share of streams of 2,000 audits in which an interval ever lies beside the truth."""
    count = 0
    for seed in range(STREAMS):
        losses = np.cumsum(np.random.default_rng(seed).random(2_000) < 0.03)
        for audits in CHECKED:
            lost = int(losses[audits - 1])
            if kind == "watched":
                low, high = watched(lost, audits)
            else:
                low, high = exact_interval(audits - lost, audits)
            if not low <= 0.97 <= high:
                count += 1
                break
    return count / STREAMS


@pytest.mark.slow
def test_it_may_be_watched_all_the_time() -> None:
    assert missed("watched") <= 0.05 + 2.0 * math.sqrt(0.05 * 0.95 / STREAMS)
    assert missed("fixed") > 0.1  # what pages showed before


@pytest.mark.slow
def test_it_is_for_the_mean_of_what_was_where_chances_change() -> None:
    count = 0
    for seed in range(STREAMS):
        random = np.random.default_rng(seed)
        chances = np.where(np.arange(2_000) // 300 % 2 == 0, 0.005, 0.06)
        losses, means = np.cumsum(random.random(2_000) < chances), np.cumsum(chances)
        for audits in CHECKED:
            low, high = watched(int(losses[audits - 1]), audits)
            if not low <= 1.0 - means[audits - 1] / audits <= high:
                count += 1
                break
    assert count / STREAMS <= 0.05 + 2.0 * math.sqrt(0.05 * 0.95 / STREAMS)


@pytest.mark.parametrize(("losses", "audits"), [(0, 1), (0, 300), (3, 300), (300, 300), (1, 10_000)])
def test_limits_are_around_what_was_counted_and_close_in(losses: int, audits: int) -> None:
    low, high = watched_agreement(losses, audits)
    assert 0.0 <= low <= 1.0 - losses / audits <= high <= 1.0
    wider = watched_agreement(losses, audits, 0.999)
    assert wider[0] <= low and high <= wider[1]
    assert watched_agreement(0, 0) == (0.0, 1.0)
    assert watched_agreement(0, 500)[0] > watched_agreement(0, 200)[0] > 0.96


@pytest.mark.parametrize(("losses", "audits"), [(3, 300), (60, 100), (297, 300)])
def test_each_limit_errs_with_half_of_what_the_interval_may(losses: int, audits: int) -> None:
    for limit, above in zip(watched_agreement(losses, audits), (False, True), strict=True):
        share = 1.0 - limit
        bets = _BETS[share < _BETS] if above else _BETS[share > _BETS]
        ratios = (bets / share) ** losses * ((1.0 - bets) / (1.0 - share)) ** (audits - losses)
        assert ratios.mean() == pytest.approx(2.0 / 0.05, rel=1e-3)
