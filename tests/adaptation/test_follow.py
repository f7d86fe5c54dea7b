"""Decisions are made before the answer, and no audit is dropped because of its outcome."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.promise_streams import (
    AGREEMENT,
    CONFIDENCE,
    LEVELS,
    RIGHT,
    TRUE,
    WRONG,
    World,
    X,
    composition,
)
from gati.adaptation.background import Failures
from gati.adaptation.deployments import Deployments
from gati.adaptation.follow import FollowUp
from gati.adaptation.recall_records import Looked
from gati.adaptation.renewal import Promise, RenewalOutcome
from gati.adaptation.samples import Samples
from gati.adaptation.settings import Audit
from gati.adaptation.shadow import Ticket
from gati.adaptation.succession import Succession
from gati.engine.exits import Prediction
from gati.guard.auditor import NO_ANSWER, Probed
from gati.guard.draws import Draws
from gati.guard.standing import Standing
from gati.versions.lineage import Lineage
from gati.versions.repository import ModelRepository


class Waiting:
    """A queue of `limit` places whose jobs are done when the test says so."""

    threaded = True

    def __init__(self, limit: int) -> None:
        self.limit, self.reserved, self.late = limit, 0, False
        self.jobs: deque[Callable[[], None]] = deque()

    def reserve(self) -> bool:
        free = len(self.jobs) + self.reserved < self.limit
        self.reserved += free
        return free

    def release(self) -> None:
        self.reserved -= 1

    def submit(self, job: Callable[[], None], *, reserved: bool = False) -> bool:
        self.reserved -= reserved
        self.jobs.append(job)
        return True

    def wait(self, deadline_s: float) -> bool:
        return not self.jobs

    def close(self, deadline_s: float) -> None:
        self.jobs.clear()


class Requests:
    """Requests whose answers the test chooses, all of them drawn to be audited."""

    def __init__(self, limit: int = 100, *, audits: float = 1.0, path: Path | None = None) -> None:
        self.queue, self.audits = Waiting(limit), list[Audit]()
        self.changes: list[str] = []
        lock = threading.RLock()
        self.world = World(np.random.default_rng(0))
        self.succession = Succession(
            self.world,  # type: ignore[arg-type]
            Promise(AGREEMENT, CONFIDENCE),
            Standing(1.0 - CONFIDENCE, path),
            lock,
            tell=lambda kind, *_: self.changes.append(kind),
            on_serving=lambda _: None,
            figures=lambda _: composition(0),
        )
        self.follow = FollowUp(
            Draws(audits, seed=0),
            self.succession,
            Samples(10, 1e9),
            self.world,  # type: ignore[arg-type]
            self.queue,
            lock,
            exact=True,
            recall=None,
            on_audit=self.audits.append,
        )

    def __call__(self, prediction: Prediction) -> None:
        decided = self.follow.decide(0.0, lookups_pay=True)
        given = prediction if decided.lookups else TRUE
        self.follow.answered(Ticket(X, 1, 0.0, "", given), decided, None)

    def settle(self) -> None:
        while self.queue.jobs:
            self.queue.jobs.popleft()()

    @property
    def counted(self) -> tuple[int, int]:
        watch = self.succession.serving.watch
        return watch.audits, watch.losses


@pytest.mark.parametrize("answer", [RIGHT, WRONG, TRUE], ids=["agrees", "disagrees", "misses"])
def test_what_finds_no_room_is_left_out_whatever_it_would_show(answer: Prediction) -> None:
    """Audits of hits were dropped where the queue was full, those of misses counted as agreed."""
    requests = Requests(limit=3)
    for _ in range(20):
        requests(answer)
    requests.settle()
    assert requests.counted[0] == 3 and requests.follow.auditor.left_out == 17


def test_while_audits_are_late_the_reference_answers_and_nothing_else_delays_them() -> None:
    """On a busy machine audits waited for a minute, and wrong answers were given all the while."""
    requests = Requests()
    requests.succession.take(RenewalOutcome("activated", requests.world.version(1), ""))
    for _ in range(40):
        requests(WRONG)
    requests.queue.late = True
    for _ in range(40):
        decided = requests.follow.decide(0.0, lookups_pay=True)
        assert requests.follow.late and not (decided.lookups or decided.recalls or decided.looked_at)
        requests.follow.answered(Ticket(X, 1, 0.0, "", TRUE), decided, None)
    requests.settle()
    assert requests.changes == ["probation", "alarm"] and not requests.succession.may_hit


def test_as_soon_as_late_audits_are_made_caches_answer_again() -> None:
    requests = Requests()
    for late in (True, False):
        requests.queue.late = late
        decided = requests.follow.decide(0.0, lookups_pay=True)
        assert decided.lookups is not late
        requests.follow.answered(Ticket(X, 1, 0.0, "", TRUE if late else RIGHT), decided, None)
    requests.settle()
    assert requests.counted == (1, 0) and requests.follow.auditor.audits == 1


def test_what_is_lost_when_the_process_ends_is_lost_whatever_it_would_show() -> None:
    """The audit of a miss costs nothing, and yet it waits for those of the hits before it."""
    requests = Requests()
    for answer in (WRONG, TRUE, TRUE, RIGHT, TRUE):
        requests(answer)
    assert requests.counted == (0, 0)
    for _ in range(2):
        requests.queue.jobs.popleft()()
    assert requests.counted == (2, 1)
    requests.queue.close(0.0)  # killed here
    assert requests.counted == (2, 1)


def test_what_is_audited_later_is_the_input_of_the_request_though_its_buffer_is_used_again() -> None:
    """The reference answered what was in it by then, and memory gave that answer to inputs like the first."""
    requests, seen, buffer = Requests(), list[float](), torch.zeros(1, 1)

    def reference(x: torch.Tensor) -> Prediction:
        seen.append(float(x))
        return TRUE

    requests.world.reference = reference  # type: ignore[method-assign]
    for number in range(3):
        decided = requests.follow.decide(0.0, lookups_pay=True)
        requests.follow.answered(Ticket(buffer.fill_(number), 1, 0.0, "", RIGHT), decided, None)
    requests.settle()
    assert seen == [0.0, 1.0, 2.0]


def test_what_memory_says_of_a_request_decides_what_it_proves() -> None:
    requests = Requests()
    requests.succession.serving.watch.revoke()
    nothing = Looked("gate", np.empty(0, dtype=np.float32), None, confident=False, known=False, intents=())
    proof = requests.succession.serving.watch.proof
    for looked in (nothing, nothing._replace(repeated=True), nothing._replace(new_scene=True)):
        decided = requests.follow.decide(0.0, lookups_pay=True, looked=looked)
        requests.follow.answered(Ticket(X, 1, 0.0, "", TRUE, looked), decided, None)
    requests.settle()
    assert proof is not None and proof.audits == 1


def test_where_the_reference_fails_early_answers_count_as_wrong() -> None:
    """Audits of misses need none: they were counted alone, and nothing ever stopped the caches."""
    requests = Requests()

    def reference(x: Any) -> Prediction:
        raise MemoryError

    requests.world.reference = reference  # type: ignore[method-assign]
    for answer in (RIGHT, TRUE) * 3:
        requests(answer)
        with suppress(MemoryError):  # as the background does
            requests.settle()
    assert requests.counted == (6, 3) and requests.follow.auditor.losses == 3
    while requests.succession.may_hit:
        requests(RIGHT)
        with suppress(MemoryError):
            requests.settle()
    assert requests.changes == ["alarm"]


@pytest.mark.parametrize("settings", [True, False])
def test_a_version_on_trial_that_fails_hides_nothing_of_the_one_that_serves(settings: bool) -> None:
    """All audits were lost with the lookups that failed: the guard was blind, and the trial went on."""
    requests = Requests()
    requests.world.wrong[1] = (0.0, 0.0, 0.0)
    version = requests.world.version(1)
    requests.succession.take(
        RenewalOutcome("activated", version if settings else version._replace(settings=()), "")
    )

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError

    requests.world.probe = requests.world.caches = fails  # type: ignore[method-assign]
    for _ in range(20):
        requests(RIGHT)
        requests(WRONG)
        requests.settle()
        if requests.succession.trial is None or not requests.succession.may_hit:
            break
    assert requests.follow.auditor.losses == requests.follow.auditor.audits / 2 > 0
    trial = requests.succession.trial
    assert trial is not None and trial.watch.proof is not None
    assert trial.watch.proof.losses == trial.watch.proof.audits > 0


def test_looser_settings_are_not_proven_by_what_a_stricter_one_answers() -> None:
    requests = Requests()
    said = [Probed(0, "block", True), *[Probed(1, "block", False)] * (LEVELS - 1)]
    requests.world.probe = lambda version: lambda x, base: said  # type: ignore[method-assign]
    requests.succession.take(RenewalOutcome("activated", requests.world.version(1), ""))
    prove(requests)
    serving = requests.succession.serving
    assert (serving.version.number, serving.level) == (1, 1)
    proof = serving.watch.proof
    assert proof is not None
    before = proof.audits
    for _ in range(50):
        requests(RIGHT)
        requests.settle()
    assert proof.audits == proof.losses == before + 50
    assert serving.watch.losses == 0


def test_audits_of_before_an_alarm_prove_nothing_after_it() -> None:
    requests = Requests(limit=1000)
    for _ in range(100):
        requests(WRONG)
    for _ in range(300):
        requests(RIGHT)  # answered before the alarm, compared after it
    requests.settle()
    proof = requests.succession.serving.watch.proof
    assert requests.changes == ["alarm"] and proof is not None and proof.audits == 0


def test_audits_of_one_version_say_nothing_about_another() -> None:
    requests = Requests(limit=1000)
    tried = requests.world.version(1)
    requests.world.wrong[1] = (0.0, 0.0, 0.0)
    requests.succession.take(RenewalOutcome("activated", tried, ""))
    waiting = [WRONG] * 3
    while requests.succession.trial is not None:
        requests(RIGHT)
        requests.settle()
        if waiting and requests.succession.trial is not None:
            requests(waiting.pop())  # of the old version, settled when the new one serves
    assert requests.succession.serving.deployed.number == 1
    assert requests.counted == (0, 0), "what the version on trial proved is not what it answered"
    requests.settle()
    assert requests.counted[1] == 0


def test_a_version_on_trial_is_looked_up_in_the_shadow_and_never_answers() -> None:
    requests = Requests()
    requests.world.wrong[1] = (1.0, 1.0, 1.0)
    requests.succession.take(RenewalOutcome("activated", requests.world.version(1), ""))
    for _ in range(50):
        requests(RIGHT)
    requests.settle()
    given = [audit for audit in requests.audits if not audit.shadow]
    shadow = [audit for audit in requests.audits if audit.shadow]
    assert len(given) == len(shadow) == 50
    assert {audit.version for audit in given} == {0} and {audit.version for audit in shadow} == {1}
    assert not any(audit.agreed for audit in shadow) and requests.follow.auditor.losses == 0
    assert requests.succession.serving.deployed.number == 0 and requests.succession.may_hit


@pytest.mark.parametrize("sampled", [True, False])
def test_a_request_that_could_not_be_answered_gives_its_place_back(sampled: bool) -> None:
    requests = Requests(limit=1, audits=0.0 if sampled else 1.0)
    for _ in range(3):
        decided = requests.follow.decide(float(sampled), lookups_pay=True)
        assert decided.looked_at
        requests.follow.unanswered(Ticket(X, 1, 0.0, "", NO_ANSWER), decided)
        requests.settle()
        assert requests.queue.reserved == 0
    requests(RIGHT)
    assert requests.follow.auditor.left_out == 0 and requests.counted == (0, 0)
    assert requests.follow.auditor.audits == 0


@pytest.mark.parametrize("fails", ["the engine", "and the reference"])
def test_a_request_that_could_not_be_answered_judges_what_is_on_trial(fails: str) -> None:
    """If the engine fails for what is hard, a version on trial was judged by what is easy."""
    requests = Requests()
    requests.world.wrong[1] = (1.0, 1.0, 1.0)
    requests.succession.take(RenewalOutcome("activated", requests.world.version(1), ""))

    def reference(x: Any) -> Prediction:
        raise MemoryError

    if fails != "the engine":
        requests.world.reference = reference  # type: ignore[method-assign]
    trial = requests.succession.trial
    assert trial is not None and trial.watch.proof is not None
    for count in range(1, 6):
        requests.follow.unanswered(
            Ticket(X, 1, 0.0, "", NO_ANSWER), requests.follow.decide(0.0, lookups_pay=True)
        )
        with suppress(MemoryError):  # as the background does
            requests.settle()
        assert trial.watch.proof.losses == count
    assert requests.counted == (0, 0) and requests.follow.auditor.audits == 0
    assert trial.compared == 0, "what the version that serves would have taken is not known"


def test_a_version_that_is_brought_back_has_to_prove_itself_like_any_other() -> None:
    """It was tried at full delta on samples of overlapping windows, again and again until it passed."""
    requests = Requests()
    version = requests.world.version(1)
    requests.world.wrong[1] = (0.0, 0.0, 0.0)
    requests.succession.take(RenewalOutcome("activated", version, ""))
    prove(requests)
    requests.succession.take(RenewalOutcome("activated", requests.world.version(2), ""))
    requests.world.wrong[2] = (0.0, 0.0, 0.0)
    prove(requests)
    spent = requests.succession.standing.spending.used
    requests.succession.take(RenewalOutcome("reused", version, ""))
    assert requests.succession.serving.deployed.number == 2 and requests.succession.trial is not None
    assert not requests.succession.trial.watch.may_hit
    assert requests.succession.standing.spending.used == spent + 1


def test_a_certificate_says_nothing_of_what_memory_leaves() -> None:
    """Nor do alarms on all requests, counted late, speak of it; they count as soon as memory stops."""
    requests = Requests()
    succession, of_all = requests.succession, requests.succession.serving.of_all
    assert succession.may_hit
    succession.follow_memory(0.5)
    assert succession.after_memory and not succession.may_hit
    while of_all.may_hit:
        of_all.audited(agreed=False)
    assert "alarm" not in requests.changes
    succession.follow_memory(None)
    assert not succession.after_memory and not succession.may_hit


def test_a_version_that_was_not_proven_is_remembered_and_the_librarys_caches_are_not() -> None:
    """Each attempt costs a share of delta."""
    requests = Requests()
    requests.world.wrong |= {1: (1.0, 1.0, 1.0)}
    requests.succession.take(RenewalOutcome("activated", requests.world.version(1), ""))
    while requests.succession.trial is not None:
        requests(RIGHT)
        requests.settle()
        requests.succession.give_up()
    requests.succession.on_given_up(requests.succession.first)
    assert requests.succession.unproven == {1}


def test_a_version_that_has_left_is_let_go_with_its_engines() -> None:
    requests = Requests()
    posts = []
    for number in (1, 2, 3):
        requests.world.wrong[number] = (0.0, 0.0, 0.0)
        requests.succession.take(RenewalOutcome("activated", requests.world.version(number), ""))
        prove(requests)
        posts.append(weakref.ref(requests.succession.serving))
    requests.settle()
    gc.collect()
    assert [post() is not None for post in posts] == [False, False, True]


def test_a_version_that_answers_again_meanwhile_is_not_on_trial_too() -> None:
    """Each of its audits would have counted twice."""
    requests = Requests()
    succession = requests.succession
    succession.take(RenewalOutcome("reused", succession.serving.version, ""))
    assert succession.trial is None and requests.changes == ["kept"]


@pytest.mark.parametrize("library_answers", [True, False])
def test_an_alarm_calls_for_a_search_though_the_library_answers_instead(library_answers: bool) -> None:
    """The library's caches took over, the alarm was forgotten, and nothing was retrained."""
    requests = Requests()
    succession, first = requests.succession, requests.succession.first
    first.nested = library_answers
    requests.world.wrong[1] = (0.0, 0.0, 0.0)
    succession.take(RenewalOutcome("activated", requests.world.version(1), ""))
    prove(requests)
    stopped = succession.serving
    assert stopped is not first and not succession.alarmed
    while stopped.may_hit:
        requests(WRONG)
        requests.settle()
    assert succession.may_hit is library_answers and succession.alarmed
    succession.take(RenewalOutcome("kept", succession.serving.version, ""))
    assert succession.alarmed is not library_answers  # lest a search follow every other one


