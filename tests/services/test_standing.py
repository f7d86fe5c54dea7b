"""The recorded state of a version, and its file."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from gati.composition.certificate import ClassCounts
from gati.composition.walk import certify
from gati.errors import LibraryError
from gati.guard.posts import Post
from gati.guard.standing import identity_of
from gati.guard.watch import Watch
from services.inference.counts import Counts
from services.inference.following import Answering, Following, Shared
from services.inference.keeping import ServedStanding, open_standing
from services.inference.line import Line
from services.inference.loaded import Stands, stands
from services.inference.roster import LastRun, ServedRoster
from services.inference.settings import InferenceSettings
from tests.engine.served import composed, exit_at

CERTIFICATE = certify([(0, 1500)], 0.97, 0.05)
PROOF_S = 0.3  # least duration of a proof


def settings(**known: Any) -> InferenceSettings:
    return InferenceSettings.model_validate({"name": "small", "proof_s": PROOF_S, **known})


def said(
    watch: Watch | None,
    *,
    retrained: bool = False,
    by_class: tuple[ClassCounts, ...] = (),
    of_rest: Watch | None = None,
    **known: Any,
) -> Stands:
    standings, counts = ServedStanding(None), Counts()
    queue: Any = None
    shared = Shared(settings(**known), counts, Line(counts), standings, None)
    certificate = replace(CERTIFICATE, by_class=by_class)
    composition = replace(composed("0" * 64, (exit_at(0, 0.5),)), certificate=certificate)
    engine: Any = None
    answering = Answering("a", engine, queue, composition)
    post = None if watch is None else Post(answering, watch)
    if watch is not None and of_rest is not None:
        post = Post(answering, watch, rest=lambda: of_rest, is_after_memory=lambda: True)
    return stands(composition, Following(answering, post, queue, shared), retrained=retrained)


def watch_of(*, proven: bool) -> Watch:
    return ServedStanding(None).watch("a", 0.97, proven=proven)


def test_next_to_memory_it_is_said_of_which_requests_something_is_proven() -> None:
    of_all, of_rest = watch_of(proven=True), watch_of(proven=False)
    waits = said(of_all, of_rest=of_rest)
    assert of_rest.proof is not None
    needed = of_rest.proof.required
    assert (waits.state, waits.certified) == ("probation", False)
    progress = f"0 of about {needed} audits of requests that memory leaves"
    assert waits.sentence == f"on probation: {progress}; the base model answers"
    while not of_rest.may_hit:
        of_rest.audited(agreed=True)
    proven = said(of_all, of_rest=of_rest)
    assert proven.state == "serving" and not proven.certified
    assert proven.sentence.endswith(f"proven on {needed} audits of requests that memory leaves")


def test_what_is_promised_is_said_with_what_it_rests_on() -> None:
    certified = said(watch_of(proven=True))
    promise = "at least 97 % of answers are the base model's"
    assert certified == ("serving", 0.97, f"{promise}, certified with 95 % confidence", True)

    watch = watch_of(proven=False)
    for _ in range(57):
        watch.audited(agreed=True)
    assert watch.proof is not None
    needed = watch.proof.required
    assert said(watch) == (
        "probation", None, f"on probation: 57 of about {needed} audits; the base model answers", False,
    )  # fmt: skip
    assert said(watch, audit_budget=0.0, unguarded=True).state == "unguarded"
    while not watch.may_hit:
        watch.audited(agreed=True)
    assert said(watch, retrained=True) == ("serving", 0.97, f"{promise}, proven on {needed} audits", False)
    by_class = said(watch, retrained=True, by_class=(ClassCounts("a", 0, 1500),)).sentence
    assert by_class == f"{promise}, over all classes together, proven on {needed} audits"

    while watch.may_hit:
        watch.audited(agreed=False)
    watch.audited(agreed=False)
    state, agreement, sentence, rests = said(watch, audit_budget=0.0, unguarded=True)
    assert (state, agreement, rests) == ("stopped", None, False), "told so or not, what was stopped stays so"
    assert sentence.startswith("stopped by the guard: 1 of about ") and "1 of them disagree" in sentence
    assert said(None) == ("serving", None, "every answer is the base model's", False)


def recorded(standings: ServedStanding) -> None:
    """Wait as whoever tells of a change of state does."""
    asyncio.run(standings.recorded())


def stopped(path: Path) -> None:
    """Leave a file in which the caches `a` are stopped."""
    standings = ServedStanding(path)
    watch = standings.of("a", 0.9, proven=True, delta=0.05, on_event=lambda event: None)
    while watch.may_hit:
        watch.audited(agreed=False)
    recorded(standings)
    assert json.loads(path.read_text())["versions"]["a"]["state"] == "stopped", "before anybody acts on it"


def state_of(standings: ServedStanding) -> str:
    return standings.of("a", 0.9, proven=True, delta=0.05, on_event=lambda event: None).state


def test_who_finds_another_process_at_the_file_reads_it_and_keeps_to_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = settings(state=tmp_path)
    stopped(tmp_path / "small.json")
    first = open_standing(chosen)
    with caplog.at_level(logging.WARNING):
        second = open_standing(chosen)
    assert [vars(record)["reason"] for record in caplog.records] == ["another process uses it"]
    before = (tmp_path / "small.json").read_bytes()
    assert state_of(second) == "stopped"
    second.save()
    assert (tmp_path / "small.json").read_bytes() == before
    assert state_of(first) == "stopped"
    first.close()
    third = open_standing(chosen)
    assert state_of(third) == "stopped"
    third.close()


def test_a_file_system_without_locks_is_no_process_at_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for that process for ever, and set shares of delta aside for it."""

    def refused(file: Any, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refused)
    with caplog.at_level(logging.WARNING):
        standing = open_standing(settings(state=tmp_path))
    reasons = [vars(record)["reason"] for record in caplog.records]
    assert reasons == [f"cannot lock {tmp_path / 'small.lock'} (No locks available)"]
    assert standing.path is None and standing.spending.used == 0
    standing.close()


