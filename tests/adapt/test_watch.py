"""Auditing within a budget, stopping at once, and coming back only when agreement is proven."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gati.adapt.proof import Recertification
from gati.adapt.watch import AuditSampler, Event, Watch
from gati.errors import AdaptError


@pytest.mark.parametrize("hit_rate", [0.02, 0.5, 0.95])
def test_audits_of_hits_keep_to_the_budget(hit_rate: float) -> None:
    random = np.random.default_rng(0)
    sampler = AuditSampler(0.05, seed=1)
    audited = 0
    for _ in range(30_000):
        drawn = sampler.draw()
        hit = bool(random.random() < hit_rate)
        sampler.answered(hit=hit, audited=drawn)
        audited += hit and drawn
        assert sampler.paid <= 0.05 * sampler.requests
    assert audited == sampler.paid
    assert audited >= 0.6 * 30_000 * min(0.05, hit_rate), "most of the budget is used"


def test_a_sudden_rise_of_the_hit_rate_does_not_break_the_budget() -> None:
    sampler = AuditSampler(0.05, seed=1)
    for request in range(20_000):
        drawn = sampler.draw()
        sampler.answered(hit=request >= 10_000, audited=drawn)
        assert sampler.paid <= 0.05 * sampler.requests


def test_requests_are_drawn_before_their_answers_are_known_and_all_alike() -> None:
    """The share of losses among audits is that among requests."""
    random = np.random.default_rng(3)
    sampler = AuditSampler(0.05, seed=2)
    audits = losses = 0
    for _ in range(60_000):
        drawn, hit = sampler.draw(), bool(random.random() < 0.6)
        lost = hit and bool(random.random() < 0.1)
        sampler.answered(hit=hit, audited=drawn)
        audits += drawn
        losses += drawn and lost
    error = math.sqrt(0.06 * 0.94 / audits)
    assert abs(losses / audits - 0.06) <= 2.6 * error


def stream(watch: Watch, random: np.random.Generator, requests: int, disagreement: float) -> int:
    """Send requests that would all hit; return how many early answers differed from the base model's."""
    wrong = 0
    for _ in range(requests):
        drawn, answers_early = watch.draw(), watch.may_hit
        lost = bool(random.random() < disagreement)
        wrong += lost and answers_early
        watch.answered(hit=True, audited=drawn)
        if drawn:
            watch.audited(agreed=not lost)
    return wrong


def test_a_replaced_base_model_is_noticed_and_nothing_leaves_early_from_then_on() -> None:
    events: list[Event] = []
    watch = Watch(0.97, seed=0, on_event=events.append)
    random = np.random.default_rng(0)
    stream(watch, random, 20_000, 0.01)
    assert watch.may_hit and not events
    stream(watch, random, 4_000, 0.2)
    assert not watch.may_hit
    assert [event.state for event in events] == ["stopped"]
    assert stream(watch, random, 2_000, 0.2) == 0


def test_caches_return_only_after_they_were_replaced_and_proven() -> None:
    watch = Watch(0.97, seed=0)
    random = np.random.default_rng(1)
    stream(watch, random, 5_000, 0.5)
    stream(watch, random, 5_000, 0.0)
    assert not watch.may_hit, "the same caches do not come back, however well they do"
    watch.replaced()
    stream(watch, random, 20_000, 0.5)
    assert not watch.may_hit
    watch.replaced()
    stream(watch, random, 20_000, 0.005)
    assert watch.may_hit


def test_bad_caches_pass_no_more_often_than_the_confidence_allows() -> None:
    """Looked at after every audit, at the worst disagreement that must not pass."""
    passed = 0
    for seed in range(400):
        proof = Recertification(0.9, confidence=0.9)
        for loss in np.random.default_rng(seed).random(1_000) < 0.1:
            if proof.audit(agreed=not loss):
                passed += 1
                break
    assert passed <= 400 * 0.1 + 1.645 * math.sqrt(400 * 0.1 * 0.9)


def test_good_caches_pass_after_few_audits() -> None:
    proof = Recertification(0.97)
    while not proof.audit(agreed=True):
        assert proof.audits < 300
    assert proof.losses == 0


def test_caches_on_probation_serve_once_they_are_proven_and_without_an_alarm() -> None:
    events: list[Event] = []
    watch = Watch(0.97, on_event=events.append)
    watch.replaced(on_probation=True)
    assert not watch.may_hit and not events
    while not watch.may_hit:
        watch.audited(agreed=True)
        assert not events or events[0].audits < 300
    assert [event.state for event in events] == ["serving"]


@pytest.mark.parametrize("budget", [0.0, 1.5])
def test_a_budget_that_is_none_is_refused(budget: float) -> None:
    with pytest.raises(AdaptError, match="the audit budget is"):
        AuditSampler(budget)
    with pytest.raises(AdaptError, match="confidence is 1.0"):
        Recertification(0.9, 1.0)