def prove(requests: Requests) -> None:
    while requests.succession.trial is not None:
        requests(RIGHT)
        requests.settle()


def test_a_restart_brings_nothing_back_that_had_been_replaced(tmp_path: Path) -> None:
    """Version 2 was proven, then 1 was brought back in its place; a restart let 2 take over at once."""
    made = [SimpleNamespace(version=number, lineage=Lineage("0" * 64)) for number in (1, 2)]
    repository: Any = SimpleNamespace(versions=lambda model: made, history=lambda model: [made[1], made[0]])
    served: Any = SimpleNamespace(composition=composition(0))
    deployments = Deployments(served, repository, "model", tmp_path)
    deployments.open = World(np.random.default_rng(0)).version  # type: ignore[method-assign]
    assert deployments.newest() == (None, "")
    repository.history = lambda model: [made[0]]
    newest, _ = deployments.newest()
    assert newest is not None and newest.number == 2


def test_compositions_keep_their_own_active_versions(tmp_path: Path) -> None:
    """They share a folder: one began anew whenever another one had activated a version since."""
    repository, world = ModelRepository(tmp_path / "versions"), World(np.random.default_rng(0))

    def of(name: str, backend: str = "torch") -> Deployments:
        served: Any = SimpleNamespace(composition=replace(composition(0), name=name, backend=backend))
        deployments = Deployments(served, repository, "model", tmp_path)
        deployments.open = world.version  # type: ignore[method-assign]
        return deployments

    def activate(deployments: Deployments) -> int:
        number = repository.publish("model", {"a": b"1"}, Lineage("0" * 64, tags={"made_for": "no one"}))
        deployments.activate(world.version(number))
        return number

    def active(deployments: Deployments) -> int:
        return deployments.active()[0].number

    first = repository.publish("model", {"a": b"1"}, Lineage("0" * 64))
    repository.activate("model", first)  # by an earlier Gati: anybody's
    default, careful, compiled = of("default"), of("careful"), of("default", "torch-compile")
    assert active(default) == active(compiled) == first
    own, other = activate(default), activate(compiled)
    assert (active(default), active(compiled)) == (own, other) and active(careful) == first
    newer = [activate(default) for _ in range(25)][-1]
    assert (active(default), active(compiled)) == (newer, other)
    assert repository.version("model", other), "it is not collected either"
    careful.activate(world.version(newer))
    activate(default)
    assert active(careful) == newer
    repository.rollback("model")
    assert active(default) == active(compiled) == newer, "what an operator does counts for all"


