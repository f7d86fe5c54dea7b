"""Caches next to memory: what is proven on all requests is not believed on those that memory leaves."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from gati.engine.exits import BASE, Prediction
from gati.guard.auditor import RECALL, Auditor, Given, Probed
from gati.guard.draws import Draws
from gati.guard.posts import Post
from gati.guard.proof import Proof
from gati.guard.roster import Roster
from gati.guard.standing import Standing, of_rest
from gati.guard.watch import Watch
from tests.engine.served import composed
from tests.guard.named import RIGHT, TRUE, WRONG, NamedVersions, said

AGREEMENT, DELTA = 0.8, 0.1
ALPHA = 1.0 - AGREEMENT
EASY = 0.6  # share of requests that memory knows
AGAIN_AFTER = 1000  # requests until memory is tried again


class Looked(NamedTuple):
    """A request looked up in memory."""

    taken: bool


class Memory:
    """Memory that is proven: it answers the easy requests, next to caches and where none are looked up."""

    proving: Proof | None = None
    serves = True

    def learn(self, looked: Any, base: Prediction, *, drawn: bool, tried: bool = False) -> None:
        pass

    def lost(self, looked: Any, *, drawn: bool) -> None:
        pass


class Versions(NamedVersions):
    """Begins with certified caches; each version has a watch of all requests and one of the rest."""

    def __init__(self, standing: Standing, settings: int) -> None:
        self.standing = standing
        super().__init__(self.post("library", settings, proven=True))

    def post(self, name: str, settings: int, *, proven: bool) -> Post[str]:
        def watch(identity: str, *, proven: bool, rest: bool) -> Watch:
            return self.standing.watch(
                identity, AGREEMENT, proven=proven, settings=settings,
                on_event=lambda event: self.heard(post, event) if post.after_memory == rest else None,
            )  # fmt: skip

        several: Any = (None,) * settings
        post = Post(
            name,
            watch(name, proven=proven, rest=False),
            several,
            nested=proven,
            rest=lambda: watch(of_rest(name), proven=False, rest=True),
            is_after_memory=lambda: self.is_after_memory(post),
        )
        return post


class Stream:
    """Requests to certified caches, next to memory. `wrong` is per setting, about what memory does not know.

    About all requests, the loosest is wrong as often as its certificate allows.
    """

    def __init__(
        self,
        wrong: tuple[float, ...] = (ALPHA / (1.0 - EASY),),
        *,
        seed: int = 0,
        path: Path | None = None,
        easy: float = EASY,
        exact: bool = True,
    ) -> None:
        self.random, self.draws = np.random.default_rng(seed), Draws(0.5, trials=1.0, seed=seed)
        self.wrong, self.easy = wrong, easy
        self.standing = Standing(DELTA, path)
        self.roster = Versions(self.standing, len(wrong))
        self.memory = Memory()
        self.auditor = Auditor[str](exact=exact, memory=self.memory, compare=self.roster.compare)
        self.share: float | None = easy  # of requests that memory answers next to caches
        self.level = 1  # by which setting
        self.expected_losses = 0.0  # of the answers given, by their probabilities
        self.early = self.recalled = self.requests = 0

    def request(self, *, lookups_pay: bool = True) -> None:
        """One request. Memory is wrong about its own answers as often as the promise allows."""
        roster = self.roster
        decided = self.auditor.decide(
            roster.serving, roster.trial, self.draws, room=lambda: True, lookups_pay=lookups_pay
        )
        easy = bool(self.random.random() < self.easy)
        drawn = self.random.random()
        lost = [not easy and drawn < chance for chance in self.wrong]
        self.requests += 1
        if easy and decided.recalls:
            answer = said(int(self.random.random() < ALPHA), RECALL)
            self.expected_losses += ALPHA
        elif decided.lookups:
            answer = WRONG if lost[decided.level - 1] else RIGHT
            self.expected_losses += 0.0 if easy else self.wrong[decided.level - 1]
        else:
            answer = TRUE
        self.early += answer.exit != BASE
        self.recalled += answer.exit == RECALL
        given = Given(answer, Looked(easy))
        needs = self.auditor.needs(decided, given)
        if needs is not None:
            probed = [Probed(int(each), "block", not each) for each in lost]
            asked = self.auditor.own(decided, given, TRUE)
            shadows = [(*each, probed) for each in needs.shadows]
            self.auditor.settle(decided, given, TRUE, shadows, () if asked is None else probed)
        roster.follow_memory(self.share, self.level)
        roster.give_up()


def loss(stream: Stream, requests: int) -> float:
    for _ in range(requests):
        stream.request()
    return stream.expected_losses / requests


@pytest.mark.parametrize("exact", [True, False])
def test_memory_and_certified_caches_together_keep_the_promise(exact: bool) -> None:
    """The caches use up all that is tolerated, on the requests that memory leaves. So does memory."""
    streams = [Stream(seed=seed, exact=exact) for seed in range(40)]
    broken = sum(loss(stream, 400) > ALPHA for stream in streams) / len(streams)
    assert broken <= DELTA + 2.0 * math.sqrt(DELTA * (1.0 - DELTA) / len(streams))
    assert all(stream.recalled > 0.4 * stream.requests for stream in streams)


def test_the_streams_would_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the certificate believed of what memory leaves, too much is lost until the guard has seen it."""
    monkeypatch.setattr(Roster, "follow_memory", lambda self, *_: setattr(self, "after_memory", True))
    monkeypatch.setattr(Post, "watch", property(lambda self: self.of_all))
    assert np.mean([loss(Stream(seed=seed), 50) for seed in range(20)]) > 1.3 * ALPHA


