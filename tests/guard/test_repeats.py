"""What a place repeats exactly, as a frozen camera does, is guarded, but no further evidence for a proof."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.adaptation.recall_ladder import RecallLadder
from gati.guard.auditor import Auditor, Given, Probed
from gati.guard.draws import Draws
from gati.guard.ladder import Ladder
from gati.guard.posts import Post
from gati.guard.proof import Proof, Spending
from gati.guard.watch import Watch
from tests.guard.named import RIGHT, TRUE, WRONG

AGREEMENT, DELTA, LEVELS = 0.8, 0.1, 3
COPIES = 300


def post_of(name: str, *, proven: bool, settings: int = 1) -> Post[str]:
    several: Any = (None,) * settings if settings > 1 else ()
    watch = Watch(AGREEMENT, spend=Spending(DELTA).next, proven=proven, settings=settings)
    return Post(name, watch, several)


def request(
    serving: Post[str], trial: Post[str] | None = None, *, repeated: bool, agrees: bool = True
) -> None:
    """A request that is audited, with what all settings say to it."""
    auditor = Auditor[str]()
    decided = auditor.decide(
        serving, trial, Draws(1.0, trials=1.0, seed=0), room=lambda: True, repeated=repeated
    )
    answer = Given((RIGHT if agrees else WRONG) if decided.lookups else TRUE)
    needs = auditor.needs(decided, answer)
    assert needs is not None
    probed = [Probed(0 if agrees else 1, "block", agrees)] * LEVELS
    own = () if auditor.own(decided, answer, TRUE) is None else probed
    auditor.settle(
        decided, answer, TRUE, [(*each, probed[: each[0].watch.settings]) for each in needs.shadows], own
    )


@pytest.mark.parametrize("role", ["stopped", "trial", "looser settings"])
def test_copies_of_one_input_prove_nothing_and_other_inputs_do(role: str) -> None:
    """Caches that were right once answered whatever the camera showed next."""
    serving = post_of("serving", proven=role == "trial", settings=LEVELS)
    trial = post_of("trial", proven=False, settings=LEVELS) if role == "trial" else None
    tried = trial or serving
    if role == "looser settings":
        serving.watch.certify()
        serving.watch.restrict(1)
        serving.open[1] = "serving-1"
    before = tried.watch.level
    for copy in range(COPIES):
        request(serving, trial, repeated=copy > 0)
    proof = tried.watch.proof
    assert tried.watch.level == before and proof is not None and proof.audits == 1
    for _ in range(proof.required - 1):
        request(serving, trial, repeated=False)
    assert tried.watch.level == LEVELS


def test_copies_that_are_answered_wrongly_stop_what_answers_them() -> None:
    """The promise is about all requests, and each copy is one."""
    serving = post_of("serving", proven=True)
    for copy in range(COPIES):
        request(serving, repeated=copy > 0, agrees=False)
        if not serving.may_hit:
            return
    raise AssertionError("no alarm")


def test_what_is_right_about_most_inputs_but_wrong_about_those_that_stay_is_not_proven() -> None:
    """Such as the picture that a camera shows without a signal: more answers were wrong than is tolerated."""
    caches, without_copies = (post_of("caches", proven=False) for _ in range(2))
    for number in range(300):
        wrong = number % 20 == 10
        request(without_copies, repeated=False, agrees=not wrong)
        for copy in range(10 if wrong else 1):
            request(caches, repeated=copy > 0, agrees=not wrong)
            assert not caches.may_hit
    assert without_copies.may_hit


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from((True, True, True, False)), st.booleans()), max_size=150))
def test_a_proof_has_enough_evidence_without_copies_and_with_them(found: list[tuple[bool, bool]]) -> None:
    proof, of_all, of_others = (Proof(0.6, 0.2) for _ in range(3))
    for agreed, repeated in found:
        proof.audit(agreed=agreed, repeated=repeated)
        of_all.audit(agreed=agreed)
        if not repeated:
            of_others.audit(agreed=agreed)
        assert proof.passed == (of_all.passed and of_others.passed)
    again = Proof.from_json(json.loads(json.dumps(proof.to_json())))
    assert again.to_json() == proof.to_json()
    assert again.audit(agreed=True) == proof.audit(agreed=True)


def test_copies_that_are_right_do_not_prolong_a_proof_that_fails_without_them() -> None:
    plain, copied = (Proof(AGREEMENT, DELTA) for _ in range(2))
    for _ in range(COPIES):
        copied.audit(agreed=True, repeated=True)
    for number in range(3 * plain.required):
        assert not plain.hopeless and not copied.hopeless
        for proof in (plain, copied):
            proof.audit(agreed=number % 4 > 0)
    assert plain.hopeless and copied.hopeless


def test_a_proof_of_nothing_but_wrong_copies_is_begun_anew() -> None:
    """A version that was tried again had to make up for all of them first."""
    watch = Watch(AGREEMENT, spend=Spending(DELTA).next, proven=False)
    begun = watch.proof
    watch.audited(agreed=True, repeated=True)
    watch.prove_anew()
    assert watch.proof is begun
    for _ in range(COPIES):
        watch.audited(agreed=False, repeated=True)
    watch.prove_anew()
    assert watch.proof is not begun


def test_proofs_written_down_before_copies_were_told_apart_are_read_and_damaged_ones_are_not() -> None:
    proof = Proof(AGREEMENT, DELTA)
    proof.audit(agreed=True)
    document = proof.to_json()
    assert document.pop("copies") == [0, 0]
    assert Proof.from_json(document).to_json() == proof.to_json()
    with pytest.raises(ValueError, match="3 of 2 copies"):
        Proof.from_json({**document, "copies": [2, 3]})


def test_copies_that_are_left_to_the_reference_prove_nothing() -> None:
    ladder = Ladder(1, AGREEMENT, Spending(DELTA).next, of_all=True)
    ladder.audited([True])
    for repeated, audits in ((True, 1), (False, 2)):
        ladder.audited([None], repeated=repeated)
        assert ladder.proof is not None and (ladder.proof.audits, ladder.proof.copies) == (audits, 0)


@pytest.mark.parametrize("alone", [True, False])
def test_copies_prove_nothing_of_memory_but_stop_it(alone: bool) -> None:
    ladder = RecallLadder(AGREEMENT, Spending(DELTA).next, alone=alone)
    ladder.expect(np.linspace(0.0, 1e-3, 600))

    def audit(*, repeated: bool, wrong: bool = False) -> None:
        ladder.audited(ladder.judge(0.0), wrong=wrong, steers=True, repeated=repeated)

    for copy in range(COPIES):
        audit(repeated=copy > 0)
    assert ladder.level == 0 and ladder.proof is not None and ladder.proof.audits == 1
    for _ in range(ladder.proof.required - 1):
        audit(repeated=False)
    assert ladder.level > 0
    answered = ladder.judge(0.0)  # of the copies that follow, the setting would answer none
    for _ in range(20):
        ladder.audited(answered, wrong=True, steers=True, repeated=True)
    assert ladder.level == 0