def test_a_version_of_another_composition_is_not_taken_for_the_newest(tmp_path: Path) -> None:
    repository, world = ModelRepository(tmp_path / "versions"), World(np.random.default_rng(0))
    for name in ("default on torch", "default on torch-compile"):
        repository.publish("model", {"a": b"1"}, Lineage("0" * 64, tags={"made_for": name}))
    served: Any = SimpleNamespace(composition=composition(0))
    deployments = Deployments(served, repository, "model", tmp_path)
    deployments.open = world.version  # type: ignore[method-assign]
    newest, _ = deployments.newest()
    assert newest is not None and newest.number == 1


@pytest.mark.parametrize(
    ("activated_s", "scene", "is_taken_up"),
    [(999.0, True, True), (None, True, True), (1001.0, True, False), (999.0, False, False)],
)
def test_what_was_published_and_not_activated_is_taken_up_by_the_next_process(
    tmp_path: Path, activated_s: float | None, scene: bool, is_taken_up: bool
) -> None:
    """Not what a user has published without activating it, nor what a rollback has left behind."""
    created = datetime.fromtimestamp(1000.0, UTC).isoformat()
    made = SimpleNamespace(version=3, created=created, lineage=Lineage("0" * 64))
    entry = SimpleNamespace(version=2, time_s=activated_s, made_for="")
    repository: Any = SimpleNamespace(
        versions=lambda model: [made],
        version=lambda model, number: made,
        history=lambda model: [] if activated_s is None else [entry],
    )
    served: Any = SimpleNamespace(composition=composition(0))
    deployments = Deployments(served, repository, "model", tmp_path)
    opened = World(np.random.default_rng(0)).version(3)
    signature = np.zeros(4, np.float32) if scene else None
    deployments.open = lambda number: opened._replace(signature=signature)  # type: ignore[method-assign]
    assert (deployments.unfinished() is not None) is is_taken_up