@pytest.mark.slow
def test_what_the_guard_of_one_replica_stops_no_other_frees(tmp_path: Path) -> None:
    """A replica that is started, or that serves already, has the same caches prove themselves again.

    One that served noticed it at its own next audit, which may be hours later.
    """
    running = open_standing(settings(state=tmp_path, replica=1, replicas=3))
    assert state_of(running) == "serving"
    stopped(tmp_path / "small.json")
    added = open_standing(settings(state=tmp_path, replica=2, replicas=3))
    assert state_of(added) == "probation", "a new replica believes the certificate"

    asyncio.run(running.look())
    assert state_of(running) == "probation"
    again = running.of("a", 0.9, proven=True, delta=0.05, on_event=lambda event: None)
    begun_s = time.monotonic()
    while not again.may_hit:
        again.audited(agreed=True)
    assert time.monotonic() - begun_s >= PROOF_S
    asyncio.run(running.look())
    assert again.may_hit and again.proven_on, "its own proof counts, whatever has become of the other"
    for each in (running, added):
        each.close()


@pytest.mark.slow
def test_what_one_replica_withdraws_no_other_answers(tmp_path: Path) -> None:
    """The looser settings of a composition; the stricter ones that the other still answers by stay."""

    def of(standing: ServedStanding) -> Watch:
        return standing.of("a", 0.9, proven=True, settings=3, delta=0.05, on_event=lambda event: None)

    first = open_standing(settings(state=tmp_path, replicas=2))
    watch = of(first)
    while watch.level == 3:
        watch.audited(agreed=[True, True, False])
    first.save()
    recorded(first)
    second = open_standing(settings(state=tmp_path, replica=1, replicas=2))
    other = of(second)
    assert (other.level, other.state, other.settings) == (2, "serving", 3)
    while other.level == 2:
        other.audited(agreed=[True] * 3)
    assert other.proven_on, "its own proof counts"
    for each in (first, second):
        each.close()


