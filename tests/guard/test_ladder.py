"""Settings are released in order, withdrawn on losses, and never retried for free."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.errors import AdaptError
from gati.guard.detector import Guard
from gati.guard.ladder import Ladder
from gati.guard.proof import Proof, Spending

AGREEMENT, DELTA = 0.9, 0.1
ALPHA = 1.0 - AGREEMENT


def ladder_of(count: int, *, proven: bool = False) -> Ladder:
    return Ladder(count, AGREEMENT, Spending(DELTA).next, proven=proven)


def allowed(streams: int, delta: float = DELTA) -> float:
    return streams * delta + 2.0 * math.sqrt(streams * delta * (1.0 - delta))


def losses_of(
    random: np.random.Generator, count: int, chances: Sequence[float], *, alike: bool
) -> np.ndarray:
    """bool [count, settings]; `alike`: what a stricter setting gets wrong a looser one does, too."""
    drawn = random.random((count, 1 if alike else len(chances)))
    return np.asarray(drawn < np.array(chances))


@pytest.mark.parametrize("alike", [True, False], ids=["nested", "independent"])
@pytest.mark.parametrize(
    ("chances", "bad"),
    [((ALPHA,) * 3, 1), ((0.1 * ALPHA, ALPHA, 0.1 * ALPHA), 2), ((0.0, 0.3 * ALPHA, ALPHA), 3)],
)
def test_one_delta_is_enough_for_all_settings(chances: tuple[float, ...], bad: int, *, alike: bool) -> None:
    """Nothing from the first setting on that is wrong too often is released, but for delta of all streams."""
    streams, released, good = 100, 0, 0
    for seed in range(streams):
        ladder = Ladder(len(chances), AGREEMENT, lambda: DELTA)
        highest = 0
        for lost in losses_of(np.random.default_rng(seed), 250, chances, alike=alike):
            ladder.audited([not each for each in lost], guards=False)
            highest = max(highest, ladder.level)
        released += highest >= bad
        good += highest >= bad - 1
    assert released <= allowed(streams)
    assert good >= 0.5 * streams  # and what is good is


def test_all_settings_are_proven_in_the_time_of_one() -> None:
    ladder, proof = ladder_of(4), Proof(AGREEMENT, Spending(DELTA).next())
    for number in range(1, proof.required + 1):
        judged = ladder.audited([True] * 4)
        assert (judged is not None) == (number == proof.required)
    assert ladder.level == 4 and ladder.proof is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([True, True, True, False, None]), min_size=3, max_size=3), max_size=300)
)
def test_a_looser_setting_never_answers_before_a_stricter_one(audits: list[list[bool | None]]) -> None:
    ladder, spending, level = ladder_of(3), Spending(DELTA), 0
    alone = [Proof(AGREEMENT, delta) for delta in [spending.next()] * 3]
    for agreed in audits:
        ladder.audited(agreed, guards=False)
        for proof, each in list(zip(alone, agreed, strict=True))[level:]:
            if each is not None:
                proof.audit(agreed=each)
        passed = [proof.passed for proof in alone]
        level = passed.index(False) if False in passed else 3
        assert ladder.level == level


def test_a_setting_that_waits_for_a_stricter_one_is_not_released_by_what_it_was_before() -> None:
    """It was proven first, as it answers more, and wrong in each audit since: it answered at once."""
    ladder = ladder_of(2)
    while not ladder._proofs[1].passed:
        assert ladder.audited([None, True]) is None
    while not ladder.level:
        ladder.audited([True, False])
    assert ladder.level == 1
    while ladder.level == 1:
        ladder.audited([True, True])
    assert ladder.level == 2


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), max_size=300))
def test_one_setting_is_a_proof_and_a_guard(audits: list[bool]) -> None:
    ladder, spending = ladder_of(1), Spending(DELTA)
    proof, guard, serves = Proof(AGREEMENT, spending.next()), Guard(AGREEMENT), False
    for agreed in audits:
        ladder.audited([agreed])
        if not serves:
            serves = proof.audit(agreed=agreed)
        elif guard.audit(agreed=agreed):
            serves, proof = False, Proof(AGREEMENT, spending.next())
            guard.reset()
        assert (ladder.level == 1) == serves


def test_where_audits_turn_it_tightens_and_comes_back() -> None:
    """The loosest setting breaks the promise, the stricter ones keep it: they go on answering."""
    ladder = ladder_of(3, proven=True)
    while (judged := ladder.audited([True, True, False])) is None:
        assert ladder.level == 3
    assert judged.kind == "withdrawn" and judged.losses == judged.audits and ladder.level == 2
    proof = ladder.proof
    assert proof is not None and proof.audits == 0
    while ladder.audited([True, True, True]) is None:
        assert ladder.level == 2
    assert ladder.level == 3


def test_where_every_setting_breaks_the_promise_nothing_answers() -> None:
    ladder = ladder_of(3, proven=True)
    while ladder.level:
        ladder.audited([False] * 3)
    assert ladder.proof is not None


def test_a_setting_that_was_in_alarm_itself_does_not_take_over() -> None:
    ladder = ladder_of(3, proven=True)
    while not ladder._guards[1].alarmed:
        assert ladder.audited([True, False, True]) is None
    while ladder.level == 3:
        ladder.audited([True, True, False])
    assert ladder.level == 1


@pytest.mark.parametrize(("change", "left"), [("restrict", 2), ("prove_anew", 0)])
def test_a_setting_that_was_in_alarm_itself_does_not_answer_when_looser_ones_are_withdrawn(
    change: str, left: int
) -> None:
    """Another guard found the loosest wrong: the next one answered, and no later run could read the state."""
    ladder = ladder_of(4, proven=True)
    ladder.certify(2 if change == "restrict" else 1)
    wrong = 2 if change == "restrict" else 0
    while not ladder._guards[wrong].alarmed:
        assert ladder.audited([each != wrong for each in range(4)]) is None
    withdrew = ladder.restrict(3) if change == "restrict" else ladder.prove_anew()
    assert withdrew == ladder.level == ladder.certified == left
    Ladder.from_json(json.loads(json.dumps(ladder.to_json())), spend=Spending(DELTA).next)
    assert ladder.restrict(left) is None, "nothing else is in alarm"


@pytest.mark.parametrize("wrong", [(2,), (2, 3)])
def test_settings_in_alarm_among_those_withdrawn_are_told(wrong: tuple[int, ...]) -> None:
    """Their guards are reset, so nothing else would say later that they were wrong."""
    ladder = ladder_of(5, proven=True)
    while not all(ladder.in_alarm(each) for each in wrong):
        assert ladder.audited([each not in wrong for each in range(1, 6)]) is None
    assert ladder.restrict(1) == 1 and ladder.level == 1, "the strictest in alarm is the second"
    assert not any(ladder.in_alarm(each) for each in range(1, 6))


def test_the_guard_alarms_no_oftener_than_it_says() -> None:
    """Losses as often as is tolerated: within t audits at most t / R of the streams are stopped."""
    stopped = 0
    for seed in range(60):
        ladder = Ladder(2, AGREEMENT, Spending(DELTA).next, proven=True, audits_to_false_alarm=5_000.0)
        lost = losses_of(np.random.default_rng(seed), 500, (0.5 * ALPHA, ALPHA), alike=True)
        stopped += any(ladder.audited([not each for each in row]) is not None for row in lost)
    assert stopped <= allowed(60, 500 / 5_000)


def test_audits_for_proofs_alone_say_nothing_to_the_guard() -> None:
    ladder = ladder_of(2, proven=True)
    for _ in range(200):
        assert ladder.audited([False, False], guards=False) is None
    assert ladder.level == 2 and ladder.guard.audits == 0


@pytest.mark.slow
def test_over_a_whole_life_all_attempts_together_err_no_oftener_than_delta() -> None:
    """The strict setting comes and goes with the scene; the loose one is bad all the time.

    There are attempts without end: withdrawals, proofs begun anew, restarts. It is released in no more
    than delta of all lives. With all of delta for every attempt it would be in far more.
    """
    lives, released = 80, 0
    attempts = []
    for seed in range(lives):
        random, spending = np.random.default_rng(seed), Spending(DELTA)
        ladder = Ladder(2, AGREEMENT, spending.next)
        highest = 0
        for number, drawn in enumerate(random.random(1_800)):
            if number % 500 == 499:  # another scene
                ladder.prove_anew()
            if number % 700 == 699:  # a restart
                spending = Spending(DELTA, spending.used)
                ladder = Ladder.from_json(json.loads(json.dumps(ladder.to_json())), spend=spending.next)
            strict = 0.1 * ALPHA if (number // 300) % 2 == 0 else 6.0 * ALPHA
            ladder.audited([not drawn < strict, not drawn < ALPHA])
            highest = max(highest, ladder.level)
        released += highest == 2
        attempts.append(spending.used)
    assert released <= allowed(lives)
    assert np.mean(attempts) >= 4


ANSWERS = st.tuples(*[st.sampled_from((True, True, False, None))] * 2)


@settings(max_examples=30, deadline=None)
@given(st.lists(ANSWERS, max_size=150), st.lists(ANSWERS, max_size=60), st.booleans())
def test_it_goes_on_where_it_was_written_down(
    before: list[tuple[bool | None, ...]], after: list[tuple[bool | None, ...]], of_all: bool
) -> None:
    spending = Spending(DELTA)
    one = Ladder(2, AGREEMENT, spending.next, of_all=of_all)
    for agreed in before:
        one.audited(agreed)
    other = Ladder.from_json(json.loads(json.dumps(one.to_json())), spend=Spending(DELTA, spending.used).next)
    for agreed in after:
        assert one.audited(agreed) == other.audited(agreed)
    assert one.to_json() == other.to_json()


def test_restarts_let_no_proof_count_more_of_what_its_setting_leaves() -> None:
    """A setting that answers next to nothing would prove itself by restarts."""
    ladder = Ladder(1, AGREEMENT, Spending(DELTA).next, of_all=True)
    for agreed in [True] * 3 + [None] * 20:
        ladder.audited([agreed])
    for _ in range(3):
        ladder = Ladder.from_json(ladder.to_json(), spend=Spending(DELTA).next)
        ladder.audited([None])
    assert ladder.proof is not None and ladder.proof.audits == 6


@pytest.mark.parametrize("damage", [{"level": 3}, {"level": -1}, {"guards": []}, {"proofs": []}])
def test_what_contradicts_itself_is_not_believed(damage: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Ladder.from_json({**ladder_of(2).to_json(), **damage}, spend=Spending(DELTA).next)


def test_a_guard_hears_what_its_setting_answers_and_of_the_rest_only_if_the_reference_gives_it() -> None:
    """Requests that a setting leaves to others would hide how often it is wrong."""
    for of_all, audits in ((False, 3), (True, 53)):
        ladder = Ladder(1, AGREEMENT, Spending(DELTA).next, proven=True, of_all=of_all)
        for agreed in [True] * 3 + [None] * 50:
            ladder.audited([agreed])
        assert ladder.guard.audits == audits


def test_requests_that_a_setting_leaves_to_the_reference_are_at_most_half_of_its_proof() -> None:
    """One that answers almost nothing must not prove itself, in the next proof no more than in the first."""
    ladder = Ladder(1, AGREEMENT, Spending(DELTA).next, of_all=True)
    for own in (0, 10, 3):
        if own == 3:
            ladder.prove_anew()
        for agreed in [True] * own + [None] * 50:
            ladder.audited([agreed])
        assert ladder.proof is not None and ladder.proof.audits == 2 * own


def test_what_was_heard_in_new_scenes_ends_with_the_proof_that_it_was_about() -> None:
    guard, ladder = Guard(AGREEMENT), ladder_of(1)
    while not guard.audit(agreed=False):
        pass
    for _ in range(2):
        while not ladder.level:
            ladder.audited([True])
        for _ in range(guard.audits - 1):
            assert ladder.in_new_scene([False]) is None
        ladder.prove_anew()


def test_proofs_that_began_anew_are_not_replaced_by_those_of_a_process_that_has_ended() -> None:
    """These were of earlier requests, as those were that they would replace."""
    ladder = ladder_of(2)
    theirs = Ladder.from_json(json.loads(json.dumps(ladder.to_json())), spend=Spending(DELTA).next)
    ladder.prove_apart()
    for _ in range(5):
        theirs.audited([True, True])
    ladder.prove_anew()
    assert not ladder.take_proofs(theirs)
    assert ladder.proof is not None and ladder.proof.audits == 0


def test_only_proofs_of_the_same_promise_are_taken_and_with_all_that_they_counted() -> None:
    """Else one of a looser promise would do, or one that goes on counting what its setting leaves."""
    for agreement, taken in ((AGREEMENT, True), (AGREEMENT - 0.1, False)):
        ours, theirs = (Ladder(1, each, Spending(DELTA).next, of_all=True) for each in (AGREEMENT, agreement))
        ours.prove_apart()
        for agreed in (True, True, True, None, None, None):
            theirs.audited([agreed])
        assert ours.take_proofs(theirs) == taken
        ours.audited([None])
        assert ours.proof is not None and ours.proof.audits == 6 * taken


def test_what_was_written_down_is_certified_only_if_its_owner_says_so() -> None:
    ladder = Ladder.from_json(ladder_of(2, proven=True).to_json(), spend=Spending(DELTA).next)
    assert ladder.level == 2
    assert ladder.prove_anew() is None and ladder.level == 0


def test_a_ladder_without_settings_is_refused() -> None:
    with pytest.raises(AdaptError, match="at least one setting, got 0"):
        ladder_of(0)