def test_a_trial_that_goes_on_after_a_restart_has_to_be_faster_still(tmp_path: Path) -> None:
    """What was proven of it, but slow, took over at once, for nothing had been compared yet."""
    first = Requests(path=tmp_path / "standing.json")
    first.world.wrong[1] = (0.0, 0.0, 0.0)
    first.succession.take(RenewalOutcome("activated", first.world.version(1), ""))
    trial = first.succession.trial
    assert trial is not None
    trial.compared, trial._serving_ms = 1, -1e9  # whatever it takes, it is slower
    while not trial.may_hit:
        first(RIGHT)
        first.settle()
    first.succession.standing.save()
    again = Requests(path=tmp_path / "standing.json")
    again.world.wrong[1] = (0.0, 0.0, 0.0)
    again.world.newest = lambda: (again.world.version(1), "")  # type: ignore[method-assign]
    again.succession.begin(0)
    again.succession.give_up()
    assert again.succession.trial is not None and again.succession.trial.may_hit
    assert again.succession.serving.deployed.number == 0
    for _ in range(2):
        again(RIGHT)
        again.settle()
        again.succession.give_up()  # as after every request
    assert again.succession.trial is None and again.succession.serving.deployed.number == 1


@pytest.mark.parametrize("why_not", ["", "it is damaged"])
def test_where_the_active_version_is_stopped_the_first_one_needs_a_proof_of_this_time(
    tmp_path: Path, why_not: str
) -> None:
    """The library's own caches were stopped and proven again; then another version served."""
    first = Requests(path=tmp_path / "standing.json")
    while first.succession.may_hit:
        first(WRONG)
        first.settle()
    first.world.wrong[0] = (0.0, 0.0, 0.0)
    while not first.succession.may_hit:
        first(RIGHT)
        first.settle()
    assert first.succession.serving.watch.proven_on
    first.succession.standing.save()
    again = Requests(path=tmp_path / "standing.json")
    again.world.activated = 1  # of which nothing is proven
    if why_not:
        again.world.active = lambda: (again.world.version(0), why_not)  # type: ignore[method-assign]
    again.succession.begin(0)
    assert again.succession.serving.deployed.number == 0 and not again.succession.may_hit
    once_more = Requests(path=tmp_path / "standing.json")
    once_more.succession.begin(0)
    assert not once_more.succession.may_hit, "and a further restart gives it nothing back"


