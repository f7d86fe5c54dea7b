"""The auditor of streams and served models: which requests it looks at, counts, and lets answer."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.engine.exits import BASE, Prediction
from gati.guard.auditor import Auditor, Given, Probed
from gati.guard.draws import Draws
from gati.guard.posts import Post
from gati.guard.proof import Proof, Spending
from gati.guard.standing import Standing
from gati.guard.watch import Event, Watch
from tests.guard.named import RIGHT, TRUE, WRONG, NamedVersions, said

AGREEMENT, DELTA = 0.8, 0.1
ALPHA = 1.0 - AGREEMENT
LEVELS = 3


class Names(NamedVersions):
    """`told` has what happens to versions, too."""

    def on_serving(self, post: Post[str]) -> None:
        self.told.append("serving")

    def on_promoted(self, post: Post[str]) -> None:
        self.told.append("promoted")

    def on_fell_back(self, post: Post[str]) -> None:
        self.told.append("fell back")

    def on_given_up(self, post: Post[str]) -> None:
        self.told.append("given up")


class Stream:
    """Requests to a certified version `a`, with `b` of several settings on trial; over restarts."""

    def __init__(self, path: Path | None, seed: int, *, audits: float = 0.7) -> None:
        self._path, self._draws = path, Draws(audits, seed=seed)
        self.auditor = Auditor[str]()
        self.released = 0
        self.start()

    def start(self) -> None:
        self.standing = Standing(DELTA, self._path)
        self.serving = Post("a", self._watch("a", proven=True, settings=1))
        self.roster = Names(self.serving)
        settings: Any = (None,) * LEVELS
        self.tried = Post("b", self._watch("b", proven=False, settings=LEVELS), settings)
        self.roster.trial = self.tried
        self.auditor.compare = self.roster.compare

    def _watch(self, name: str, *, proven: bool, settings: int) -> Watch:
        def heard(event: Event) -> None:
            self.released += name == "b" and event.state == "serving" and not event.tightened
            self.roster.heard(self.tried if name == "b" else self.serving, event)

        return self.standing.watch(name, AGREEMENT, proven=proven, settings=settings, on_event=heard)

    def request(self, lost: bool, *, room: bool = True) -> bool:
        """One request, for which caches on trial would be wrong or not; whether it was looked at."""
        roster = self.roster
        decided = self.auditor.decide(roster.serving, roster.trial, self._draws, room=lambda: room)
        answer = Given(RIGHT if decided.lookups else TRUE)
        needs = self.auditor.needs(decided, answer)
        if needs is None:
            return False
        probed = [Probed(int(lost), "block", not lost)] * LEVELS
        own = () if self.auditor.own(decided, answer, TRUE) is None else probed
        self.auditor.settle(decided, answer, TRUE, [(*each, probed) for each in needs.shadows], own)
        return True


# Hostile orders -------------------------------------------------------------------------------------------


def never_better(stream: Stream, random: np.random.Generator) -> float:
    return ALPHA


def when_it_is_nearly_proven(stream: Stream, random: np.random.Generator) -> float:
    """As bad as it is allowed to be to look good, and much worse once the evidence is high."""
    proof = stream.tried.watch.proof
    return 3.0 * ALPHA if proof is not None and proof.log_evidence > 1.0 else ALPHA


def bursts_after_losses(stream: Stream, random: np.random.Generator) -> float:
    proof = stream.tried.watch.proof
    return 1.0 if proof is not None and proof.losses % 4 == 1 else ALPHA


Order = Callable[[Stream, np.random.Generator], float]


@pytest.mark.slow
@pytest.mark.parametrize("order", [never_better, when_it_is_nearly_proven, bursts_after_losses])
@pytest.mark.parametrize("room", ["always", "full after losses"])
def test_nothing_unproven_is_released_more_often_than_delta(order: Order, room: str) -> None:
    """Whoever orders the requests knows all of the past, the audits included, but no draw to come.

    Every request is a loss with at least the tolerated probability, given the past: then no more than a share
    delta of streams may ever release anything, however often proofs are begun anew.
    """
    streams, broken = 80, 0
    for seed in range(streams):
        random = np.random.default_rng(seed)
        stream, full = Stream(None, seed), False
        for _ in range(200):
            lost = random.random() < order(stream, random)
            looked = stream.request(lost, room=not full)
            full = room != "always" and looked and lost  # the next one finds no place
            if stream.tried.hopeless:
                stream.tried.watch.prove_anew()
        broken += stream.released > 0
    assert broken / streams <= DELTA + 2.0 * math.sqrt(DELTA * (1.0 - DELTA) / streams)


def test_the_simulation_would_show_a_choice_by_the_outcome() -> None:
    """Were there no room for losses only, most streams would release what they must not."""
    broken = 0
    for seed in range(20):
        random, stream = np.random.default_rng(seed), Stream(None, seed)
        for _ in range(200):
            lost = bool(random.random() < ALPHA)
            stream.request(lost, room=not lost)
        broken += stream.released > 0
    assert broken > 15


@pytest.mark.slow
def test_restarts_at_chosen_moments_prove_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed and started again whenever the evidence is low: what was lost stays lost, and costs delta."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a kill loses nothing that the system has
    streams, broken = 40, 0
    for seed in range(streams):
        random = np.random.default_rng(seed)
        stream = Stream(tmp_path / f"{seed}.json", seed)
        released = 0
        for _ in range(200):
            stream.request(bool(random.random() < ALPHA))
            proof = stream.tried.watch.proof
            if proof is not None and proof.log_evidence < -1.5 and random.random() < 0.2:
                stream.standing.save()
                stream.start()
        released += stream.released
        broken += released > 0
    assert broken / streams <= DELTA + 2.0 * math.sqrt(DELTA * (1.0 - DELTA) / streams)


def test_what_keeps_the_promise_is_released_and_takes_over() -> None:
    stream = Stream(None, 0)
    for _ in range(200):
        stream.request(lost=False)
    assert stream.roster.serving is stream.tried and "promoted" in stream.roster.told
    assert stream.tried.deployed == f"b-{LEVELS}" and stream.tried.level == LEVELS


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60), st.integers(0, 2**16))
def test_what_is_looked_at_is_decided_before_the_outcome(
    requests: list[tuple[bool, bool]], seed: int
) -> None:
    """Two streams with the same draws and places, and opposite outcomes, look at the same requests.

    Up to the first change of what may answer, which outcomes are there to make.
    """
    one, other = Stream(None, seed), Stream(None, seed)
    for lost, room in requests:
        looked = one.request(lost, room=room), other.request(not lost, room=room)
        if one.roster.told or other.roster.told:
            return
        assert looked[0] == looked[1]


def test_an_audit_of_an_earlier_epoch_counts_for_nothing() -> None:
    stream = Stream(None, 0, audits=1.0)
    decided = stream.auditor.decide(stream.serving, stream.tried, Draws(1.0, seed=0), room=lambda: True)
    needs = stream.auditor.needs(decided, Given(WRONG))
    assert needs is not None
    while stream.serving.may_hit:
        stream.serving.watch.audited(agreed=False)
    proof = stream.serving.watch.proof
    stream.auditor.settle(decided, Given(WRONG), TRUE, [])
    assert proof is not None and proof.audits == 0 and stream.auditor.losses == 1


def test_a_lookup_of_before_a_proof_began_anew_counts_for_nothing() -> None:
    stream = Stream(None, 0, audits=1.0)
    watch = stream.tried.watch
    decided = stream.auditor.decide(stream.serving, stream.tried, Draws(1.0, seed=0), room=lambda: True)
    watch.audited(agreed=[False] * LEVELS)
    watch.prove_anew()
    found = [(*each, [Probed(0, "block", agreed=True)] * LEVELS) for each in decided.shadows]
    stream.auditor.settle(decided, Given(RIGHT), TRUE, found)
    assert len(found) == 1 and watch.proof is not None and watch.proof.audits == 0


def test_in_reduced_precision_what_was_not_looked_up_is_judged_too() -> None:
    """While lookups rest, the engine's own network answers, and that is not the reference."""
    for exact, audits in ((False, 1), (True, 0)):
        stream, auditor = Stream(None, 0), Auditor[str](exact=exact)
        decided = auditor.decide(
            stream.serving, None, Draws(1.0, seed=0), room=lambda: True, lookups_pay=False
        )
        assert decided.may_hit and not decided.lookups
        auditor.settle(decided, Given(said(1, BASE)), TRUE, [])
        assert (stream.serving.watch.audits, stream.serving.watch.losses) == (audits, audits)


