"""Proofs that may be checked after every audit, and the delta that they share."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.errors import AdaptError
from gati.guard.proof import Proof, Spending


@pytest.mark.slow
def test_bad_caches_pass_no_more_often_than_delta() -> None:
    """Looked at after every audit, at the smallest disagreement that must not pass."""
    passed = 0
    for seed in range(400):
        proof = Proof(0.9, 0.1)
        for loss in np.random.default_rng(seed).random(1_000) < 0.1:
            if proof.audit(agreed=not loss):
                passed += 1
                break
    assert passed <= 400 * 0.1 + 1.645 * math.sqrt(400 * 0.1 * 0.9)


@pytest.mark.parametrize("attempts", [1, 100])
def test_bad_caches_pass_no_oftener_in_many_attempts(attempts: int) -> None:
    """With a fresh delta for each attempt they passed in 95 % of streams of 100."""
    streams, audits, passed = 100, 250, 0
    for seed in range(streams):
        spending, random = Spending(0.05), np.random.default_rng(seed)
        for _ in range(attempts):
            proof = Proof(0.97, spending.next())
            if proof.required > audits:  # nor can a later one pass, as the shares shrink
                break
            if any(proof.audit(agreed=not loss) for loss in random.random(audits) < 0.03):
                passed += 1
                break
    assert passed <= streams * 0.05 + 2.0 * math.sqrt(streams * 0.05 * 0.95)


@pytest.mark.parametrize("agreement", [0.9, 0.97, 0.99, 0.995])
@pytest.mark.parametrize("delta", [0.05, 0.001])
def test_good_caches_pass_after_as_many_audits_as_it_says(agreement: float, delta: float) -> None:
    proof = Proof(agreement, delta)
    for _ in range(proof.required - 1):
        assert not proof.audit(agreed=True)
    assert proof.audit(agreed=True) and not proof.hopeless


def test_a_proof_of_bad_caches_comes_to_nothing_and_is_told() -> None:
    proof, random = Proof(0.97, 0.05), np.random.default_rng(0)
    while not proof.hopeless:
        assert not proof.audit(agreed=bool(random.random() > 0.1)) and proof.audits < 1_000


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), max_size=200), st.lists(st.booleans(), max_size=50))
def test_it_goes_on_where_it_was_written_down(before: list[bool], after: list[bool]) -> None:
    one = Proof(0.9, 0.01)
    for agreed in before:
        one.audit(agreed=agreed)
    other = Proof.from_json(json.loads(json.dumps(one.to_json())))
    for agreed in after:
        assert one.audit(agreed=agreed) == other.audit(agreed=agreed)
    assert one.to_json() == other.to_json()


def test_shares_of_delta_never_add_up_to_more() -> None:
    spending = Spending(0.05)
    shares = [spending.next() for _ in range(10_000)]
    assert sum(shares) < 0.05 and shares == sorted(shares, reverse=True) and spending.used == 10_000
    assert Spending(0.05, used=9).next() == shares[9]
    later = Spending(0.05, used=2)
    for number in (9, 4):  # the second is known already
        later.begin_after(number)
    assert later.since == 9 and later.next() == shares[9]


def test_values_that_promise_nothing_are_refused() -> None:
    with pytest.raises(AdaptError, match="agreement is 1.0"):
        Proof(1.0, 0.05)
    with pytest.raises(AdaptError, match="delta is 0.0"):
        Proof(0.9, 0.0)
    with pytest.raises(AdaptError, match="delta is 1.5"):
        Spending(1.5)


@pytest.mark.parametrize("damage", [{"log_capital": [0.0]}, {"log_capital": [math.nan] * 5}, {"delta": 0}])
def test_what_is_no_proof_is_refused(damage: dict[str, object]) -> None:
    with pytest.raises((ValueError, AdaptError)):
        Proof.from_json({**Proof(0.9).to_json(), **damage})