def test_a_version_that_others_rolled_back_to_has_to_prove_itself_anew(tmp_path: Path) -> None:
    """Its proof was of what was asked before version 2 came; a restart believed it for up to a week."""
    path = tmp_path / "standing.json"

    def begun(active: int) -> Requests:
        requests = Requests(path=path)
        requests.world.wrong |= {1: (0.0, 0.0, 0.0), 2: (0.0, 0.0, 0.0)}
        requests.world.activated = active
        requests.succession.begin(0)
        return requests

    requests = begun(0)
    for number in (1, 2):
        requests.succession.take(RenewalOutcome("activated", requests.world.version(number), ""))
        prove(requests)
    requests.succession.save()
    assert begun(2).succession.serving.version.number == 2, "a mere restart asks for no proof"
    rolled_back = begun(1)
    trial = rolled_back.succession.trial
    assert rolled_back.succession.serving.version.number == 0
    assert trial is not None and trial.version.number == 1 and not trial.may_hit
    prove(rolled_back)
    rolled_back.succession.save()
    assert begun(1).succession.serving.version.number == 1


def _without_certificate(path: Path) -> Requests:
    """Requests to the library's caches, whose certificate the guard has taken away."""
    requests = Requests(path=path)
    requests.world.wrong |= {0: (0.0, 0.0, 0.0), 1: (0.0, 0.0, 0.0)}
    requests.succession.begin(0)
    while requests.succession.may_hit:
        requests(WRONG)
        requests.settle()
    return requests