def test_caches_that_prove_themselves_on_the_rest_answer_it_by_as_much_as_is_proven() -> None:
    stream = Stream((0.1 * ALPHA, 0.2 * ALPHA, ALPHA / (1.0 - EASY)), seed=1)
    stream.request()
    serving = stream.roster.serving
    assert serving.after_memory and not serving.may_hit and serving.of_all.level == 3
    assert stream.roster.told == ["probation"]
    loss(stream, 400)
    assert (serving.level, serving.deployed) == (2, "library-2") and stream.roster.may_hit
    assert stream.early > 0.8 * stream.requests


def test_when_memory_stops_the_certificate_counts_again_and_what_was_proven_stays() -> None:
    stream = Stream((0.1 * ALPHA, ALPHA))
    loss(stream, 400)
    serving = stream.roster.serving
    proven = serving.level
    assert proven == 1
    stream.share, stream.easy = None, 0.0
    stream.request()
    assert not serving.after_memory and serving.level == 2 and stream.roster.may_hit
    stream.share = EASY
    stream.request()
    assert serving.after_memory and serving.level == proven


def test_memory_that_answers_little_waits_if_caches_do_not_prove_themselves_next_to_it() -> None:
    """They answer all requests by their certificate instead; memory is tried again, later each time."""
    stream = Stream((ALPHA / 0.7,), easy=0.3)
    serving = stream.roster.serving
    tried = []
    for request in range(6 * AGAIN_AFTER):
        before = serving.after_memory
        stream.request()
        if serving.after_memory and not before:
            tried.append(request)
            assert not serving.hopeless, "each time by a proof of its own"
        if not serving.after_memory:
            assert serving.may_hit or serving.watch.state == "stopped"
    assert len(tried) >= 3
    waited = np.diff(tried)
    assert waited[0] >= AGAIN_AFTER and waited[1] >= 2 * AGAIN_AFTER


def test_memory_that_answers_most_goes_on_whatever_becomes_of_the_caches() -> None:
    stream = Stream((0.9,), easy=0.9)
    loss(stream, 3000)
    assert stream.roster.after_memory and not stream.roster.may_hit and stream.recalled > 2500


