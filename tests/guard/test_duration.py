"""A proof takes some time, because what follows within moments is alike."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gati.guard.auditor import Auditor, Decided, Given, Probed
from gati.guard.draws import Draws
from gati.guard.posts import Post
from gati.guard.proof import Duration, Proof, Spending
from gati.guard.watch import Watch
from tests.guard.named import TRUE

AGREEMENT, DELTA, RATE_HZ, LEAST_S = 0.97, 0.05, 80.0, 10.0


class Clock:
    """Stream time, in seconds."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def passed_after(losses: list[bool], least_s: float) -> float | None:
    """The time at which a proof of audits at `RATE_HZ` passes; None if it never does."""
    clock = Clock()
    proof = Proof(AGREEMENT, DELTA, Duration(least_s, clock))
    for at, loss in enumerate(losses):
        clock.now_s = at / RATE_HZ
        if proof.audit(agreed=not loss):
            return clock.now_s
    return None


def test_a_perfect_proof_takes_that_long_and_no_longer() -> None:
    assert passed_after([False] * 2000, 0.0) == pytest.approx(
        (Proof(AGREEMENT, DELTA).required - 1) / RATE_HZ
    )
    assert passed_after([False] * 2000, LEAST_S) == pytest.approx(LEAST_S, abs=1.0 / RATE_HZ)


def test_losses_after_early_evidence_count() -> None:
    """What would have been enough after two seconds is forgotten if the version is wrong afterwards."""
    losses = [False] * 200 + [True] * 20 + [False] * 600
    assert passed_after(losses, 0.0) is not None
    assert passed_after(losses, LEAST_S) is None


def test_no_proof_fails_before_that_time() -> None:
    clock = Clock()
    proof = Proof(AGREEMENT, DELTA, Duration(LEAST_S, clock))
    for at in range(100 * proof.required):
        clock.now_s = at * (LEAST_S / 2) / (100 * proof.required)
        proof.audit(agreed=at % 10 > 0)
    assert not proof.hopeless
    assert proof.how_far.endswith("in at least 10 s")
    clock.now_s = LEAST_S
    proof.audit(agreed=False)
    assert proof.hopeless
    assert not proof.how_far.endswith("in at least 10 s")


def test_the_time_begins_with_the_first_audit_and_anew_after_a_restart_or_if_the_clock_is_set_back() -> None:
    clock = Clock()
    clock.now_s = 1e6
    lasts = Duration(LEAST_S, clock)
    watch = Watch(AGREEMENT, spend=Spending(DELTA).next, proven=False, lasts=lasts)
    clock.now_s += 100.0  # without audits
    for _ in range(400):
        watch.audited(agreed=True)
    assert not watch.may_hit
    clock.now_s += 6.0
    watch.audited(agreed=True)
    written = json.loads(json.dumps(watch.to_json()))
    again = Watch.from_json(written, spend=Spending(DELTA).next, lasts=lasts)
    again.audited(agreed=True)
    for each, moved_s, may_hit in ((watch, 5.0, True), (again, 0.0, False), (again, 10.0, True)):
        clock.now_s += moved_s
        each.audited(agreed=True)
        assert each.may_hit == may_hit
    late = Proof(AGREEMENT, DELTA, lasts)
    for _ in range(400):
        late.audit(agreed=True)
    clock.now_s = 0.0
    assert not late.audit(agreed=True)
    clock.now_s = LEAST_S
    assert late.audit(agreed=True)


def test_a_proof_that_has_passed_does_not_wait_again_where_another_process_goes_on_with_it() -> None:
    """After a restart, caches that were fully proven answered nothing for as long as a proof takes."""
    clock = Clock()
    lasts = Duration(LEAST_S, clock)
    watch = Watch(AGREEMENT, spend=Spending(DELTA).next, proven=False, lasts=lasts)
    begun = watch.to_json()
    while not watch.may_hit:
        clock.now_s += 1.0 / RATE_HZ
        watch.audited(agreed=True)
    spend = Spending(DELTA, used=1).next
    done = Proof.from_json(watch._ladder._proofs[0].to_json(), lasts)
    apart = Watch.from_json(begun, spend=spend, lasts=lasts)
    apart.prove_apart()
    apart.take_proofs(Watch.from_json({**begun, "proof": done.to_json()}, spend=spend, lasts=lasts))
    apart.audited(agreed=True)
    assert apart.may_hit
    assert not [done.audit(agreed=False) for _ in range(100)][-1], "losses still count"


def share_proven(least_s: float) -> float:
    """Of versions that are right for three seconds and then mostly wrong for half a second, 9 % in all."""
    rng = np.random.default_rng(0)
    period, wrong = round(3.5 * RATE_HZ), round(0.5 * RATE_HZ)
    proven = 0
    for _ in range(200):
        at = np.arange(period * 6) + rng.integers(period)
        losses = (at % period < wrong) & (rng.random(len(at)) < 0.6)
        proven += passed_after(losses.tolist(), least_s) is not None
    return proven / 200


@pytest.mark.slow
def test_versions_that_are_wrong_in_bursts_are_not_proven_between_two_of_them() -> None:
    assert share_proven(LEAST_S) <= DELTA
    assert share_proven(0.0) > 0.25  # the simulation would notice


@pytest.mark.parametrize("answered", [True, False])
def test_audits_that_wait_count_by_the_time_of_their_requests(answered: bool) -> None:
    """A long queue of requests of one moment took longer than a proof must, and all were alike."""
    clock = Clock()
    watch = Watch(AGREEMENT, spend=Spending(DELTA).next, proven=False, lasts=Duration(LEAST_S, clock))
    post, auditor, draws = Post("retrained", watch), Auditor[str](), Draws(1.0, seed=0)
    # without an answer, what may answer unproven is proven by these
    waiting = [
        auditor.decide(post, None, draws, room=lambda: True, unguarded=not answered) for _ in range(400)
    ]
    if not answered:
        waiting = [auditor.unanswered(each) for each in waiting]

    def settle(decided: Decided[str]) -> None:
        found = [(*each, [Probed(0, "block", agreed=True)]) for each in decided.shadows]
        auditor.settle(decided, Given(TRUE), TRUE, found)

    for decided in waiting:
        clock.now_s += LEAST_S / 100
        settle(decided)
    assert watch.proof is not None and watch.proof.audits == 400
    settle(auditor.decide(post, None, draws, room=lambda: True))
    assert watch.may_hit