def test_the_librarys_caches_that_answer_again_have_to_prove_themselves_anew(tmp_path: Path) -> None:
    """Their proof was of what was asked before version 1 came, which is not in the repository any more."""
    path = tmp_path / "standing.json"
    requests = _without_certificate(path)
    while not requests.succession.may_hit:
        requests(RIGHT)
        requests.settle()
    requests.succession.save()
    again = Requests(path=path)
    again.succession.begin(0)
    assert again.succession.may_hit, "a mere restart asks for no proof"
    requests.succession.take(RenewalOutcome("activated", requests.world.version(1), ""))
    prove(requests)
    assert requests.succession.serving.version.number == 1
    requests.succession.save()
    once_more = Requests(path=path)
    once_more.succession.begin(0)
    assert once_more.succession.serving.version.number == 0 and not once_more.succession.may_hit


def test_the_librarys_caches_that_answered_last_go_on_after_a_restart(tmp_path: Path) -> None:
    """They had replaced version 1, with which a restart begins; then nothing answered early."""
    path = tmp_path / "standing.json"
    requests = _without_certificate(path)
    requests.succession.take(RenewalOutcome("activated", requests.world.version(1), ""))
    prove(requests)
    requests.succession.take(RenewalOutcome("reused", requests.world.version(0), ""))
    prove(requests)
    assert requests.succession.serving.version.number == 0 and requests.succession.may_hit
    requests.succession.save()
    again = Requests(path=path)
    again.world.activated = 1
    again.succession.begin(0)
    trial = again.succession.trial
    assert again.succession.serving.version.number == 0 and again.succession.may_hit
    assert trial is not None and trial.version.number == 1 and not trial.may_hit


