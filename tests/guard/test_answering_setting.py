"""The guard of the setting that answers is heeded, whichever is open, and each audit counts as what it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gati.engine.exits import BASE, Prediction
from gati.guard.auditor import Auditor, Given, Probed
from gati.guard.draws import Draws
from gati.guard.ladder import Ladder
from gati.guard.posts import Post
from gati.guard.proof import Proof, Spending
from gati.guard.roster import RosterChange
from gati.guard.watch import Event, Watch
from tests.guard.named import RIGHT, TRUE, WRONG, NamedVersions

AGREEMENT, DELTA = 0.9, 0.1
TRIED_AGAIN_AFTER = 1000  # requests


class Unopened(NamedVersions):
    """Settings above `most` cannot be opened."""

    def __init__(self, serving: Post[str]) -> None:
        self.tried: list[int] = []
        self.most = 0
        super().__init__(serving)

    def begin_opening(self, post: Post[str], level: int, kind: RosterChange, counted: str) -> None:
        self.tried.append(level)
        if level <= self.most:
            super().begin_opening(post, level, kind, counted)
        else:
            self.not_opened(post)


def retrained(settings: int = 3) -> Post[str]:
    """A version with unproven settings, none of which is open; its events go to `roster_of`."""
    several: Any = (None,) * settings
    watch = Watch(AGREEMENT, spend=Spending(DELTA).next, proven=False, settings=settings)
    return Post("retrained", watch, several)


def roster_of(post: Post[str], most: int) -> Unopened:
    roster = Unopened(post)
    roster.most = most
    post.watch._on_event = lambda event: roster.heard(post, event)
    return roster


def prove(post: Post[str], *agreed: bool) -> None:
    level = post.watch.level
    while post.watch.level == level:
        post.watch.audited(agreed=agreed)


def only_the_first_is_open() -> tuple[Post[str], Unopened]:
    """All three settings are proven, but the second and the third cannot be opened."""
    post = retrained()
    roster = roster_of(post, most=1)
    prove(post, True, False, False)
    while post.watch.level < 3:
        prove(post, True, True, True)
    assert (post.level, post.watch.level, post.deployed) == (1, 3, "retrained-1")
    return post, roster


def test_the_guard_of_a_stricter_setting_is_heeded_while_a_looser_one_cannot_be_opened() -> None:
    """Its alarm was looked at for the loosest proven one only: it went on being wrong without end."""
    post, roster = only_the_first_is_open()
    events: list[Event] = []
    heard = post.watch._on_event
    assert heard is not None
    post.watch._on_event = lambda event: (events.append(event), heard(event))[1]
    auditor = Auditor[str]()
    for request in range(200):
        decided = auditor.decide(post, None, Draws(1.0, seed=request), room=lambda: True)
        if not decided.lookups:
            break
        assert decided.level == 1
        own = [Probed(1, "block", False), Probed(0, "block", True), Probed(0, "block", True)]
        auditor.settle(decided, Given(WRONG), TRUE, [], own)
    assert not post.may_hit and post.watch.state == "stopped" and "alarm" in roster.told
    assert auditor.losses == auditor.audits < 30
    (event,) = events
    assert event.losses == auditor.audits, "of the setting that answered; the others agreed"
    assert post.watch.losses == auditor.losses


def test_a_setting_in_alarm_does_not_answer_though_a_looser_one_is_not_open() -> None:
    post, _ = only_the_first_is_open()
    while not post.watch.in_alarm(1):
        post.watch.audited(agreed=[False, True, True])  # another answered meanwhile
    assert post.watch.level == 3 and post.level == 0 and not post.may_hit


def test_what_is_withdrawn_is_the_setting_that_answers_and_all_that_are_looser() -> None:
    ladder = Ladder(4, AGREEMENT, Spending(DELTA).next, proven=True)
    while (judged := ladder.audited([True, True, False, True], deployed=3)) is None:
        assert ladder.level == 4
    assert (ladder.level, judged.kind, judged.losses) == (2, "withdrawn", judged.audits)
    ladder = Ladder(4, AGREEMENT, Spending(DELTA).next, proven=True)
    while not ladder.in_alarm(2):
        assert ladder.audited([True, False, True, True], deployed=3) is None, "that one does not answer"
    while ladder.audited([True, True, False, True], deployed=3) is None:
        assert ladder.level == 4
    assert ladder.level == 1


@pytest.mark.parametrize("certified", [True, False])
def test_what_the_first_version_has_proven_on_earlier_requests_does_not_let_it_answer_again(
    certified: bool,
) -> None:
    spend = Spending(DELTA).next
    first = Post("first", Watch(AGREEMENT, spend=spend, proven=certified), nested=True)
    roster = NamedVersions(first)
    while not first.may_hit:
        first.watch.audited(agreed=True)
    watch = Watch(AGREEMENT, spend=spend, proven=True, on_event=lambda event: roster.heard(later, event))
    later = Post("later", watch)
    roster.serve(later)
    while later.may_hit:
        later.watch.audited(agreed=False)
    assert roster.serving is (first if certified else later) and roster.may_hit == certified


def test_a_setting_that_cannot_be_opened_is_tried_again_later_each_time() -> None:
    post, roster = only_the_first_is_open()
    roster.tried.clear()
    tried = []
    for request in range(4 * TRIED_AGAIN_AFTER):
        roster.give_up()  # as after every request
        if len(roster.tried) > len(tried):
            tried.append(request)
    waited = tried[1] - tried[0]
    assert len(tried) == 2 and waited >= 2 * TRIED_AGAIN_AFTER - 1 and set(roster.tried) == {3}
    roster.most = 3
    while post.level != 3:
        roster.give_up()
    assert post.deployed == "retrained-3"


def test_a_trial_that_could_not_be_opened_can_be_tried_again_at_once() -> None:
    """It was marked as being opened for ever."""
    trial = retrained(2)
    roster = Unopened(Post("library", Watch(AGREEMENT, spend=Spending(DELTA).next, proven=False)))
    roster.trial = trial
    prove(trial, True, True)
    roster.give_up()
    assert roster.trial is None and roster.tried == [2]
    roster.most, roster.trial = 2, trial
    roster.give_up()
    assert roster.tried == [2, 2] and trial.deployed == "retrained-2"


# What counts for what --------------------------------------------------------------------------------------


class Drawing:
    """Memory that notes which requests were drawn for its guard."""

    serves = True
    proving: Proof | None = None

    def __init__(self) -> None:
        self.drawn: list[bool] = []

    def learn(self, looked: Any, base: Prediction, *, drawn: bool, tried: bool = False) -> None:
        self.drawn.append(drawn)

    def lost(self, looked: Any, *, drawn: bool) -> None:
        self.drawn.append(drawn)


@pytest.mark.parametrize("fails", [False, True])
def test_in_a_new_scene_caches_may_stop_but_nothing_is_counted_as_an_audit(fails: bool) -> None:
    """The reference answers there: such audits agree, and made memory and the status look better."""
    post, memory = retrained(1), Drawing()
    prove(post, True)
    post.open[1] = "retrained"
    auditor, draws = Auditor[str](memory=memory), Draws(0.0, seed=0)
    guarded = post.watch.audits
    for _ in range(5):
        decided = auditor.decide(post, None, draws, room=lambda: True, new_scene=True)
        given = Given(TRUE, looked="its place")
        needs = auditor.needs(decided, given)
        assert needs is not None and needs.known is TRUE and not decided.drawn.audit
        if fails:
            auditor.failed(decided, given, needs.shadows)
        else:
            shadows = [(*each, [Probed(1, "block", False)]) for each in needs.shadows]
            assert auditor.settle(decided, given, TRUE, shadows) == []
    assert (auditor.audits, auditor.losses, post.watch.audits) == (0, 0, guarded)
    assert post.watch._ladder._scouts[0].losses == 5
    assert memory.drawn == ([] if fails else [False] * 5)


@pytest.mark.parametrize("proven", [False, True])
def test_an_audit_counts_once_if_the_version_has_become_the_trial_meanwhile(proven: bool) -> None:
    post = Post("again", Watch(AGREEMENT, spend=Spending(DELTA).next, proven=proven))
    auditor = Auditor[str]()
    decided = auditor.decide(post, post, Draws(1.0, trials=1.0, seed=0), room=lambda: True)
    given = Given(RIGHT if decided.lookups else TRUE)
    needs = auditor.needs(decided, given)
    assert needs is not None
    shadows = [(*each, [Probed(0, "block", True)]) for each in needs.shadows]
    auditor.settle(decided, given, TRUE, shadows)
    counted = post.watch._ladder.guard if proven else post.watch.proof
    assert counted is not None and counted.audits == 1


def test_a_setting_that_cannot_be_opened_delays_no_other_one() -> None:
    post = retrained()
    roster = roster_of(post, most=0)
    prove(post, True, False, False)
    for _ in range(TRIED_AGAIN_AFTER - 1):
        roster.give_up()
    assert roster.tried == [1]
    prove(post, True, True, False)
    assert roster.tried == [1, 2], "as soon as it is proven"
    for _ in range(TRIED_AGAIN_AFTER):
        roster.give_up()
    assert roster.tried == [1, 2, 2]


def setting(exit_ms: float) -> Any:
    """A composition of one cache, by what an early answer takes; the network takes 1 ms."""
    leaving = SimpleNamespace(block="block", exit_ms=exit_ms, lookup_ms=0.1)
    return SimpleNamespace(exits=(leaving,), expected=SimpleNamespace(base_latency_ms=1.0))


@pytest.mark.parametrize(("level", "faster"), [(1, False), (2, True)])
def test_a_version_is_as_fast_as_the_setting_that_may_answer(level: int, faster: bool) -> None:
    watch = Watch(AGREEMENT, spend=Spending(DELTA).next, proven=True, settings=2)
    watch.restrict(level)
    post = Post("trial", watch, [setting(0.5), setting(0.2)])
    post.open = {1: "strict", 2: "loose"}
    assert post.faster, "nothing was compared yet"
    for exits in (["block", "block"], [BASE, "block"]):
        post.compare(exits, serving_ms=0.5)
    assert post.faster == faster
    for _ in range(2):
        post.compare(["block", "block"], serving_ms=5.0)
    assert post.faster


def test_how_far_a_proof_is_tells_copies_that_hold_it_up() -> None:
    post = retrained()
    roster = roster_of(post, most=0)
    for repeated, agreed in ((False, False), (True, True), (True, False)):
        assert "copies" not in roster.how_far
        post.watch.audited(agreed=[agreed] * 3, repeated=repeated)
    assert "1 of them disagree, as do 1 of 2 copies" in roster.how_far


@pytest.mark.parametrize("fails", ["nothing", "the reference"])
def test_a_request_without_an_answer_is_an_audit_of_the_settings_that_are_not_proven(fails: str) -> None:
    """Misses take longest: looser settings were proven by what was answered in time, which is easy."""
    post = retrained()
    roster_of(post, most=1)
    prove(post, True, False, False)
    auditor, draws, proof = Auditor[str](), Draws(1.0, 1.0, seed=0), post.watch.proof
    assert post.deployed == "retrained-1" and proof is not None
    before, losses = (post.watch.audits, post.watch.losses), proof.losses
    for count in range(1, 21):
        late = auditor.unanswered(auditor.decide(post, None, draws, room=lambda: True))
        needs = auditor.needs(late, Given(TRUE))
        assert needs is not None and not late.drawn.sample
        if fails == "the reference":
            auditor.failed(late, Given(TRUE), needs.shadows)
        else:
            wrong = [Probed(1, "block", False)] * 3
            auditor.settle(late, Given(TRUE), TRUE, [(*each, wrong) for each in needs.shadows])
        assert proof.losses == losses + count
    assert (post.watch.audits, post.watch.losses) == before, "the setting that answers did not answer these"
    assert post.level == 1
    undrawn = auditor.decide(post, None, Draws(0.0, seed=0), room=lambda: True)
    assert undrawn.lookups and not auditor.unanswered(undrawn).looked_at, "as if it had an answer"


def test_a_request_without_an_answer_is_no_more_evidence_than_one_with_it() -> None:
    post = retrained()
    roster_of(post, most=1)
    prove(post, True, False, False)
    auditor, draws, proof = Auditor[str](), Draws(1.0, seed=0), post.watch.proof
    assert proof is not None
    audits = proof.audits
    late = auditor.unanswered(auditor.decide(post, None, draws, room=lambda: True, repeated=True))
    right = [Probed(0, "block", True)] * 3
    auditor.settle(late, Given(TRUE), TRUE, [(*each, right) for each in late.shadows])
    assert (proof.audits, proof.copies) == (audits, 1)
    post.watch.left_by(3)
    post.watch.begin_anew()
    post.watch.audited(agreed=[True] * 3)
    post.watch.begin_anew()
    post.watch.left_by(1)
    post.watch.tried([True] * 3)
    assert post.watch.left_by(3), "it was of an easier request"


def test_where_nothing_is_left_to_prove_a_request_without_an_answer_costs_nothing() -> None:
    several: Any = (None,) * 3
    watch = Watch(AGREEMENT, spend=Spending(DELTA).next, proven=True, settings=3)
    post, auditor = Post("certified", watch, several, nested=True), Auditor[str]()
    draws = Draws(1.0, seed=0)
    assert auditor.unanswered(auditor.decide(post, None, draws, room=lambda: True)).shadows == ()
    watch.restrict(1)  # in a new scene it proves nothing either
    post.open[1] = "certified-1"
    decided = auditor.decide(post, None, draws, room=lambda: True, new_scene=True)
    assert decided.lookups and auditor.unanswered(decided).shadows == ()