def test_caches_that_are_served_with_two_promises_have_a_watch_for_each(tmp_path: Path) -> None:
    """The second took the place of the first in the file, which forgot what its guard stopped.

    So a restart let it answer again, and other replicas never heard of it.
    """
    path = tmp_path / "small.json"
    standing = ServedStanding(path)

    def of(agreement: float, standing: ServedStanding = standing) -> Watch:
        return standing.of("a", agreement, proven=True, delta=0.05, on_event=lambda event: None)

    strict, loose = of(0.99), of(0.9)
    assert strict is of(0.99) and loose is of(0.9)
    while strict.may_hit:
        strict.audited(agreed=False)
    assert loose.may_hit, "less was promised of it"
    loose.audited(agreed=True)
    standing.watch_only({"a"})
    standing.close()
    again = ServedStanding(path)
    assert (of(0.9, again).audits, of(0.9, again).may_hit) == (1, True)
    assert of(0.99, again).state == "stopped"
    again.close()
    other = ServedStanding(None, others=[path])
    assert of(0.99, other).state == of(0.9, other).state == "probation"
    gone = ServedStanding(path)
    of(0.9, gone)
    gone.watch_only(())
    assert not gone._watches and not gone._shared


def test_caches_that_are_loaded_again_with_another_promise_keep_what_their_guard_stopped(
    tmp_path: Path,
) -> None:
    standing = ServedStanding(tmp_path / "small.json")
    for agreement, state in ((0.99, "serving"), (0.9, "probation")):
        watch = standing.of("a", agreement, proven=True, delta=0.05, on_event=lambda event: None)
        assert watch.state == state
        while watch.may_hit:
            watch.audited(agreed=False)
        standing.watch_only(())
    assert set(standing.names) == {"a", "a at 0.9"}
    standing.close()


def promised(standing: ServedStanding, agreement: float, settings: int = 1) -> Watch:
    return standing.of(
        "a", agreement, proven=True, settings=settings, delta=0.05, on_event=lambda event: None
    )


@pytest.mark.parametrize("agreement", [0.99, 0.9])
def test_a_new_promise_of_caches_that_are_stopped_must_be_proven(tmp_path: Path, agreement: float) -> None:
    """They served with it at once, and others in their place after a restart, also with the old promise."""
    standing = ServedStanding(tmp_path / "small.json")
    stopped = promised(standing, 0.97)
    while stopped.may_hit:
        stopped.audited(agreed=False)
    assert not promised(standing, agreement).may_hit and promised(standing, 0.97) is stopped
    standing.close()

    again = ServedStanding(tmp_path / "small.json")
    first = promised(again, agreement)
    prove_one(first)
    assert promised(again, 0.97).state == "stopped"
    again.close()
    last = ServedStanding(tmp_path / "small.json")
    assert promised(last, agreement).may_hit, "it was heeded once"
    assert promised(last, 0.97).state == "stopped"
    last.close()


def test_after_a_restart_with_another_promise_what_was_stopped_stays_so(tmp_path: Path) -> None:
    """The watch of the new promise was written in the place of the old one, which then served at once."""
    path = tmp_path / "small.json"
    standing = ServedStanding(path)
    stopped = promised(standing, 0.97)
    while stopped.may_hit:
        stopped.audited(agreed=False)
    standing.close()
    again = ServedStanding(path)
    assert promised(again, 0.9).state == "probation" and promised(again, 0.97).state == "stopped"
    again.close()