def test_a_version_that_was_given_up_is_not_tried_again_by_its_earlier_proof(tmp_path: Path) -> None:
    """It was proven, but slow; after a restart it could take over by what was asked long before."""
    path = tmp_path / "standing.json"
    requests = Requests(path=path)
    requests.world.wrong |= {0: (0.0, 0.0, 0.0), 1: (0.0, 0.0, 0.0)}
    requests.succession.begin(0)
    requests.succession.take(RenewalOutcome("activated", requests.world.version(1), ""))
    trial = requests.succession.trial
    assert trial is not None
    trial.compared, trial._serving_ms = 1, -1e9  # whatever it takes, it is slower
    while requests.succession.trial is not None:
        requests(RIGHT)
        requests.settle()
        requests.succession.give_up()
    assert trial.may_hit and requests.succession.serving.version.number == 0
    requests.succession.save()
    again = Requests(path=path)
    again.world.newest = lambda: (again.world.version(1), "")  # type: ignore[method-assign]
    again.succession.begin(0)
    assert again.succession.trial is not None and not again.succession.trial.may_hit


def test_a_setting_that_cannot_be_opened_for_any_reason_is_tried_again() -> None:
    """Of errors that are not Gati's own, it was "being opened" for ever."""
    requests = Requests()
    requests.world.wrong[1] = (0.0, 0.0, 0.0)
    requests.succession.take(RenewalOutcome("activated", requests.world.version(1), ""))

    def fails(number: int, level: int) -> Any:
        raise RuntimeError("out of memory")

    at, requests.world.at = requests.world.at, fails  # type: ignore[method-assign]
    while requests.succession.trial is not None:
        requests(RIGHT)
        requests.settle()
    assert requests.changes == ["probation", "failed"]
    requests.world.at = at  # type: ignore[method-assign]
    requests.succession.take(RenewalOutcome("activated", requests.world.version(1), ""))
    requests(RIGHT)
    requests.settle()
    requests.succession.give_up()  # as after every request
    assert requests.succession.serving.deployed.number == 1 and requests.succession.may_hit


def test_a_setting_is_opened_later_if_there_is_no_room_for_it_now() -> None:
    """It was marked as being opened for ever, and never answered."""
    requests, jobs = Requests(), list[Callable[[], None]]()
    room = False

    def leave(job: Callable[[], None]) -> bool:
        jobs.extend([job] if room else ())
        return room

    succession = requests.succession
    succession._leave = leave
    post = succession.serving
    succession.begin_opening(post, 1, "loosened", "")
    post.open.clear()
    succession.settle()
    assert not jobs and not post.opening and not post.may_hit
    room = True
    succession.give_up()  # as after every request
    succession.give_up()
    [job] = jobs
    job()
    assert post.may_hit


def test_failures_of_every_request_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Where a version's lookups failed, the log of a day was millions of tracebacks."""
    now_s = [0.0]
    failures = Failures(lambda: now_s[0])
    for second in range(150):
        now_s[0] = float(second)
        try:
            raise ValueError("broken")
        except ValueError:
            failures.tell("lookups failed")
    more = " (59 more since the last such line)"
    assert [each.getMessage() for each in caplog.records] == [
        "lookups failed",
        *[f"lookups failed{more}"] * 2,
    ]
    assert all(each.exc_info is not None for each in caplog.records)