def test_memory_that_answers_hardly_anything_changes_nothing() -> None:
    stream = Stream((0.1 * ALPHA,), easy=0.02)
    loss(stream, 200)
    assert not stream.roster.after_memory and stream.roster.may_hit and stream.recalled == 0


def test_a_version_that_is_proven_on_the_rest_only_gives_way_to_certified_ones_when_memory_stops() -> None:
    stream = Stream((0.05 * ALPHA,))
    roster = stream.roster
    library = roster.serving
    stream.request()
    while library.of_rest.level == 0:  # the library's own caches are stopped there, the others are proven
        library.of_rest.audited(agreed=True)
    retrained = roster.post("retrained", 1, proven=False)
    while not retrained.of_rest.level:
        retrained.of_rest.audited(agreed=True)
    roster.serve(retrained)
    roster.settle()
    assert roster.may_hit and retrained.of_all.level == 0
    while library.of_rest.level:
        library.of_rest.audited(agreed=False)
    stream.share = None
    roster.follow_memory(None)
    assert roster.serving is library and library.may_hit and roster.trial is retrained
    stream.share = EASY
    roster.follow_memory(EASY)
    assert roster.serving is retrained and retrained.may_hit and roster.trial is None


@pytest.mark.parametrize(("on_trial", "told"), [(True, ["probation"] * 2), (False, [])])
def test_where_no_caches_serve_only_a_version_on_trial_must_prove_itself(
    monkeypatch: pytest.MonkeyPatch, on_trial: bool, told: list[str]
) -> None:
    """It was said that caches answer: what serves is proven, but has none."""
    monkeypatch.setattr(Versions, "figures", lambda self, post: composed("0" * 64, ()))
    roster = Stream().roster
    while not roster.serving.of_rest.level:
        roster.serving.of_rest.audited(agreed=True)
    if on_trial:
        roster.trial = roster.post("retrained", 1, proven=False)
    for share in (EASY, None):
        roster.follow_memory(share)
        assert roster.may_hit and roster.after_memory is (share is not None)
    assert roster.told == told


def test_caches_are_not_judged_by_what_memory_answers_next_to_them() -> None:
    """But by what memory alone answers, and would leave to them, if it is audited: others then are, too."""
    stream = Stream()
    stream.request()
    roster, auditor = stream.roster, stream.auditor
    assert roster.after_memory and not roster.may_hit
    for audits, taken, judged in ((1.0, True, False), (1.0, False, True), (0.0, False, False)):
        draws = Draws(audits, trials=1.0, seed=0)
        decided = auditor.decide(roster.serving, None, draws, room=lambda: True)
        answer = Given(said(1, RECALL), Looked(taken))
        needs = auditor.needs(decided, answer)
        assert len(decided.shadows) == 1 and bool(needs and needs.shadows) == judged
        assert auditor.own(decided, answer, TRUE) is None
    watch = roster.serving.watch
    loss(stream, 400)
    before, losses = watch.audits, auditor.losses
    decided = auditor.decide(roster.serving, None, Draws(1.0, seed=0), room=lambda: True)
    auditor.settle(decided, Given(said(1, RECALL), Looked(True)), TRUE, [])
    assert watch.audits == before and auditor.losses == losses + 1


@pytest.mark.parametrize("taken", [True, False])
def test_what_memory_was_not_asked_for_is_none_of_the_rest_if_it_would_take_it(taken: bool) -> None:
    """Requests that name a version are answered by its caches, the easy ones, too, which proved settings."""
    stream = Stream((0.1 * ALPHA,))
    loss(stream, 400)
    roster, watch = stream.roster, stream.roster.serving.watch
    assert roster.after_memory and roster.may_hit
    before = watch.audits
    decided = stream.auditor.decide(roster.serving, None, Draws(1.0, seed=0), room=lambda: True)
    stream.auditor.settle(decided, Given(RIGHT, Looked(taken)), TRUE, [])
    assert watch.audits == before + (not taken)