@pytest.mark.parametrize("settings", [1, 2])
def test_what_breaks_a_promise_breaks_stricter_ones(tmp_path: Path, settings: int) -> None:
    """Of the same caches, loaded here, in another replica, or unloaded meanwhile; looser ones go on."""
    here = ServedStanding(tmp_path / "small.json")
    there = ServedStanding(tmp_path / "other.json", others=[tmp_path / "small.json"])
    unloaded = ServedStanding(tmp_path / "third.json", others=[tmp_path / "small.json"])
    for standing in (here, there, unloaded):
        for agreement in (0.97, 0.9, 0.99):
            assert promised(standing, agreement, settings if agreement == 0.99 else 1).may_hit
    unloaded.watch_only(())
    heeded: list[Watch] = []
    here.on_heeded = heeded.append
    middle = promised(here, 0.97)
    while middle.may_hit:
        middle.audited(agreed=False)
    recorded(here)
    asyncio.run(there.look())
    asyncio.run(unloaded.look())
    for standing in (here, there, unloaded):
        assert [promised(standing, each, 1).may_hit for each in (0.97, 0.9)] == [False, True]
        assert promised(standing, 0.99, settings).state == "probation"
    assert heeded == [promised(here, 0.99, settings)]
    for standing in (here, there, unloaded):
        standing.close()


def test_a_file_of_another_replica_is_read_again_only_once_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "other.json"
    stopped(path)
    read, load = [], json.load

    def noted(file: Any) -> Any:
        read.append(file.name)
        return load(file)

    monkeypatch.setattr("services.inference.withdrawn.json.load", noted)
    standing = ServedStanding(None, others=[path])
    for _ in range(3):
        asyncio.run(standing.look())
    assert len(read) == 1 and state_of(standing) == "probation"
    stopped(tmp_path / "new.json")
    (tmp_path / "new.json").replace(path)
    asyncio.run(standing.look())
    assert len(read) == 2
    standing.close()


def test_files_of_replicas_that_do_not_exist_delay_no_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `replicas_max = 1000`, what another one stopped went on for 50 s, however few were running."""
    paths = [tmp_path / f"{number}.json" for number in range(1000)]
    standing = ServedStanding(None, others=paths)
    assert state_of(standing) == "serving"
    stopped(paths[-1])
    asyncio.run(standing.look())
    assert state_of(standing) == "probation"

    for path in paths[:100]:
        path.write_bytes(paths[-1].read_bytes())
    reads, read = [], standing._others.read

    def noted() -> Any:
        reads.append(1)
        return read()

    monkeypatch.setattr(standing._others, "read", noted)
    for _ in range(13):  # one that finds 101 files, and every sixth from then on
        asyncio.run(standing.look())
    assert len(reads) == 3
    standing.close()


def test_caches_that_are_unloaded_are_kept_in_the_file_alone(tmp_path: Path) -> None:
    """Each retraining added a watch for good, which every snapshot wrote down anew."""
    standing = ServedStanding(tmp_path / "a.json")

    def of(name: str, delta: float) -> Watch:
        return standing.of(name, 0.9, proven=False, delta=delta, on_event=lambda event: None)

    served = of("served", 0.05)
    prove_one(served)
    for number in range(300):
        prove_one(of(f"tried {number}", 0.01))
        standing.watch_only({"served"})
    assert set(standing._watches) == set(standing._shared) == {"served"}
    assert standing._deltas["tried 299"] == 0.01
    again = of("tried 299", 0.05)
    assert again.may_hit and standing._deltas["tried 299"] == 0.05, "the strict one is unloaded"
    standing.close()
    kept = ServedStanding(tmp_path / "a.json").of(
        "served", 0.9, proven=False, delta=0.05, on_event=lambda event: None
    )
    assert kept.may_hit, "it was the oldest of many"


def prove_one(watch: Watch) -> None:
    while not watch.may_hit:
        watch.audited(agreed=True)


class Replicas:
    """Two replicas in one folder, each started anew whenever it is asked."""

    def __init__(self, folder: Path, *, certified: bool = True) -> None:
        self._folder, self._certified = folder, certified

    def start(self, replica: int) -> tuple[ServedStanding, Watch]:
        other = self._folder / f"{1 - replica}.json"
        standing = ServedStanding(self._folder / f"{replica}.json", replicas=2, others=[other])
        watch = standing.of(
            "a", 0.9, proven=self._certified, settings=3, delta=0.025, on_event=lambda event: None
        )
        return standing, watch

    def withdraws(self, left: int) -> None:
        """The guard of the first one withdraws all but so many settings, which were all proven again."""
        standing, watch = self.start(0)
        prove(watch)
        while watch.level > left:
            watch.audited(agreed=[at < left for at in range(3)])
        standing.close()

    def level(self) -> int:
        standing, watch = self.start(1)
        standing.close()
        return watch.level

    def proves(self) -> None:
        standing, watch = self.start(1)
        prove(watch)
        standing.close()


def prove(watch: Watch) -> None:
    while watch.level < 3:
        watch.audited(agreed=[True] * 3)


@pytest.mark.parametrize("certified", [True, False])
def test_what_a_replica_has_proven_anew_stays_proven_until_another_withdraws_again(
    tmp_path: Path, certified: bool
) -> None:
    """Each restart withdrew it once more, and another stop of the same caches none."""
    both = Replicas(tmp_path, certified=certified)
    both.proves()
    for left in (0, 0, 2, 1):
        both.withdraws(left)
        assert both.level() == left
        both.proves()
        assert both.level() == both.level() == 3


def test_a_stop_that_a_replica_has_heeded_without_a_certificate_is_not_undone_by_one(tmp_path: Path) -> None:
    both = Replicas(tmp_path, certified=False)
    assert both.level() == 0
    both.withdraws(0)
    assert both.level() == 0
    assert Replicas(tmp_path).level() == 0


def test_a_stop_in_a_file_that_was_lost_and_begun_anew_is_heeded(tmp_path: Path) -> None:
    both = Replicas(tmp_path)
    for _ in range(2):
        both.withdraws(0)
        both.level()
    both.proves()
    (tmp_path / "0.json").unlink()
    both.withdraws(1)
    assert both.level() == 1


def test_a_file_of_another_replica_that_cannot_be_read_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says which caches must not answer, and was ignored in silence."""
    (tmp_path / "small@1.json").write_text("[]")
    standing = open_standing(settings(state=tmp_path, replicas=2))
    for _ in range(3):
        asyncio.run(standing.look())
    standing.close()
    [told] = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert vars(told)["file"].endswith("small@1.json") and vars(told)["reason"].startswith("TypeError: list")