def proven_by_audits(agreement: float = AGREEMENT) -> Post[str]:
    watch = Watch(agreement, spend=Spending(DELTA).next, proven=False)
    while not watch.may_hit:
        watch.audited(agreed=True)
    return Post("retrained", watch)


def test_in_a_new_scene_the_reference_answers_what_audits_have_proven_elsewhere() -> None:
    """A certificate is no proof of other requests, and unguarded caches were never proven."""
    post, auditor = proven_by_audits(), Auditor[str]()
    draws = Draws(0.0, seed=0)

    def decided(post: Post[str], **options: Any) -> Any:
        return auditor.decide(post, None, draws, room=lambda: True, new_scene=True, **options)

    doubted = decided(post)
    assert not doubted.may_hit and not doubted.lookups and not doubted.alone and doubted.doubted
    assert [each for each, _ in doubted.shadows] == [post]
    for usual in (decided(Stream(None, 0).serving), decided(post, unguarded=True)):
        assert usual.lookups and not usual.doubted
    assert auditor.decide(post, None, draws, room=lambda: True).lookups


@pytest.mark.parametrize("doubted", [True, False])
def test_a_version_that_knows_nothing_of_a_new_scene_is_stopped_by_its_first_requests(doubted: bool) -> None:
    given, stopped = [], 0
    for seed in range(20):
        post, auditor, draws = proven_by_audits(0.97), Auditor[str](), Draws(0.05, seed=seed)
        random = np.random.default_rng(seed)
        wrong = 0
        for request in range(60):
            decided = auditor.decide(post, None, draws, room=lambda: True, new_scene=doubted and request < 20)
            lost = bool(random.random() < 0.6)
            answer = (WRONG if lost else RIGHT) if decided.lookups else TRUE
            wrong += answer is WRONG
            shadows = [(*each, [Probed(int(lost), "block", not lost)]) for each in decided.shadows]
            auditor.settle(decided, Given(answer), TRUE, shadows)
        given.append(wrong)
        stopped += not post.may_hit
    assert (np.mean(given) < 0.5 and stopped == 20) == doubted


