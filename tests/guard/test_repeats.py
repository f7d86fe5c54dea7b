"""What a place repeats exactly, such as the picture of a frozen camera, is guarded but proves nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gati.adaptation.recall_ladder import RecallLadder
from gati.guard.auditor import Auditor, Given, Probed
from gati.guard.draws import Draws
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


class Proving:
    """Memory whose proof is under way."""

    serves = False

    def __init__(self) -> None:
        self.proving: Proof | None = Proof(AGREEMENT, DELTA)

    def learn(self, looked: Any, base: Any, *, drawn: bool, tried: bool = False) -> None:
        pass

    def lost(self, looked: Any, *, drawn: bool) -> None:
        pass


def test_no_base_answer_is_computed_for_a_proof_of_memory_that_a_copy_cannot_further() -> None:
    """Nor does it use up the requests that are all looked at in the beginning."""
    auditor, draws = Auditor[str](memory=Proving()), Draws(0.0, seed=0)

    def tried(*, repeated: bool) -> bool:
        return auditor.decide(None, None, draws, room=lambda: True, repeated=repeated).tried

    assert not any([tried(repeated=True) for _ in range(COPIES)])
    assert all([tried(repeated=False) for _ in range(20)])


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
