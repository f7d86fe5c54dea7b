"""The guard of large caches: a sample stands for all keys, and a test for the bound."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gati.evict.policy import registry, sampled
from gati.evict.policy.guard import EXCESS_SHARE, Gati
from gati.evict.policy.sampled import WHOLE_SHADOW, SampledGati, SampledLru, loss_detector
from gati.evict.predict.oracle import Noisy, Oracle
from gati.evict.trace.records import Trace, make_trace
from tests.evict.naive import build, flat_trace


def skewed(requests: int, seed: int) -> Trace:
    """Half of the items are seen once."""
    chance = random.Random(seed)
    popular = [int(4_000 * chance.random() ** 3) for _ in range(requests)]
    return flat_trace(
        [item if chance.random() < 0.5 else 4_000 + number for number, item in enumerate(popular)]
    )


def talks(requests: int, seed: int) -> Trace:
    """Conversations that go on at random, all with the same first block."""
    chance = random.Random(seed)
    rows: list[list[str]] = []
    for number in range(requests):
        before = rows[-chance.randint(1, min(60, len(rows)))] if rows and chance.random() < 0.6 else ["0"]
        rows.append([*before[:12], *(f"{number}.{block}" for block in range(chance.randint(1, 4)))])
    return make_trace([["/".join(row[: end + 1]) for end in range(len(row))] for row in rows])


@pytest.mark.parametrize("trace", [skewed(20_000, 0), talks(4_000, 0)], ids=["flat", "tree"])
@pytest.mark.parametrize("every", [1, 4])
def test_a_sample_hits_about_as_often_as_lru_does(trace: Trace, every: int) -> None:
    capacity = 400
    lru = build("lru", capacity, None, flat=trace.kind == "flat")
    shadow = SampledLru(capacity, every)
    hits = held = asked = 0
    known: set[int] = set()
    for number, ids in enumerate(trace.requests):
        hits += lru.access(ids, float(number)).hits
        blocks = [ids[place] for place in shadow.sampled(ids)]
        held += sum(shadow.access(blocks))
        asked += len(blocks)
        known.update(blocks)
    assert len(known) == pytest.approx(trace.distinct / every, rel=0.1)
    assert len(shadow) == capacity // every
    if every == 1:
        assert held == hits
    total = len(trace.blocks)
    if trace.kind != "flat":  # the block of all requests is always a hit, whether it is in the sample or not
        rest = len(trace) if trace.requests[0][0] in known else 0
        hits, total, held, asked = hits - len(trace), total - len(trace), held - rest, asked - rest
    assert held / asked == pytest.approx(hits / total, abs=0.05)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of more than 100 blocks count as large."""
    monkeypatch.setattr(sampled, "WHOLE_SHADOW", 100)
    monkeypatch.setattr(registry, "WHOLE_SHADOW", 100)


def test_large_caches_have_a_sampled_shadow(few: None) -> None:
    trace = skewed(10, 0)
    kinds = [
        type(build("gati", size, lambda capacity, seed: Oracle(trace), flat=True).policy)
        for size in (100, 101)
    ]
    assert kinds == [Gati, SampledGati]
    assert WHOLE_SHADOW == 1_000_000


@pytest.mark.slow
def test_right_predictions_are_followed_and_wrong_ones_stopped(few: None) -> None:
    trace = skewed(12_000, 1)
    rates, guards = {}, {}
    for name, share in (("lru", 0.0), ("laru", 0.0), ("gati", 0.0), ("laru", 1.0), ("gati", 1.0)):
        maker = None if name == "lru" else lambda capacity, seed, share=share: Noisy(trace, share)
        cache = build(name, 400, maker, flat=True)
        hits = sum(cache.access(ids, float(at)).hits for at, ids in enumerate(trace.requests))
        rates[name, share] = hits / len(trace)
        guards[name, share] = cache.policy.figures().get("guard")
    assert rates["gati", 0.0] == rates["laru", 0.0] > rates["lru", 0.0] + 0.02
    assert guards["gati", 0.0]["alarms"] == 0 and guards["gati", 0.0]["one_in"] == 4
    assert rates["laru", 1.0] < rates["lru", 0.0] - 0.01
    assert guards["gati", 1.0]["alarms"] >= 1
    assert rates["gati", 1.0] > rates["laru", 1.0]


@pytest.mark.slow
def test_an_alarm_within_t_requests_has_a_chance_of_t_in_r() -> None:
    """Losses whose mean is exactly what is promised: 400 streams of 1,000 with R = 10,000."""
    chance = np.random.default_rng(0)
    alarms = 0
    for _ in range(400):
        detector = loss_detector()
        losses = 0.5 * (1.0 + chance.choice((-1.0, 0.0, 1.0), 1_000, p=(0.25, 0.5, 0.25))) + EXCESS_SHARE / 2
        for loss in losses:
            if detector.observe(float(loss)):
                alarms += 1
                break
    assert alarms <= 400 * 0.1 + 3.0 * (400 * 0.1 * 0.9) ** 0.5