def test_a_trial_that_comes_to_nothing_is_given_up() -> None:
    stream = Stream(None, 0, audits=1.0)
    while stream.roster.trial is not None:
        stream.request(lost=True)
        stream.roster.give_up()
    assert stream.roster.told[-2:] == ["given up", "kept"] and stream.roster.serving is stream.serving


class Proving:
    """Memory whose proof is under way, and which is asked about every request."""

    serves = False

    def __init__(self) -> None:
        self.proving: Proof | None = Proof(AGREEMENT, DELTA)
        self.tried = 0

    def learn(self, looked: Any, base: Prediction, *, drawn: bool, tried: bool = False) -> None:
        self.tried += tried


def test_many_requests_in_a_row_are_looked_at_for_a_proof_of_memory_and_then_a_share() -> None:
    memory, draws = Proving(), Draws(0.05, seed=0)
    auditor = Auditor[str](memory=memory)

    def tried(requests: int, *, room: bool = True) -> int:
        before = memory.tried
        for _ in range(requests):
            decided = auditor.decide(None, None, draws, room=lambda: room, more_samples=0.25)
            auditor.learn(decided, Given(TRUE, looked="its place"), TRUE)
        return memory.tried - before

    assert memory.proving is not None
    burst = 3 * memory.proving.required
    assert tried(20, room=False) == 0  # what there is no time for is left out, and has not been spent
    assert tried(burst) == burst
    assert 0.15 < tried(400) / 400 < 0.35
    known, memory.proving = memory.proving, None  # it has no prospects for a while
    assert tried(100) == 0
    memory.proving = known
    assert tried(100) < 50
    memory.proving = Proof(AGREEMENT, DELTA)
    assert tried(burst) == burst


