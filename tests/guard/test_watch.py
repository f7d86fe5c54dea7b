"""Caches stop at once, return only when proven, and never retry for free."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest

from gati.guard.detector import Guard
from gati.guard.draws import Draws
from gati.guard.proof import Spending
from gati.guard.watch import Event, Watch


def watch_over(*, proven: bool = True, events: list[Event] | None = None) -> Watch:
    told = None if events is None else events.append
    return Watch(0.97, spend=Spending(0.05).next, proven=proven, on_event=told)


def stream(
    watch: Watch, random: np.random.Generator, requests: int, disagreement: float, rate: float = 0.05
) -> int:
    """Send requests that would all hit; return how many early answers differed from the base model's."""
    draws, wrong = Draws(rate, seed=int(random.integers(2**31))), 0
    for _ in range(requests):
        drawn, answers_early = draws.draw(), watch.may_hit
        lost = bool(random.random() < disagreement)
        wrong += lost and answers_early
        if drawn.audit:
            watch.audited(agreed=not lost)
    return wrong


def test_a_replaced_base_model_is_noticed_and_nothing_leaves_early_from_then_on() -> None:
    events: list[Event] = []
    watch, random = watch_over(events=events), np.random.default_rng(0)
    stream(watch, random, 20_000, 0.01)
    assert watch.may_hit and not events
    stream(watch, random, 4_000, 0.2)
    assert watch.state == "stopped"
    assert [event.state for event in events] == ["stopped"]
    assert stream(watch, random, 2_000, 0.2) == 0


def test_stopped_caches_return_when_they_are_proven_again() -> None:
    watch, random = watch_over(), np.random.default_rng(1)
    stream(watch, random, 5_000, 0.5)
    assert watch.state == "stopped"
    stream(watch, random, 20_000, 0.5)
    assert watch.state == "stopped"
    stream(watch, random, 40_000, 0.005)
    assert watch.may_hit


def test_caches_on_probation_serve_once_they_are_proven_and_without_an_alarm() -> None:
    events: list[Event] = []
    watch = watch_over(proven=False, events=events)
    assert watch.state == "probation" and not watch.may_hit and not events
    while not watch.may_hit:
        watch.audited(agreed=True)
        assert not events or events[0].audits < 300
    assert [event.state for event in events] == ["serving"]


@pytest.mark.slow
def test_disproven_caches_do_not_come_back_however_long_it_takes() -> None:
    """A day of audits at the smallest disagreement that must not pass, with proofs and restarts."""
    streams, returned = 100, 0
    for seed in range(streams):
        random, spending = np.random.default_rng(seed), Spending(0.05)
        watch = Watch(0.97, spend=spending.next, proven=False)
        for number, lost in enumerate(random.random(5_000) < 0.03):
            if number % 700 == 699:  # a restart
                spending = Spending(0.05, spending.used)
                watch = Watch.from_json(json.loads(json.dumps(watch.to_json())), spend=spending.next)
            if watch.proof is not None and watch.proof.hopeless:
                watch.prove_anew()
            watch.audited(agreed=not lost)
            if watch.may_hit:
                returned += 1
                break
    assert returned <= streams * 0.05 + 2.0 * math.sqrt(streams * 0.05 * 0.95)


@pytest.mark.parametrize("state", ["serving", "probation", "stopped"])
def test_it_goes_on_where_it_was_written_down(state: str) -> None:
    watch, random = watch_over(proven=state != "probation"), np.random.default_rng(2)
    while state == "stopped" and watch.may_hit:
        watch.audited(agreed=False)
    for _ in range(60):
        watch.audited(agreed=bool(random.random() > 0.01))
    other = Watch.from_json(json.loads(json.dumps(watch.to_json())), spend=Spending(0.05).next)
    assert other.state == watch.state == state
    for _ in range(300):
        agreed = bool(random.random() > 0.02)
        watch.audited(agreed=agreed)
        other.audited(agreed=agreed)
        assert other.to_json() == watch.to_json() or watch.state != state


def test_of_several_settings_the_loosest_that_is_proven_serves() -> None:
    """The loosest never agrees: the others are proven, serve, are stopped one by one, and come back."""
    events: list[Event] = []
    watch = Watch(0.9, spend=Spending(0.05).next, proven=False, settings=3, on_event=events.append)
    while not watch.may_hit:
        watch.audited(agreed=[True, True, False])
    assert (watch.level, watch.settings, watch.state) == (2, 3, "serving")
    while watch.level == 2:
        watch.audited(agreed=[True, False, False])
    assert watch.level == 1 and watch.may_hit and events[-1].tightened
    while watch.may_hit:
        watch.audited(agreed=[False, False, False])
    assert watch.state == "stopped" and [event.level for event in events] == [2, 1, 0]
    again = Watch.from_json(json.loads(json.dumps(watch.to_json())), spend=Spending(0.05).next)
    while not again.may_hit:
        again.audited(agreed=[True, True, True])
    assert again.level == 3