def test_what_memory_would_take_next_to_caches_judges_no_caches_whoever_answers_it() -> None:
    """Memory alone answers by another setting, maybe a stricter one: then the reference answers easy ones."""
    stream = Stream()
    stream.request()
    for taken in (True, False):
        decided = stream.auditor.decide(
            stream.roster.serving, None, Draws(0.0, trials=1.0, seed=0), room=lambda: True
        )
        audited = replace(decided, drawn=decided.drawn._replace(audit=True))
        for each, counts in (
            (decided, False),
            (audited, True),
        ):  # only audits are drawn from all that is left
            needs = stream.auditor.needs(each, Given(TRUE, Looked(taken)))
            assert len(each.shadows) == 1 and bool(needs and needs.shadows) == (counts and not taken)


def test_when_memory_answers_more_than_ever_caches_prove_themselves_on_what_is_left_then() -> None:
    stream = Stream((0.1 * ALPHA,))
    loss(stream, 400)
    roster = stream.roster
    serving = roster.serving
    assert serving.after_memory and serving.may_hit
    stream.level = 2
    roster.follow_memory(EASY, 2)
    assert serving.after_memory and not serving.may_hit and roster.told[-1] == "probation"
    loss(stream, 400)
    assert serving.may_hit
    roster.follow_memory(EASY, 1)
    roster.follow_memory(EASY, 2)
    assert serving.may_hit, "what is left by a stricter or the same setting is not harder"


def test_after_a_restart_what_is_proven_on_the_rest_counts_for_the_setting_that_memory_goes_on_with(
    tmp_path: Path,
) -> None:
    path = tmp_path / "standing.json"
    stream = Stream((0.1 * ALPHA,), path=path)
    stream.level = 3
    loss(stream, 200)
    stream.standing.save()
    for level, believed in ((3, True), (2, True), (4, False), (3, False)):
        again = Stream((0.1 * ALPHA,), path=path)
        again.roster.follow_memory(EASY, level)
        assert again.roster.after_memory and again.roster.may_hit is believed


def test_before_memory_answers_next_to_caches_all_requests_count_in_the_same_proportion() -> None:
    """Memory answers the easy ones where nothing is looked up: only what was drawn from all may count."""
    stream = Stream(easy=0.9)
    stream.share = None
    stream.roster.trial = trial = stream.roster.post("trial", 1, proven=False)
    counted = []
    for _ in range(300):
        before = trial.of_all.to_json()["proof"]
        stream.request(lookups_pay=False)
        if trial.of_all.level:
            break
        counted.append((trial.of_all.to_json()["proof"]["audits"], before["audits"]))
    assert stream.recalled > 0
    audits = sum(after > before for after, before in counted)
    assert abs(audits / len(counted) - 0.5) < 0.15, "half of the requests are audited, whoever answers them"


def test_what_was_proven_on_the_rest_survives_a_restart_and_is_withdrawn_with_the_version(
    tmp_path: Path,
) -> None:
    path = tmp_path / "standing.json"
    stream = Stream((0.1 * ALPHA,), path=path)
    loss(stream, 200)
    assert stream.roster.serving.of_rest.level == 1
    stream.standing.save()
    again = Stream((0.1 * ALPHA,), path=path)
    again.request()
    assert again.roster.after_memory and again.roster.may_hit
    later = Stream((0.1 * ALPHA,), path=path)
    later.roster.serving.bring_back()
    later.request()
    assert later.roster.after_memory and not later.roster.may_hit
    assert later.roster.serving.of_all.level == 1, "a certificate stays valid"


def test_an_answer_without_lookups_proves_nothing_of_settings_that_are_not_proven() -> None:
    """In reduced precision it is counted, as it may be wrong, but no cache had a part in it."""
    stream = Stream((0.0, 0.0), exact=False)
    watch = stream.roster.serving.watch
    watch.restrict(1)
    stream.share = None
    proof = watch.proof
    assert proof is not None
    for _ in range(50):
        stream.request(lookups_pay=False)
    assert proof.audits == 0 and watch.audits > 10