def nested() -> Post[str]:
    """A certified composition of three settings, the loosest of which is open."""
    watch = Watch(AGREEMENT, spend=Spending(DELTA).next, proven=True, settings=3)
    settings: Any = (None,) * 3
    return Post("library", watch, settings, nested=True)


def test_if_the_loosest_of_nested_settings_agrees_no_other_is_looked_up() -> None:
    """All settings count the audit, whether the others were looked up or not."""
    auditor, post = Auditor[str](), nested()
    right, wrong = Given(RIGHT), Given(WRONG)
    for answer, loses in ((right, False), (Given(TRUE), False), (wrong, True)):
        decided = auditor.decide(post, None, Draws(1.0, seed=0), room=lambda: True)
        assert (auditor.own(decided, answer, TRUE) is post) == loses
        own = [Probed(0, BASE, True), Probed(1, "block", False), Probed(1, "block", False)] if loses else []
        auditor.settle(decided, answer, TRUE, [], own)
    guards = post.watch.to_json()["guards"]
    assert [(each["audits"], each["losses"]) for each in guards] == [(3, 0), (3, 1), (3, 1)]


def test_a_stricter_setting_answers_once_the_loosest_is_wrong_too_often() -> None:
    post = nested()
    roster, auditor = Names(post), Auditor[str]()
    post.watch._on_event = lambda event: roster.heard(post, event)
    while post.level == 3:
        decided = auditor.decide(post, None, Draws(1.0, seed=0), room=lambda: True)
        own = [Probed(0, BASE, True), Probed(0, BASE, True), Probed(1, "block", False)]
        auditor.settle(decided, Given(WRONG), TRUE, [], own)
    assert (post.level, post.deployed, roster.may_hit) == (2, "library-2", True)
    assert "tightened" in roster.told and "alarm" not in roster.told
    decided = auditor.decide(post, None, Draws(1.0, seed=0), room=lambda: True)
    assert decided.level == 2 and auditor.own(decided, Given(RIGHT), TRUE) is post  # the loosest is on trial


def test_the_library_answers_for_a_retrained_version_that_is_stopped() -> None:
    """As far as its own guard lets it; a composition that was activated by hand is not replaced."""
    first = nested()
    roster = Names(first)
    retrained = Post("retrained", Watch(AGREEMENT, spend=Spending(DELTA).next, proven=True))
    retrained.watch._on_event = lambda event: roster.heard(retrained, event)
    trial = Post("trial", Watch(AGREEMENT, spend=Spending(DELTA).next, proven=False))
    roster.serve(retrained)
    roster.trial = trial
    while roster.serving is retrained:
        retrained.watch.audited(agreed=False)
    assert roster.serving is first and roster.may_hit and roster.trial is trial
    assert roster.alarmed  # the caches that were stopped are still to be replaced
    assert roster.told[-2:] == ["fell back", "returned"]
    first.watch.restrict(0)
    other = Post("other", Watch(AGREEMENT, spend=Spending(DELTA).next, proven=True))
    other.watch._on_event = lambda event: roster.heard(other, event)
    roster.serve(other)
    while other.watch.may_hit:
        other.watch.audited(agreed=False)
    assert roster.serving is other and roster.alarmed


def test_one_audit_counts_once_though_two_versions_share_a_watch() -> None:
    """The same caches under two names have one proof: counted twice, half of the audits would complete it."""
    watch = Watch(AGREEMENT, spend=Spending(DELTA).next, proven=False)
    serving, trial = Post("default", watch), Post("again", watch)
    auditor = Auditor[str]()
    decided = auditor.decide(serving, trial, Draws(1.0, trials=1.0, seed=0), room=lambda: True)
    needs = auditor.needs(decided, Given(TRUE))
    assert needs is not None
    shadows = [(*each, [Probed(0, "block", True)]) for each in needs.shadows]
    auditor.settle(decided, Given(TRUE), TRUE, shadows)
    assert watch.proof is not None and watch.proof.audits == 1


