"""Stopped versions stay stopped, across restarts, kills and damaged files."""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gati.composition.composition import Composition, Exit, Expected
from gati.composition.walk import certify
from gati.guard.standing import Standing, identity_of, is_proven, of_rest
from gati.guard.standing_file import read_saved
from gati.types import TrialId

CERTIFICATE = certify([(20, 1500)], 0.97, 0.05)


def composition(**changes: Any) -> Composition:
    kind = "pool(8)", "maximum-probability"
    leaving = Exit(TrialId("t"), "b", 0, *kind, 0.9, "inline", 0.5, 0.99, 0.1, 8, 0.2)
    made = Composition(
        name="default", objective="exact", solver="highs", gap=0.0, alpha=None, accuracy_target=0.97,
        confidence=0.95, memory_limit_bytes=None, backend="torch", placement="inline", exits=(leaving,),
        expected=Expected(1.0, 2.0, 2.0, 0.8, 0.99, 8), certificate=CERTIFICATE, checkpoint_sha256="0" * 64,
        created="2026-01-01T00:00:00+00:00",
    )  # fmt: skip
    return replace(made, **changes)


def stop(standing: Standing, identity: str = "a") -> None:
    watch = standing.watch(identity, 0.97, proven=True)
    while watch.may_hit:
        watch.audited(agreed=False)


def test_stopped_caches_are_still_stopped_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "standing.json"
    stop(Standing(0.05, path))
    again = Standing(0.05, path)
    assert again.watch("a", 0.97, proven=True).state == "stopped"
    assert again.watch("other caches", 0.97, proven=True).state == "serving"
    assert again.spending.used == 1


def test_what_killed_processes_left_next_to_the_file_is_removed_after_a_day(tmp_path: Path) -> None:
    """The rest of the folder may be the user's."""
    old, new, *others = (
        tmp_path / f".{name}.part" for name in ("a.json.01234567", "a.json.01234568", "a.mp4", "b.89abcdef")
    )
    others[1].mkdir()
    for path in (old, new, others[0]):
        path.touch()
    for path in (old, *others):
        os.utime(path, (0, 0))
    Standing(0.05, tmp_path / "standing.json").save()
    assert {*tmp_path.iterdir()} == {new, *others, tmp_path / "standing.json"}