@pytest.mark.parametrize("count", [1, 3])
def test_a_damaged_file_of_one_replica_stops_no_other(tmp_path: Path, count: int) -> None:
    """Its versions are on probation, and were taken for such that its guard had stopped."""

    def state(replica: int) -> str:
        standing = open_standing(settings(state=tmp_path, replica=replica, replicas=2))
        watch = standing.of("a", 0.9, proven=True, settings=count, delta=0.05, on_event=lambda event: None)
        standing.close()
        return watch.state

    assert [state(0), state(1)] == ["serving", "serving"]
    (tmp_path / "small.json").write_text("{half")
    assert [state(0), state(1), state(1)] == ["probation", "serving", "serving"]


def test_a_revoked_certificate_of_one_replica_stops_no_other_though_it_is_certified_again(
    tmp_path: Path,
) -> None:
    for proven in (True, False, True):
        first = ServedStanding(tmp_path / "a.json")
        first.of("a", 0.9, proven=proven, settings=3, delta=0.05, on_event=lambda event: None)
        first.close()
    other = ServedStanding(None, others=[tmp_path / "a.json"])
    assert other.of("a", 0.9, proven=True, settings=3, delta=0.05, on_event=lambda event: None).level == 3


@pytest.mark.parametrize("entry", ["certified", "damaged", "huge"])
def test_no_other_version_in_the_file_of_a_replica_hides_what_its_guard_stopped(
    tmp_path: Path, entry: str
) -> None:
    """A certified version with one setting, which serves, made the whole file unreadable."""
    path = tmp_path / "other.json"
    standing = ServedStanding(path)
    for name in "0a":
        watch = standing.of(name, 0.9, proven=True, delta=0.05, on_event=lambda event: None)
    while watch.may_hit:
        watch.audited(agreed=False)
    standing.close()
    document = json.loads(path.read_text())
    assert list(document["versions"]) == ["0", "a"]
    if entry != "certified":
        document["versions"]["0"] = [] if entry == "damaged" else {"withdrawals": [[math.inf, 0]]}
    path.write_text(json.dumps(document))
    assert state_of(ServedStanding(None, others=[path])) == "probation"