@pytest.mark.parametrize("guarded", [True, False])
def test_a_request_without_a_reference_counts_once_and_only_where_audits_count(guarded: bool) -> None:
    """Without a guard, requests are looked at for samples alone, and nothing may stop the caches."""
    post = nested()
    auditor = Auditor[str](guarded=guarded)
    decided = auditor.decide(post, None, Draws(0.0, 1.0, seed=0), room=lambda: True)
    answer = Given(RIGHT)
    needs = auditor.needs(decided, answer)
    assert needs is not None and decided.drawn.sample and decided.drawn.audit == guarded
    auditor.failed(decided, answer, needs.shadows)
    assert (auditor.audits, auditor.losses) == (guarded, guarded)
    assert (post.watch.audits, post.watch.losses) == (guarded, guarded)


@pytest.mark.parametrize("drawn", [True, False], ids=["audit", "trial"])
def test_a_request_without_a_reference_is_lost_for_what_is_on_trial_and_for_guards_if_it_was_drawn(
    drawn: bool,
) -> None:
    """Where the reference fails for what is hard, versions on trial were proven by the rest."""
    post, auditor = nested(), Auditor[str]()
    trial = Post("trial", Watch(AGREEMENT, spend=Spending(DELTA).next, proven=False))
    decided = auditor.decide(
        post, trial, Draws(float(drawn), trials=1.0, seed=0), room=lambda: True, lookups_pay=drawn
    )
    needs = auditor.needs(decided, Given(TRUE))
    assert needs is not None and decided.drawn.audit == drawn
    auditor.failed(decided, Given(TRUE), needs.shadows)
    proof = trial.watch.proof
    assert proof is not None and (proof.audits, proof.losses) == (1, 1)
    assert (post.watch.audits, post.watch.losses) == (drawn, drawn)


def test_neither_memory_nor_caches_answer_while_audits_are_late() -> None:
    """What is wrong would be found too late, for as long as the processor is busy."""
    memory = Losing()
    memory.serves = True
    auditor, draws = Auditor[str](memory=memory), Draws(1.0, 1.0, trials=1.0, seed=0)
    for late in (True, False):
        for pays in (True, False):
            decided = auditor.decide(nested(), None, draws, room=lambda: True, lookups_pay=pays, late=late)
            assert (decided.may_hit, decided.looked_at) == (not late, not late)
            assert decided.recalls == (not late and not pays)


def test_while_the_base_model_answers_caches_are_proven_by_more_than_audits() -> None:
    post, auditor = (
        Post("stopped", Watch(AGREEMENT, spend=Spending(DELTA).next, proven=False)),
        Auditor[str](),
    )
    draws = Draws(0.0, trials=1.0, seed=0)
    for _ in range(50):
        decided = auditor.decide(post, None, draws, room=lambda: True)
        needs = auditor.needs(decided, Given(TRUE))
        assert needs is not None and needs.known is TRUE
        found = [(*each, [Probed(0, "block", True)]) for each in needs.shadows]
        auditor.settle(decided, Given(TRUE), TRUE, found)
        if post.may_hit:
            return
    raise AssertionError("nothing was proven")


def test_memory_learns_nothing_of_what_it_did_not_look_up() -> None:
    memory = Proving()
    auditor = Auditor[str](memory=memory)
    decided = auditor.decide(None, None, Draws(0.0, seed=0), room=lambda: True)
    for looked, learned in ((None, 0), ("its place", 1)):
        auditor.learn(decided, Given(TRUE, looked), TRUE)
        assert decided.tried and memory.tried == learned