def test_what_contradicts_itself_is_not_believed() -> None:
    document = watch_over().to_json()
    alarmed = {**document["guard"], "alarmed": True}
    for damage in ({"state": "stopped"}, {"state": "idle"}, {"guard": alarmed}):
        with pytest.raises(ValueError):
            Watch.from_json({**document, **damage}, spend=Spending(0.05).next)
    on_probation = watch_over(proven=False).to_json()
    with pytest.raises(ValueError):
        Watch.from_json({**on_probation, "state": "idle"}, spend=Spending(0.05).next)


@pytest.mark.parametrize("full", [0.0, 0.5], ids=["room in the queue", "the queue is full half of the time"])
def test_the_alarm_takes_no_more_than_twice_the_audits_of_theory(full: float) -> None:
    """ln R / KL, in audits done: what finds no room is left out before anything is known of it."""
    alpha, disagreement, rate = 0.03, 0.1, 0.2
    divergence = disagreement * math.log(disagreement / alpha) + (1 - disagreement) * math.log(
        (1 - disagreement) / (1 - alpha)
    )
    delays = []
    for seed in range(60):
        random, watch, draws = np.random.default_rng(seed), watch_over(), Draws(rate, seed=seed)
        audits = 0
        for request in range(200_000):
            room = (request // 50) % 2 == 0 or full == 0.0
            if draws.draw().audit and room:
                audits += 1
                watch.audited(agreed=bool(random.random() > disagreement))
            if not watch.may_hit:
                break
        delays.append(audits)
    assert np.mean(delays) <= 2.0 * math.log(10_000) / divergence


def test_the_guard_keeps_what_it_promises_given_what_came_before_and_bursts_break_that() -> None:
    """With losses of 3 % on the whole, but in bursts, alarms are frequent: documented, not hidden."""
    alarms = {"alike": 0, "in bursts": 0}
    for seed in range(40):
        random = np.random.default_rng(seed)
        alike, bursts = Guard(0.97), Guard(0.97)
        left = 0
        for _ in range(1_000):
            alike.audit(agreed=bool(random.random() > 0.03))
            left = left - 1 if left else (4 if random.random() < 0.0077 else 0)
            bursts.audit(agreed=left == 0)
        alarms["alike"] += alike.alarmed
        alarms["in bursts"] += bursts.alarmed
    assert alarms["alike"] <= 40 * 0.1 + 2.0 * math.sqrt(40 * 0.1 * 0.9)  # t / R
    assert alarms["in bursts"] > 20


def tightened(agreement: float = 0.9) -> Watch:
    """A certified watch of three settings, of which the loosest was withdrawn and proven again."""
    watch = Watch(agreement, spend=Spending(0.05).next, proven=True, settings=3)
    while watch.level == 3:
        watch.audited(agreed=[True, True, False])
    assert (watch.level, watch.state, watch.proven_on) == (2, "serving", 0)
    while watch.level == 2:
        watch.audited(agreed=[True] * 3)
    assert watch.proven_on > 0
    return watch


def test_a_certificate_covers_what_was_never_withdrawn() -> None:
    """What audits have proven of a version that comes back counts no more; its certificate does."""
    watch = tightened()
    watch.bring_back()
    assert (watch.level, watch.state, watch.proven_on) == (2, "serving", 0)
    while watch.level == 2:  # now the second setting, too
        watch.audited(agreed=[True, False, False])
    assert (watch.level, watch.state) == (1, "serving")
    while watch.may_hit:
        watch.audited(agreed=[False] * 3)
    assert (watch.level, watch.state) == (0, "stopped")
    while not watch.may_hit:
        watch.audited(agreed=[True] * 3)
    watch.bring_back()
    assert (watch.level, watch.may_hit) == (0, False)


def test_a_version_that_comes_back_is_proven_anew_however_its_next_setting_does() -> None:
    """What is under way of looser settings saves nothing of what was proven of stricter ones."""
    watch = Watch(0.9, spend=Spending(0.05).next, proven=False, settings=2)
    while not watch.may_hit:
        watch.audited(agreed=[True, True])
    while watch.level == 2:
        watch.audited(agreed=[True, False])
    watch.audited(agreed=[True, True])
    assert watch.level == 1 and watch.proof is not None and not watch.proof.worse_than_none
    watch.bring_back()
    assert (watch.level, watch.may_hit) == (0, False)


def test_old_proofs_are_forgotten_but_no_certificate() -> None:
    watch = tightened()
    watch.forget()
    assert (watch.level, watch.state, watch.proven_on) == (2, "serving", 0)
    watch.forget()  # once more changes nothing
    assert (watch.level, watch.state) == (2, "serving")
    watch.audited(agreed=[True] * 3)
    watch.forget()  # nor does a proof that has only begun outlive it
    assert watch.proof is not None and watch.proof.audits == 0 and watch.level == 2


def test_a_certificate_that_does_not_count_here_lets_nothing_answer() -> None:
    watch, epoch = tightened(), tightened().epoch
    watch.restrict(1)
    assert (watch.level, watch.state, watch.epoch) == (1, "serving", epoch + 1)
    watch.restrict(0)
    assert (watch.level, watch.state, watch.may_hit) == (0, "probation", False)


def test_audits_under_way_do_not_count_once_a_certificate_lets_caches_answer() -> None:
    watch = Watch(0.9, spend=Spending(0.05).next, proven=False)
    watch.certify()
    assert (watch.state, watch.epoch) == ("serving", 1)


@pytest.mark.parametrize("level", [0, 1])
def test_no_certificate_brings_back_what_another_guard_found_wrong(level: int) -> None:
    """Nor does it after a restart, when it is read again."""
    watch = Watch(0.9, spend=Spending(0.05).next, proven=True, settings=3)
    watch.restrict(level)
    again = Watch.from_json(json.loads(json.dumps(watch.to_json())), spend=Spending(0.05, 1).next)
    for each in (watch, again):
        each.certify()
        assert each.level == each.certified == level


@pytest.mark.parametrize("change", ["restrict", "prove_anew", "begin_anew", "left_by", "revoke"])
def test_what_its_guard_found_wrong_stays_withdrawn_though_looser_settings_go_first(change: str) -> None:
    """The strictest is in alarm while looser ones answer; then these are withdrawn for another reason."""
    watch = Watch(0.9, spend=Spending(0.05).next, proven=True, settings=2)
    watch.restrict(1)
    while watch.level == 1:
        watch.audited(agreed=[True, True])
    while not watch.in_alarm(1):
        watch.audited(agreed=[False, True])
    assert (watch.level, watch.certified) == (2, 1)
    made: dict[str, Callable[[], object]] = {
        "restrict": lambda: watch.restrict(1),
        "prove_anew": watch.prove_anew,
        "begin_anew": watch.begin_anew,
        "left_by": lambda: watch.left_by(2),
        "revoke": watch.revoke,
    }
    made[change]()
    assert (watch.state, watch.may_hit, watch.withdrawn_to) == ("stopped", False, 0)
    again = Watch.from_json(json.loads(json.dumps(watch.to_json())), spend=Spending(0.05).next)
    again.certify()
    assert not again.may_hit, "a certificate gives back nothing that a guard has withdrawn"


@pytest.mark.parametrize("certified", [0, 1])
def test_a_setting_in_alarm_among_those_withdrawn_is_not_given_back_either(certified: int) -> None:
    """Its guard begins anew, so a later certificate let it answer."""
    watch = Watch(0.9, spend=Spending(0.05).next, proven=bool(certified), settings=3)
    if certified:
        watch.restrict(certified)
        watch.certifiable = 3
    while watch.level < 3:
        watch.audited(agreed=[True, True, True])
    while not watch.in_alarm(2):
        watch.audited(agreed=[True, False, True])
    watch.prove_anew()
    assert (watch.level, watch.withdrawn_to, watch.certifiable) == (certified, 1, 1)
    assert watch.state == ("serving" if certified else "probation"), "no guard withdrew the strictest"
    watch.certify()
    assert (watch.level, watch.may_hit) == (1, True)


def test_what_is_certified_is_written_down() -> None:
    watch = tightened()
    written = json.loads(json.dumps(watch.to_json()))
    again = Watch.from_json(written, spend=Spending(0.05).next)
    again.bring_back()
    assert (again.level, again.state) == (2, "serving")
    del written["certified_level"]  # as written before: proven by audits, so nothing is
    again = Watch.from_json(written, spend=Spending(0.05).next)
    again.bring_back()
    assert (again.level, again.state) == (0, "probation")
    with pytest.raises(ValueError, match="certified up to level 4"):
        Watch.from_json({**written, "certified_level": 4}, spend=Spending(0.05).next)


def again_from(watch: Watch) -> Watch:
    return Watch.from_json(json.loads(json.dumps(watch.to_json())), spend=Spending(0.05).next)


def test_withdrawals_are_numbered_also_over_restarts_and_of_earlier_ones_those_that_left_fewer_are_kept() -> (
    None
):
    """Other processes that use the same caches heed each of them once, by its number."""
    watch, left = Watch(0.9, spend=Spending(0.05).next, proven=True, settings=3), []
    for wrong_from in (1, 2, 1):
        while watch.level < 3:
            watch.audited(agreed=[True] * 3)
        while watch.level == 3:
            watch.audited(agreed=[True] * wrong_from + [False] * (3 - wrong_from))
        watch = again_from(watch)
        left.append([tuple(each) for each in watch.withdrawals])
    assert left == [[(1, 1)], [(1, 1), (2, 2)], [(3, 1)]]
    document = watch.to_json()
    del document["withdrawals"]  # as written before there were several
    assert Watch.from_json(document, spend=Spending(0.05).next).withdrawals == ((1, 1),)


def test_a_proof_that_is_better_than_none_is_not_begun_anew() -> None:
    """Each beginning costs a share of delta, and later shares are smaller."""
    spending = Spending(0.05)
    watch = Watch(0.9, spend=spending.next, proven=False)
    for agreed, used in ((None, 1), (True, 1), (False, 2)):
        if agreed is not None:
            watch.audited(agreed=agreed)
        watch.prove_anew()
        assert spending.used == used
    for _ in range(20):
        watch.audited(agreed=True)
    watch.prove_anew()
    assert spending.used == 2 and watch.proof is not None and watch.proof.audits == 20


def test_what_the_guard_left_of_other_settings_is_not_known() -> None:
    """If it withdrew none, a certificate of the new ones counts; else they have to be proven."""
    for withdrawn in (False, True):
        before = Watch(0.9, spend=Spending(0.05).next, proven=True, settings=2)
        while withdrawn and before.level == 2:
            before.audited(agreed=[True, False])
        now = Watch(0.9, spend=Spending(0.05).next, proven=True, settings=3)
        now.take_over(before)
        assert (now.level, now.withdrawals) == ((0, ((1, 0),)) if withdrawn else (3, ()))


def test_memory_that_leaves_the_same_requests_changes_nothing() -> None:
    watch = Watch(0.9, spend=Spending(0.05).next, proven=False)
    watch.left_by(2)
    watch.audited(agreed=True)
    before = watch.epoch, watch.to_json()
    assert not watch.left_by(2) and not watch.left_by(1)
    assert (watch.epoch, {**watch.to_json()}) == before
    assert again_from(watch).to_json() == before[1], "also where this run was not told of any memory"
    assert watch.left_by(3) and watch.proof is not None and watch.proof.audits == 0


def test_evidence_of_which_it_is_not_known_what_left_it_stays_so() -> None:
    watch = Watch(0.9, spend=Spending(0.05).next, proven=False)
    watch.audited(agreed=True)
    assert not watch.left_by(1)
    watch.audited(agreed=True)
    assert watch.proof is not None and watch.proof.audits == 2
    assert watch.left_by(2) and watch.proof.audits == 0, "the strictest may have left it"


def test_requests_without_an_answer_count_for_what_left_them() -> None:
    watch = Watch(0.9, spend=Spending(0.05).next, proven=False)
    watch.left_by(3)
    watch.audited(agreed=True)
    watch.begin_anew()
    watch.left_by(1)
    watch.tried([True])
    assert watch.left_by(3) and watch.proof is not None and watch.proof.audits == 0


def test_a_file_that_says_what_left_the_requests_of_other_settings_is_damaged() -> None:
    document = Watch(0.9, spend=Spending(0.05).next, proven=False).to_json()
    with pytest.raises(ValueError, match="2 settings of memory do not fit 1 settings"):
        Watch.from_json({**document, "memory_levels": [1, 1]}, spend=Spending(0.05).next)


def test_proofs_that_another_process_goes_on_with_begin_anew_here_and_nothing_else_changes() -> None:
    """Audits under way were decided about before, and the share of delta is written down at once."""
    spending, saved = Spending(0.05), list[int]()
    watch = Watch(0.9, spend=spending.next, proven=True, settings=2)
    watch.prove_apart()
    assert (watch.epoch, spending.used) == (0, 0), "all is proven"
    watch.restrict(1)
    watch.audited(agreed=[True, True])
    watch.on_restart = lambda: saved.append(spending.used)
    epoch = watch.epoch
    watch.prove_apart()
    assert watch.proof is not None and watch.proof.audits == 0
    assert (watch.level, watch.epoch, saved) == (1, epoch + 1, [2])