def test_what_the_guard_of_a_replica_withdrew_is_read_from_older_files_too(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    standing = ServedStanding(path)
    watch = standing.of("a", 0.9, proven=True, settings=3, delta=0.05, on_event=lambda event: None)
    while watch.level == 3:
        watch.audited(agreed=[True, True, False])
    standing.close()
    document = json.loads(path.read_text())
    assert document["versions"]["a"].pop("withdrawn_to") == 2
    path.write_text(json.dumps(document))
    other = ServedStanding(None, others=[path])
    assert other.of("a", 0.9, proven=True, settings=3, delta=0.05, on_event=lambda event: None).level == 2


class Run:
    """A service from its start: versions that are but watches, and which of them answers."""

    def __init__(self, path: Path, *others: Path) -> None:
        self.standings = ServedStanding(path, others=others)
        self.last = LastRun(self.standings)
        default = self.post("default", proven=True)
        nothing: Any = None
        self.roster = ServedRoster(
            default,
            settings=nothing,
            last_run=self.last,
            on_change=lambda post: None,
            on_takeover=lambda post: None,
        )
        self.standings.on_heeded = self.roster.restricted

    def post(self, name: str, *, proven: bool = False) -> Post[Answering]:
        chosen, nothing = replace(composed("0" * 64, (exit_at(0, 0.5),)), created=name), cast(Any, None)
        found: list[Post[Answering]] = []
        watch = self.standings.of(
            identity_of(chosen),
            0.9,
            proven=proven,
            delta=0.05,
            on_event=lambda event: self.roster.heard(found[0], event),
        )
        found.append(Post(Answering(name, nothing, nothing, chosen), watch))
        return found[0]

    def activate(self, post: Post[Answering]) -> bool:
        return self.roster.activate(post, lambda: post.may_hit)

    def proven(self, name: str) -> Post[Answering]:
        """A version that waits, and serves since it was proven."""
        post = self.post(name)
        assert not self.activate(post)
        while not post.may_hit:
            assert self.roster.trial is post
            post.watch.audited(agreed=True)
        assert self.roster.serving is post and self.roster.trial is None
        return post


def test_a_version_that_is_brought_back_proves_itself_again_and_what_served_last_goes_on(
    tmp_path: Path,
) -> None:
    """What was proven of it was proven of other requests; only a restart goes on where it was."""
    path = tmp_path / "small.json"
    run = Run(path)
    first, second = run.proven("first"), run.proven("second")
    spent = run.standings.spending.used
    assert not run.activate(first) and first.watch.state == "probation"
    assert run.standings.spending.used == spent + 1 and run.roster.serving is second
    first.watch.audited(agreed=True)
    assert not run.activate(first) and first.watch.proof is not None and first.watch.proof.audits == 1
    run.standings.close()

    again = Run(path)
    assert again.activate(again.post("second")), "the one that served goes on"
    waits = again.post("first")
    assert not again.activate(waits) and waits.watch.proof is not None and waits.watch.proof.audits == 1
    while not waits.may_hit:
        waits.watch.audited(agreed=True)
    assert again.roster.serving is waits
    third = again.post("second")
    assert not again.activate(third), "the last run counts no more"
    again.standings.close()


def proven_again(path: Path) -> Run:
    """The library's own caches were stopped, and audits have proven them since."""
    run = Run(path)
    default = run.roster.serving
    while default.may_hit:
        default.watch.audited(agreed=False)
    while not default.may_hit:
        default.watch.audited(agreed=True)
    return run


def test_what_was_stopped_and_proven_again_serves_after_a_restart_only_if_it_did_before(
    tmp_path: Path,
) -> None:
    path = tmp_path / "small.json"
    proven_again(path).standings.close()
    again = Run(path)
    assert again.roster.serving.may_hit, "it served last"
    again.proven("other")
    again.standings.close()
    later = Run(path)
    assert not later.roster.serving.may_hit, "its proof is of the time before the other one"
    assert later.activate(later.post("other"))
    later.standings.close()

    path, nothing = tmp_path / "other.json", cast(Any, None)
    run = proven_again(path)
    base = Post(Answering("base", nothing, nothing), Watch(0.5, spend=lambda: 0.5, proven=True))
    assert run.activate(base)
    run.standings.close()
    assert not Run(path).roster.serving.may_hit, "nor where the base model alone has answered"


def test_a_library_that_cannot_be_written_is_said_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "standing").write_text("in the way of a folder", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        standings = open_standing(settings(library=tmp_path))
        assert state_of(standings) == "serving"
        standings.save()
    assert [record.message for record in caplog.records] == [
        "the state of versions is kept in memory only; set `state` to a folder"
    ]


def test_a_library_that_was_removed_does_not_come_back_with_nothing_but_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next one, moved to its place, ended up inside."""
    library = tmp_path / "mine"
    library.mkdir()
    standings = open_standing(settings(library=library))
    watch = standings.of("a", 0.9, proven=True, delta=0.05, on_event=lambda event: None)
    recorded(standings)
    assert (library / "standing" / "small.json").is_file()
    shutil.rmtree(library / "standing")
    standings.save()
    recorded(standings)
    assert (library / "standing" / "small.json").is_file(), "what is stopped must not be forgotten"
    shutil.rmtree(library)
    with caplog.at_level(logging.WARNING):
        while watch.may_hit:
            watch.audited(agreed=False)
        assert not standings.is_owned, "nor does memory write next to that file"
        standings.close()
    with pytest.raises(LibraryError, match="no cache library"):  # as a process does that is restarted
        open_standing(settings(library=library))
    assert not library.exists()
    assert [record.message for record in caplog.records] == ["its folder is gone: state is kept in memory"]


def test_what_the_state_of_a_library_says_that_was_moved_there_stays(tmp_path: Path) -> None:
    """After a rollback below a running server, the caches that had been stopped before served again."""
    library, earlier = tmp_path / "mine", tmp_path / "earlier"
    for each in (library, earlier):
        (each / "standing").mkdir(parents=True)
    stopped(earlier / "standing" / "small.json")
    standings = open_standing(settings(library=library))
    standings.of("b", 0.9, proven=True, delta=0.05, on_event=lambda event: None)
    recorded(standings)
    library.rename(tmp_path / "later")
    earlier.rename(library)
    (library / "standing" / "small.lock").touch()  # of the process that served it
    standings.save()
    standings.close()
    again = open_standing(settings(library=library))
    assert state_of(again) == "stopped"
    again.close()


def test_a_state_folder_of_another_user_is_no_reason_to_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ended with a traceback, again and again. What the file says of stops is not known."""

    def refused(path: Path, *_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    stopped(tmp_path / "small.json")
    for name in ("stat", "open"):
        monkeypatch.setattr(Path, name, refused)
    with caplog.at_level(logging.WARNING):
        standings = open_standing(settings(state=tmp_path))
        assert state_of(standings) == "probation"
    monkeypatch.undo()
    kept, unknown = (record.getMessage() for record in caplog.records)
    assert kept == "the state of versions is kept in memory only; set `state` to a folder"
    assert unknown.startswith("the state of versions is unknown; they are on probation: ")
    assert "Permission denied" in unknown
    standings.close()


def test_a_disk_that_fails_is_said_once_and_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kept" / "small.json"
    standings = ServedStanding(path)
    watch = standings.of("a", 0.9, proven=True, delta=0.05, on_event=lambda event: None)
    recorded(standings)
    path.unlink()
    path.mkdir()  # nothing can be renamed to it
    with caplog.at_level(logging.ERROR):
        while watch.may_hit:
            watch.audited(agreed=False)
        standings.save()
        recorded(standings)
    assert len(caplog.records) == 1 and watch.state == "stopped"
    path.rmdir()
    standings.save()
    recorded(standings)
    assert state_of(ServedStanding(path)) == "stopped"


def test_a_certificate_that_was_revoked_counts_for_no_version_with_the_same_caches() -> None:
    """They were certified again while the first version served on: the certificate failed."""
    standings = ServedStanding(None)

    def of(*, proven: bool, delta: float = 0.05) -> Watch:
        return standings.of("a", 0.9, proven=proven, delta=delta, on_event=lambda event: None)

    watch = of(proven=True)
    assert of(proven=True) is watch and watch.may_hit
    assert of(proven=False) is watch and watch.state == "probation"


def test_versions_with_equal_caches_are_proven_for_the_one_that_asks_for_most(tmp_path: Path) -> None:
    """Audits had proven them with 95 % confidence; loaded again with 99 %, they answered on."""
    path = tmp_path / "small.json"
    standings = ServedStanding(path)

    def of(delta: float, standings: ServedStanding = standings) -> Watch:
        return standings.of("a", 0.9, proven=False, delta=delta, on_event=lambda event: None)

    watch = of(0.05)
    while not watch.may_hit:
        watch.audited(agreed=True)
    assert of(0.05).may_hit
    assert of(0.01) is watch and not watch.may_hit
    assert watch.proof is not None and watch.proof.delta == pytest.approx(0.01 / (2 * 3))
    while not of(0.05).may_hit:
        watch.audited(agreed=True)
    assert of(0.01) is watch and watch.may_hit
    standings.close()
    assert of(0.01, ServedStanding(path)).may_hit and not of(0.001, ServedStanding(path)).may_hit


def test_a_certificate_that_was_given_since_counts_for_versions_that_are_loaded(tmp_path: Path) -> None:
    """It counted after a restart only; nor may one that is less sure than a loaded version asks."""
    path = tmp_path / "small.json"
    standings = ServedStanding(path)

    def of(*, proven: bool, delta: float = 0.05, standings: ServedStanding = standings) -> Watch:
        return standings.of("a", 0.9, proven=proven, delta=delta, on_event=lambda event: None)

    watch = of(proven=False)
    assert of(proven=True, delta=0.1) is watch and not watch.may_hit
    assert of(proven=True) is watch and watch.may_hit and not watch.proven_on
    recorded(standings)
    assert json.loads(path.read_text())["versions"]["a"]["state"] == "serving"
    while watch.may_hit:
        watch.audited(agreed=False)
    assert not of(proven=True).may_hit, "what a guard has withdrawn is not certified again"
    standings.close()
    assert not of(proven=True, standings=ServedStanding(path)).may_hit


def test_no_more_withdrawals_of_others_are_noted_than_versions_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of each version that ever was loaded were, for good, and written with every snapshot."""
    monkeypatch.setattr("gati.guard.standing._MOST_VERSIONS", 3)
    names = [f"tried {number}" for number in range(20)]
    other, path = tmp_path / "other.json", tmp_path / "own.json"
    other.write_text(json.dumps({"versions": {name: {"state": "stopped"} for name in names}}))
    standing = ServedStanding(path, others=[other])
    for name in names:
        standing.of(name, 0.9, proven=False, delta=0.05, on_event=lambda event: None)
        standing.watch_only(())
    standing.close()
    document = json.loads(path.read_text())
    assert set(document["parts"]["heeded"]["state"]) == set(document["versions"]) == set(names[-3:])


def test_a_proof_that_has_not_begun_is_for_the_version_that_asks_for_most() -> None:
    standings = ServedStanding(None)
    for delta in (0.05, 0.001):
        proof = standings.of("a", 0.9, proven=False, delta=delta, on_event=lambda event: None).proof
        assert proof is not None and proof.delta < delta