def test_a_process_that_is_killed_forgets_no_stop(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from gati.guard.standing import Standing
watch = Standing(0.05, Path(sys.argv[1])).watch("a", 0.97, proven=True)
while watch.may_hit:
    watch.audited(agreed=False)
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "standing.json"
    assert subprocess.run([sys.executable, "-c", program, str(path)], check=False).returncode == -9
    assert Standing(0.05, path).watch("a", 0.97, proven=True).state == "stopped"


def test_a_proof_goes_on_after_a_restart_and_is_not_paid_twice(tmp_path: Path) -> None:
    path = tmp_path / "standing.json"
    standing = Standing(0.05, path)
    watch = standing.watch("a", 0.97, proven=False)
    for _ in range(57):
        watch.audited(agreed=True)
    standing.save()
    again = Standing(0.05, path)
    resumed = again.watch("a", 0.97, proven=False)
    assert resumed.proof is not None and resumed.proof.audits == 57
    assert again.spending.used == 1 and again.spending.next() < 0.05 / 2.0


def test_evidence_is_written_every_second_and_changes_at_once(tmp_path: Path) -> None:
    path, now = tmp_path / "standing.json", [0.0]
    standing = Standing(0.05, path, clock=lambda: now[0])
    watch = standing.watch("a", 0.97, proven=False)

    def kept() -> Any:
        return json.loads(path.read_text())["versions"]["a"]

    watch.audited(agreed=True)
    assert standing.audited() is None and kept()["proof"]["audits"] == 0
    now[0] = 1.5
    snapshot = standing.audited()
    assert snapshot is not None
    standing.write(snapshot)
    assert kept()["proof"]["audits"] == 1
    while not watch.may_hit:
        watch.audited(agreed=True)
    assert kept()["state"] == "serving"
    standing.write(snapshot)  # of a thread that was slow
    assert kept()["state"] == "serving"


def test_what_was_spent_counts_where_the_rest_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "standing.json"
    path.write_text('{"format": 1, "delta": 0.05, "spent": 700, "versions": []}')
    standing = Standing(0.05, path)
    assert "field 'versions' is [], expected an object" in standing.distrusted
    assert standing.spending.used == 700


@pytest.mark.parametrize(
    "content", ["", "{", '{"format": 99, "delta": 0.05, "spent": 1, "versions": {}}', '{"format": 1}', "[]"]
)
def test_where_the_file_is_damaged_nothing_is_proven(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "standing.json"
    path.write_text(content)
    standing = Standing(0.05, path)
    assert standing.distrusted and standing.distrusted in caplog.text and str(path) in caplog.text
    assert standing.watch("a", 0.97, proven=True).state == "probation"
    assert standing.spending.next() < 0.05 / 400


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "standing.json"
    standing = Standing(0.05, path)
    path.mkdir()
    standing.save()
    assert f"cannot save the state and evidence of versions: cannot write {path}" in caplog.text


@pytest.mark.parametrize(("field", "value"), [("state", "serving"), ("certifiable", 7), ("audits", math.inf)])
def test_a_damaged_version_is_on_probation(tmp_path: Path, field: str, value: Any) -> None:
    """A number that was too large ended the process."""
    path = tmp_path / "standing.json"
    stop(Standing(0.05, path))
    document = json.loads(path.read_text())
    document["versions"]["a"][field] = value
    path.write_text(json.dumps(document).replace("Infinity", "1e999"))
    assert Standing(0.05, path).watch("a", 0.97, proven=True).state == "probation"


@pytest.mark.parametrize(
    ("where", "value"),
    [("audits", 1e999), ("heard_s", 1e999), ("heard_s", 10**400), ("delta", 10**400), ("part", 1e999)],
)
def test_a_number_that_no_file_can_have_ends_no_later_run(tmp_path: Path, where: str, value: float) -> None:
    """In a version that is not loaded: the first save raised ValueError, so no version could be loaded."""
    path = tmp_path / "standing.json"
    stop(Standing(0.05, path))
    document = json.loads(path.read_text())
    if where == "part":
        document["parts"]["other"] = {"saved_s": 0.0, "state": value}
    else:
        document["versions"]["a"][where] = value
    path.write_text(json.dumps(document).replace("Infinity", "1e999"))
    standing = Standing(0.05, path)
    assert "is damaged" in standing.distrusted
    for name in ("b", "a"):
        assert standing.watch(name, 0.97, proven=True).state == "probation"
    standing.save()
    assert set(json.loads(path.read_text())["versions"]) == {"a", "b"}


def test_a_delta_that_no_file_can_have_is_damage(tmp_path: Path) -> None:
    """It was OverflowError."""
    path = tmp_path / "standing.json"
    path.write_text(json.dumps({"format": 1, "delta": 10**400, "spent": 3, "versions": {}}))
    assert "field 'delta'" in Standing(0.05, path).distrusted


def test_another_promise_is_proven_anew_and_a_stop_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "standing.json"
    stop(Standing(0.05, path))
    assert Standing(0.05, path).watch("a", 0.9, proven=True).state == "probation"


@pytest.mark.parametrize(("settings", "left"), [(3, 2), (4, 0)])
def test_what_the_guard_withdrew_does_not_come_back_with_another_promise(
    tmp_path: Path, settings: int, left: int
) -> None:
    """Under a higher promise, the setting that broke the lower one answered at once."""
    standing = Standing(0.05, tmp_path / "standing.json")
    watch = standing.watch("a", 0.95, proven=True, settings=3)
    while watch.level == 3:
        watch.audited(agreed=[True, True, False])
    assert watch.level == 2 and watch.may_hit
    again = Standing(0.05, tmp_path / "standing.json").watch("a", 0.97, proven=True, settings=settings)
    assert (again.level, again.may_hit) == (left, left > 0)
    other = standing.watch("b", 0.99, proven=False, settings=3)
    while not other.may_hit:
        other.audited(agreed=[True, True, True])
    assert standing.watch("b", 0.97, proven=True, settings=3).level == 3, "nothing of it was withdrawn"


def test_what_was_proven_with_less_confidence_is_proven_anew(tmp_path: Path) -> None:
    path = tmp_path / "standing.json"
    standing = Standing(0.2, path)
    watch = standing.watch("retrained", 0.97, proven=False)
    while not watch.may_hit:
        watch.audited(agreed=True)
    standing.watch("certified", 0.97, proven=True)
    half = standing.watch("half", 0.97, proven=False)
    for _ in range(20):
        half.audited(agreed=True)
    later = standing.watch("later", 0.97, proven=False)
    while not later.may_hit:
        later.audited(agreed=True)
    standing.save()
    surer = Standing(0.05, path)
    assert surer.watch("retrained", 0.97, proven=False).state == "probation"
    assert surer.watch("certified", 0.97, proven=True).state == "serving"
    begun = surer.watch("half", 0.97, proven=False).proof
    assert begun is not None and begun.audits == 0 and begun.delta < 0.05
    surer.save()
    assert not Standing(0.05, path).watch("later", 0.97, proven=False).may_hit, "not watched in between"
    assert Standing(0.2, path).watch("certified", 0.97, proven=True).state == "serving"


def test_a_folder_that_cannot_be_written_does_not_keep_caches_from_stopping(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    stop(Standing(0.05, occupied / "standing.json"))


def test_a_certificate_proves_what_it_says_and_no_more() -> None:
    made = composition()
    assert is_proven(made, 0.97, 0.95) and is_proven(made, 0.95, 0.9)
    assert not is_proven(made, 0.98, 0.95) and not is_proven(made, 0.97, 0.99)
    assert not is_proven(composition(certificate=None), 0.97, 0.95)
    assert not is_proven(composition(certificate=replace(CERTIFICATE, deployed=None)), 0.97, 0.95)
    assert is_proven(composition(certificate=None, exits=()), 0.97, 0.95)
    reduced = composition(certificate=None, exits=(), backend="openvino-int8")
    assert not is_proven(reduced, 0.97, 0.95), "the network itself changes some answers"


def test_versions_that_left_are_kept_in_the_file_only(tmp_path: Path) -> None:
    path = tmp_path / "standing.json"
    standing = Standing(0.05, path)
    for name in ("a", "b", of_rest("a"), of_rest("b")):
        watch = standing.watch(name, 0.97, proven=False)
        while not watch.may_hit:
            watch.audited(agreed=True)
    left = weakref.ref(standing.watch("b", 0.97, proven=False))
    standing.watch_only({"a"})
    gc.collect()
    assert left() is None
    assert standing.watch("b", 0.97, proven=False).may_hit and standing.spending.used == 4
    standing.watch_only({"a"})
    standing.save()
    again = Standing(0.05, path)
    assert all(again.watch(name, 0.97, proven=False).may_hit for name in ("a", "b", of_rest("b")))


def test_caches_are_told_apart_by_what_they_are() -> None:
    made = composition()
    assert identity_of(made) == identity_of(composition(note="other words", certificate=None))
    changed = [
        composition(created="2026-01-02T00:00:00+00:00"),
        composition(backend="openvino"),
        composition(exits=(replace(made.exits[0], threshold=0.8),)),
    ]
    assert len({identity_of(each) for each in (made, *changed)}) == 4


# Age ------------------------------------------------------------------------------------------------------


def proven_then(path: Path, *, settings: int = 1) -> None:
    """Prove the caches `a` by audits, and leave."""
    standing = Standing(0.05, path, now=lambda: 1e9)
    watch = standing.watch("a", 0.97, proven=False, settings=settings)
    while not watch.may_hit:
        watch.audited(agreed=[True] * settings)
    standing.save()


@pytest.mark.parametrize(("later_s", "state"), [(3600.0, "serving"), (8 * 86_400.0, "probation")])
def test_what_was_proven_long_ago_is_proven_anew(tmp_path: Path, later_s: float, state: str) -> None:
    path = tmp_path / "standing.json"
    proven_then(path, settings=2)
    later = Standing(0.05, path, now=lambda: 1e9 + later_s)
    watch = later.watch("a", 0.97, proven=False, settings=2)
    assert watch.state == state and later.spending.used == 1 + (state == "probation")


@pytest.mark.parametrize("audits", [0, 1])
def test_what_is_only_written_again_is_not_heard_again(tmp_path: Path, audits: int) -> None:
    """A server without requests writes its file, too: its proofs age by their last audit."""
    path, now_s = tmp_path / "standing.json", [1e9]
    standing = Standing(0.05, path, now=lambda: now_s[0])
    watch = standing.watch("a", 0.97, proven=False)
    while not watch.may_hit:
        watch.audited(agreed=True)
    standing.save()
    for _ in range(2):
        now_s[0] += 4 * 86_400.0
        for _ in range(audits):
            watch.audited(agreed=True)
        standing.save()
    again = Standing(0.05, path, now=lambda: now_s[0]).watch("a", 0.97, proven=False)
    assert again.may_hit == (audits > 0)


def test_a_proof_that_is_as_old_as_the_future_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "standing.json"
    proven_then(path)
    assert not Standing(0.05, path, now=lambda: 1e9 - 86_400.0).watch("a", 0.97, proven=False).may_hit


def test_what_was_proven_elsewhere_is_proven_anew_whenever_it_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "standing.json"
    first = Standing(0.05, path, origin="gate")
    first.watch("b", 0.97, proven=True)
    for name in "ac":
        watch = first.watch(name, 0.97, proven=False)
        while not watch.may_hit:
            watch.audited(agreed=True)
    stopped = first.watch("d", 0.97, proven=True)
    while stopped.may_hit:
        stopped.audited(agreed=False)
    first.save()
    same = Standing(0.05, path, origin="gate")
    assert same.watch("a", 0.97, proven=False).may_hit and not same.elsewhere
    other = Standing(0.05, path, origin="yard")
    assert other.watch("b", 0.97, proven=True).may_hit and not other.elsewhere
    assert not other.watch("a", 0.97, proven=False).may_hit and other.elsewhere
    assert other.watch("d", 0.97, proven=True).state == "stopped"
    again = Standing(0.05, path, origin="yard")
    assert not again.watch("c", 0.97, proven=False).may_hit  # no run has used it since


def test_half_of_a_proof_from_elsewhere_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "standing.json"
    first = Standing(0.05, path, origin="gate")
    watch = first.watch("a", 0.97, proven=False)
    for _ in range(50):
        watch.audited(agreed=True)
    first.save()
    watch = Standing(0.05, path, origin="yard").watch("a", 0.97, proven=False)
    assert watch.proof is not None and watch.proof.audits == 0


def test_a_stop_and_a_certificate_never_age(tmp_path: Path) -> None:
    path = tmp_path / "standing.json"
    before = Standing(0.05, path, now=lambda: 1e9)
    stop(before)
    before.watch("b", 0.97, proven=True)
    before.save()
    later = Standing(0.05, path, now=lambda: 2e9)
    assert later.watch("a", 0.97, proven=True).state == "stopped"
    assert later.watch("b", 0.97, proven=True).state == "serving" and later.spending.used == 1


def test_a_stop_is_not_forgotten_for_the_many_versions_that_came_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the newest hundred were kept: then the certificate let stopped caches serve after a restart."""
    monkeypatch.setattr("gati.guard.standing._MOST_VERSIONS", 2)
    path = tmp_path / "standing.json"
    before = Standing(0.05, path)
    stop(before)
    for name in "bcde":
        before.watch(name, 0.97, proven=False)
    assert set(json.loads(path.read_text())["versions"]) == {"a", "d", "e"}
    later = Standing(0.05, path)
    later.watch("f", 0.97, proven=False)
    assert Standing(0.05, path).watch("a", 0.97, proven=True).state == "stopped"
    document = json.loads(path.read_text())
    for each in document["versions"].values():  # as an older Gati wrote it
        each.pop("certified", None)
    path.write_text(json.dumps(document))
    older = Standing(0.05, path)
    for name in "ghi":
        older.watch(name, 0.97, proven=False)
    assert Standing(0.05, path).watch("a", 0.97, proven=True).state == "stopped"


def test_caches_that_are_stopped_must_be_proven_for_another_promise_too() -> None:
    """Its own guard did nothing: other processes are not told so."""
    standing = Standing(0.05)
    stop(standing)
    other = standing.watch("a at 0.9", 0.9, proven=True, others=["a"])
    assert (other.state, other.certifiable, other.withdrawals) == ("probation", 0, ())


def test_a_stop_that_another_process_left_is_not_forgotten_for_many_versions_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gati.guard.standing._MOST_VERSIONS", 2)
    path = tmp_path / "standing.json"
    here = Standing(0.05, path)
    stop(Standing(0.05, path))
    here.take_in(read_saved(path, 0.0), lambda name, watch: None)
    for name in "bcde":
        here.watch(name, 0.97, proven=False)
    assert Standing(0.05, path).watch("a", 0.97, proven=True).state == "stopped"


def test_parts_of_others_are_kept_while_they_are_young(tmp_path: Path) -> None:
    path = tmp_path / "standing.json"
    before = Standing(0.05, path, now=lambda: 1e9)
    before.keep("memory", lambda: {"level": 2})
    before.save()
    again = Standing(0.05, path, now=lambda: 1e9 + 100.0)
    again.save()  # nobody asks for it in this run
    assert Standing(0.05, path, now=lambda: 1e9 + 200.0).kept("memory", 3600.0) == {"level": 2}
    assert Standing(0.05, path, now=lambda: 1e9 + 3601.0).kept("memory", 3600.0) is None
    assert again.kept("other", 3600.0) is None


def test_what_does_not_age_is_read_whatever_the_clock_says(tmp_path: Path) -> None:
    """A clock that was set back hid which places are known, and which version served."""
    path = tmp_path / "standing.json"
    standing = Standing(0.05, path, now=lambda: 2e9)
    standing.keep("places", lambda: ["gate"])
    standing.save()
    back = Standing(0.05, path, now=lambda: 1e9)
    assert back.kept("places", math.inf) == ["gate"] and back.kept("places", 3600.0) is None


# What is not certified any more, or not as surely, or lost --------------------------------------------------


@pytest.mark.parametrize("settings", [1, 4])
def test_a_certificate_that_was_revoked_is_not_believed_from_the_file(tmp_path: Path, settings: int) -> None:
    """`gati certify --write` could not certify the caches again: they are the same, and served on."""
    path = tmp_path / "standing.json"
    assert Standing(0.05, path).watch("a", 0.97, proven=True, settings=settings).may_hit
    again = Standing(0.05, path)
    watch = again.watch("a", 0.97, proven=False, settings=settings)
    assert (watch.state, watch.level, watch.certified, again.spending.used) == ("probation", 0, 0, 1)
    assert not json.loads(path.read_text())["versions"]["a"]["certified"]
    while not watch.may_hit:
        watch.audited(agreed=[True] * settings)
    later = Standing(0.05, path).watch("a", 0.97, proven=False, settings=settings)
    assert later.may_hit and later.proven_on, "what audits have proven does not rest on it"


def test_a_stop_outlives_the_certificate(tmp_path: Path) -> None:
    path = tmp_path / "standing.json"
    watch = Standing(0.05, path).watch("a", 0.97, proven=True, settings=2)
    while watch.level == 2:
        watch.audited(agreed=[True, False])
    assert Standing(0.05, path).watch("a", 0.97, proven=False, settings=2).level == 0
    assert json.loads(path.read_text())["versions"]["a"]["certified"], "so that it is never forgotten"
    again = Standing(0.05, path).watch("a", 0.97, proven=True, settings=2)
    assert (again.level, again.certified) == (1, 1), "the setting that was withdrawn stays so"


@pytest.mark.parametrize("why", ["revoked", "another promise", "never certified before"])
def test_what_is_certified_again_answers_at_once(tmp_path: Path, why: str) -> None:
    """It waited for audits, as if it had been stopped."""
    path = tmp_path / "standing.json"
    if why != "never certified before":
        assert Standing(0.05, path).watch("a", 0.97, proven=True, settings=3).level == 3
    promise = 0.99 if why == "another promise" else 0.97
    between = Standing(0.05, path).watch("a", promise, proven=False, settings=3)
    assert between.level == 0
    between.audited(agreed=[False] * 3)
    again = Standing(0.05, path)
    watch = again.watch("a", 0.97, proven=True, settings=3)
    assert (watch.level, watch.certified, watch.state, again.spending.used) == (3, 3, "serving", 1)


def test_what_a_guard_withdrew_without_a_certificate_is_not_certified_again(tmp_path: Path) -> None:
    path = tmp_path / "standing.json"
    watch = Standing(0.05, path).watch("a", 0.9, proven=False, settings=3)
    while watch.level < 3:
        watch.audited(agreed=[True] * 3)
    while watch.level > 1:
        watch.audited(agreed=[True, False, False])
    again = Standing(0.05, path).watch("a", 0.9, proven=True, settings=3)
    assert (again.level, again.certified) == (1, 1)
    while again.may_hit:
        again.audited(agreed=[False] * 3)
    assert Standing(0.05, path).watch("a", 0.9, proven=True, settings=3).level == 0


def test_a_certificate_gives_back_nothing_that_a_damaged_file_may_have_stopped(tmp_path: Path) -> None:
    path = tmp_path / "standing.json"
    path.write_text("{half")
    for proven in (True, False, True):
        assert Standing(0.05, path).watch("a", 0.9, proven=proven).level == 0


def test_what_was_certified_only_once_is_not_known_of_an_older_file(tmp_path: Path) -> None:
    path = tmp_path / "standing.json"
    Standing(0.05, path).watch("a", 0.9, proven=False)
    document = json.loads(path.read_text())
    del document["versions"]["a"]["certifiable"], document["versions"]["a"]["withdrawals"]
    path.write_text(json.dumps(document))
    assert Standing(0.05, path).watch("a", 0.9, proven=True).level == 0


def test_each_version_has_a_confidence_of_its_own(tmp_path: Path) -> None:
    """`gati serve` has one error probability for a model, and smaller ones for its compositions."""
    path = tmp_path / "standing.json"
    standing = Standing(0.05, path)
    for name, delta in (("a", 0.05), ("b", 0.01)):
        watch = standing.watch(name, 0.97, proven=False, delta=delta)
        while not watch.may_hit:
            watch.audited(agreed=True)
    standing.save()
    Standing(0.05, path).save()  # a run that watches neither
    surer = Standing(0.05, path)
    assert surer.watch("b", 0.97, proven=False, delta=0.01).may_hit
    watch = surer.watch("a", 0.97, proven=False, delta=0.01)
    assert watch.state == "probation" and watch.proof is not None
    assert watch.proof.delta == pytest.approx(0.01 / (3 * 4))
    document = json.loads(path.read_text())
    document["versions"]["b"]["delta"] = 0.05  # as an earlier Gati wrote it: that of the model
    path.write_text(json.dumps(document))
    assert not Standing(0.05, path).watch("b", 0.97, proven=False, delta=0.01).may_hit


def test_what_a_damaged_file_may_have_stopped_is_on_probation_in_later_runs_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Distrust lasted one run: then the certificate of a version that had been stopped counted again."""
    path = tmp_path / "standing.json"
    stop(Standing(0.05, path), "b")
    path.write_text(path.read_text()[:50])
    damaged = Standing(0.05, path)
    assert damaged.watch("a", 0.97, proven=True).state == "probation"
    reason, used = damaged.distrusted, damaged.spending.used
    for _ in range(2):
        caplog.clear()
        later = Standing(0.05, path)
        assert later.distrusted == reason and reason in caplog.text and later.spending.used == used
        later.save()
    assert later.watch("b", 0.97, proven=True).state == "probation"


def test_the_share_of_delta_of_a_proof_that_begins_anew_by_itself_is_written_at_once(tmp_path: Path) -> None:
    """It was written with the next audit after a second: a kill before that gave the share away once more."""
    path = tmp_path / "standing.json"
    standing = Standing(0.05, path, clock=lambda: 0.0)
    watch = standing.watch("a", 0.9, proven=False, settings=2)
    while not watch.level:
        watch.audited(agreed=[True, False])
    spent = standing.spending.used
    while standing.spending.used == spent:
        watch.audited(agreed=[True, False])
        assert standing.audited() is None
    assert json.loads(path.read_text())["spent"] == standing.spending.used
    standing.spending.next()  # as a proof of memory does
    assert standing.audited() is None
    assert json.loads(path.read_text())["spent"] == standing.spending.used