class Losing(Proving):
    """Memory that says which audits were lost, and whether they were drawn for its guard, too."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[Any, bool]] = []

    def lost(self, looked: Any, *, drawn: bool) -> None:
        self.told.append((looked, drawn))


@pytest.mark.parametrize("drawn", [True, False], ids=["audit", "proof of memory"])
def test_an_audit_of_memory_is_lost_where_the_reference_fails(drawn: bool) -> None:
    """Where it fails for what is hard, memory was judged by the rest."""
    memory, looked = Losing(), SimpleNamespace(taken=False)
    auditor = Auditor[str](memory=memory)
    decided = auditor.decide(nested(), None, Draws(float(drawn), seed=0), room=lambda: True)
    assert decided.tried and decided.drawn.audit == drawn
    auditor.failed(decided, Given(RIGHT, looked), ())
    auditor.failed(decided, Given(RIGHT), ())  # of no place
    assert memory.told == [(looked, drawn)]


def test_in_reduced_precision_a_miss_is_not_the_reference() -> None:
    """The engine's own network would have been compared with itself."""
    for exact, proven in ((True, True), (False, True), (False, False)):
        post = Post("a", Watch(AGREEMENT, spend=Spending(DELTA).next, proven=proven))
        auditor = Auditor[str](exact=exact)
        decided = auditor.decide(post, None, Draws(1.0, seed=0), room=lambda: True)
        is_reference = exact or not proven
        assert (auditor.known(decided, Given(TRUE)) is TRUE) == is_reference


@pytest.mark.parametrize("is_nested", [True, False])
def test_an_answer_that_agrees_says_nothing_of_stricter_settings_that_may_answer_otherwise(
    is_nested: bool,
) -> None:
    """They would answer after an alarm, with guards that had not heard of what they get wrong."""
    post, auditor = nested(), Auditor[str]()
    post.nested = is_nested
    decided = auditor.decide(post, None, Draws(1.0, seed=0), room=lambda: True)
    assert decided.level == LEVELS
    assert auditor.own(decided, Given(RIGHT), TRUE) is (None if is_nested else post)


def test_what_a_setting_answered_counts_and_not_what_its_copy_says_later() -> None:
    """Another engine may say otherwise of the same input, and the guard is about answers that were given."""
    post, auditor = nested(), Auditor[str]()
    decided = auditor.decide(post, None, Draws(1.0, seed=0), room=lambda: True)
    agreeing = [Probed(0, "block", agreed=True)] * LEVELS
    auditor.settle(decided, Given(WRONG), TRUE, [], own=agreeing)
    assert (post.watch.audits, post.watch.losses) == (1, 1)


def test_samples_prove_nothing_where_nothing_is_guarded() -> None:
    post = Post("a", Watch(AGREEMENT, spend=Spending(DELTA).next, proven=False))
    auditor = Auditor[str](guarded=False)
    decided = auditor.decide(post, None, Draws(0.0, 1.0, seed=0), room=lambda: True)
    needs = auditor.needs(decided, Given(TRUE))
    assert needs is not None and needs.shadows
    probed = [Probed(0, "block", agreed=True)]
    [found] = auditor.settle(decided, Given(TRUE), TRUE, [(*each, probed) for each in needs.shadows])
    assert found.shadow and post.watch.proof is not None and post.watch.proof.audits == 0


def test_caches_that_are_fallen_back_to_are_proven_anew_and_those_on_trial_go_on() -> None:
    """The proof of the first version was of what was asked before the second one came."""

    def proven(name: str) -> Post[str]:
        post = Post(name, Watch(AGREEMENT, spend=Spending(DELTA).next, proven=False))
        while not post.may_hit:
            post.watch.audited(agreed=True)
        return post

    library = proven("library")
    library.nested = True
    roster, second, third = NamedVersions(library), proven("second"), proven("third")
    second.watch._on_event = lambda event: roster.heard(second, event)
    roster.serve(second, trial=third)
    roster.bring_back(third)
    assert third.may_hit
    roster.trial = None
    while second.may_hit:
        second.watch.audited(agreed=False)
    assert roster.serving is second and not library.may_hit and not roster.may_hit
