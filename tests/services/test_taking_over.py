"""A process that finds its state locked by one that still drains, and takes it over once that has ended."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gati.guard import standing_file as module
from gati.guard.watch import Watch
from services.inference.keeping import ServedStanding, open_standing
from services.inference.remembering import ServedMemory
from services.inference.settings import InferenceSettings
from tests.waiting import LONG_S

AGREEMENT = 0.9


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evidence is written at each audit."""
    monkeypatch.setattr("gati.guard.standing._SAVED_EVERY_S", 0.0)


def opened(folder: Path, **known: Any) -> ServedStanding:
    told = {"name": "small", "state": folder, "proof_s": 0.0, **known}
    return open_standing(InferenceSettings.model_validate(told))


def of(
    standing: ServedStanding,
    name: str = "a",
    *,
    proven: bool = False,
    settings: int = 1,
    delta: float = 0.05,
) -> Watch:
    return standing.of(
        name, AGREEMENT, proven=proven, settings=settings, delta=delta, on_event=lambda event: None
    )


def audits(watch: Watch) -> int:
    return 0 if watch.proof is None else watch.proof.audits


def recorded(standing: ServedStanding) -> None:
    asyncio.run(standing.recorded())


def look(standing: ServedStanding) -> None:
    asyncio.run(standing.look())


def test_what_is_proven_while_another_process_drains_is_kept_once_that_has_ended(tmp_path: Path) -> None:
    """It was lost at the next restart, however long ago the other process had ended."""
    draining = opened(tmp_path)
    before = of(draining)
    for _ in range(10):
        before.audited(agreed=True)
    draining.save()
    recorded(draining)
    started = opened(tmp_path)
    watch = of(started)
    for _ in range(10):
        watch.audited(agreed=True)
    look(started)
    assert not started.is_owned
    draining.close()
    watch.audited(agreed=True)
    look(started)
    assert started.is_owned
    started.close()
    again = opened(tmp_path)
    assert again.is_owned and audits(of(again)) == 11, "those of the proof with more audits"
    again.close()


def test_who_ends_before_an_audit_takes_the_file_over_at_its_end(tmp_path: Path) -> None:
    draining = opened(tmp_path)
    started = opened(tmp_path)
    of(started).audited(agreed=True)
    draining.close()
    started.close()
    again = opened(tmp_path)
    assert audits(of(again)) == 1
    again.close()


@pytest.mark.parametrize("when", ["while it drains", "at its end"])
def test_what_the_draining_process_stops_is_stopped(tmp_path: Path, when: str) -> None:
    draining = opened(tmp_path)
    before = of(draining, proven=True, settings=3)
    started = opened(tmp_path)
    watch = of(started, proven=True, settings=3)
    while before.level == 3:
        before.audited(agreed=[True, True, False])
    recorded(draining)
    if when == "while it drains":
        look(started)
        assert watch.level == 2
    draining.close()
    look(started)
    assert (watch.level, watch.certified) == (2, 2)
    started.close()
    again = opened(tmp_path)
    assert of(again, proven=True, settings=3).level == 2
    again.close()


def test_only_what_is_loaded_is_told_of_a_stop_elsewhere(tmp_path: Path) -> None:
    """As a service closed, what had been unloaded was stopped, and a version that was gone took over."""
    draining = opened(tmp_path)
    before = of(draining, proven=True)
    started = opened(tmp_path)
    heeded: list[Watch] = []
    started.on_heeded = heeded.append
    of(started, proven=True)
    started.watch_only(())
    while before.may_hit:
        before.audited(agreed=False)
    draining.close()
    started.close()
    assert not heeded and not of(ServedStanding(tmp_path / "small.json"), proven=True).may_hit


def test_what_a_process_withdraws_after_the_draining_one_is_news_to_other_replicas(tmp_path: Path) -> None:
    """They had heeded a withdrawal of that number."""
    draining = opened(tmp_path, replicas=2)
    before = of(draining, proven=True, settings=3)
    started = opened(tmp_path, replicas=2)
    watch = of(started, proven=True, settings=3)
    while before.level == 3:
        before.audited(agreed=[True, False, False])
    recorded(draining)
    replica = opened(tmp_path, replica=1, replicas=2)
    other = of(replica, proven=True, settings=3)
    assert other.level == 1
    while other.level < 3:
        other.audited(agreed=[True] * 3)
    draining.close()
    look(started)
    assert watch.level == 1
    while watch.level < 3:
        watch.audited(agreed=[True] * 3)
    while watch.level:
        watch.audited(agreed=[False] * 3)
    recorded(started)
    look(replica)
    assert other.level == 0
    started.close()
    replica.close()


def test_what_the_draining_process_withdrew_and_proved_again_serves(tmp_path: Path) -> None:
    """Where it had also heeded another replica, its own withdrawal was taken for a new one."""
    replica = opened(tmp_path, replica=1, replicas=2)
    other = of(replica, proven=True, settings=3)
    while other.level:
        other.audited(agreed=[False] * 3)
    recorded(replica)
    draining = opened(tmp_path, replicas=2)
    watch = of(draining, proven=True, settings=3)
    assert watch.level == 0
    for agreed, level in ((True, 3), (False, 0), (True, 3)):
        while watch.level != level:
            watch.audited(agreed=[agreed] * 3)
    recorded(draining)
    started = opened(tmp_path, replicas=2)
    draining.close()
    assert of(started, proven=True, settings=3).level == 3
    started.close()
    replica.close()


def test_what_another_replica_withdrew_meanwhile_costs_one_share_of_delta(tmp_path: Path) -> None:
    """It cost all that were set aside for the draining process, too."""
    draining = opened(tmp_path, replicas=2)
    of(draining, proven=True, settings=3)
    started = opened(tmp_path, replicas=2)
    watch = of(started, proven=True, settings=3)
    replica = opened(tmp_path, replica=1, replicas=2)
    other = of(replica, proven=True, settings=3)
    while other.level:
        other.audited(agreed=[False] * 3)
    recorded(replica)
    draining.close()
    look(started)
    assert watch.level == 0 and started.spending.used == 1
    started.close()
    replica.close()


def test_nothing_that_was_to_be_written_before_is_written_over_what_is_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill right after that lost all that the other process had known."""
    draining = opened(tmp_path)
    started = opened(tmp_path)
    go, written = threading.Event(), []
    started._thread.submit(go.wait, LONG_S)
    of(started).audited(agreed=True)
    started.audited()
    of(draining, "b")
    draining.close()
    original = module.atomic_write_text

    def noted(path: Path, text: str) -> None:
        written.append(set(json.loads(text)["versions"]))
        original(path, text)

    monkeypatch.setattr(module, "atomic_write_text", noted)
    look(started)
    go.set()
    started.close()
    assert written and all(names == {"a", "b"} for names in written)


def test_what_the_draining_process_alone_knew_stays_in_the_file(tmp_path: Path) -> None:
    draining = opened(tmp_path)
    started = opened(tmp_path)
    of(started)
    watch = of(draining, "b")
    for _ in range(5):
        watch.audited(agreed=True)
    spent = draining.spending.used + 1
    draining.close()
    look(started)
    assert started.spending.used >= spent, "shares of delta that both have taken are taken"
    started.close()
    assert set(json.loads((tmp_path / "small.json").read_text())["versions"]) == {"a", "b"}
    again = opened(tmp_path)
    assert audits(of(again, "b")) == 5
    again.close()


def test_no_process_takes_the_shares_of_delta_of_another(tmp_path: Path) -> None:
    draining = opened(tmp_path)
    started = opened(tmp_path)
    shares = [of(each, name).proof for each in (draining, started) for name in "ab"]
    assert len({proof.delta for proof in shares if proof is not None}) == 4
    draining.close()
    started.close()


def test_a_version_that_was_loaded_and_unloaded_here_keeps_its_evidence(tmp_path: Path) -> None:
    draining = opened(tmp_path)
    of(draining, proven=True, settings=3)
    of(draining, "b", proven=True, settings=3)
    draining.save()
    recorded(draining)
    started = opened(tmp_path)
    for name in "ab":
        of(started, name, proven=True, settings=3).audited(agreed=[True] * 3)
    started.watch_only(())
    stopping = of(draining, "b", proven=True, settings=3)
    while stopping.level == 3:
        stopping.audited(agreed=[True, True, False])
    draining.close()
    started.close()
    again = opened(tmp_path)
    found = [of(again, name, proven=True, settings=3) for name in "ab"]
    assert [(watch.level, watch.audits) for watch in found] == [(3, 1), (2, 1)]
    again.close()


def test_a_proof_that_begins_as_the_file_is_taken_over_is_as_sure_as_its_version_asks(tmp_path: Path) -> None:
    """It had the share of the model's delta, which may be several times as much."""
    draining = opened(tmp_path)
    stopping = of(draining, proven=True, settings=3, delta=0.01)
    draining.save()
    recorded(draining)
    started = opened(tmp_path)
    of(started, proven=True, settings=3, delta=0.01).audited(agreed=[True] * 3)
    started.watch_only(())
    while stopping.level == 3:
        stopping.audited(agreed=[True, True, False])
    draining.close()
    look(started)
    taken = started.spending.used
    proof = of(started, proven=True, settings=3, delta=0.01).proof
    assert proof is not None and proof.delta == pytest.approx(0.01 / (taken * (taken + 1)))
    started.close()


def test_memory_is_written_once_the_file_is_free(tmp_path: Path) -> None:
    draining = opened(tmp_path)
    started = opened(tmp_path)
    with ThreadPoolExecutor(1) as thread:
        memory = ServedMemory(AGREEMENT, 0.05, started, thread, network="0" * 64, places=4, alone=True)
        memory.save()
        assert not list(tmp_path.glob("*.npz")), "the other process may write it"
        draining.close()
        look(started)
        memory.save()
        assert len(list(tmp_path.glob("*.npz"))) == 1
    started.close()


# Proofs under way in both ----------------------------------------------------------------------------------


def under_way(folder: Path, settings: int = 1, *, left: int = 2) -> tuple[ServedStanding, Watch]:
    """A process with a proof that lacks so many audits."""
    draining = opened(folder)
    before = of(draining, settings=settings)
    assert before.proof is not None
    count(before, before.proof.required - left)
    draining.save()
    recorded(draining)
    return draining, before


def count(watch: Watch, times: int, *, agreed: bool = True) -> None:
    for _ in range(times):
        watch.audited(agreed=[agreed] * watch.settings)


@pytest.mark.parametrize("settings", [1, 3])
def test_each_of_two_processes_proves_the_same_caches_by_its_own_share_of_delta(
    tmp_path: Path, settings: int
) -> None:
    """Both went on with one proof: bad caches had two chances. Neither waits for the other one to end."""
    draining, before = under_way(tmp_path, settings)
    started = opened(tmp_path)
    watch = of(started, settings=settings)
    assert before.proof is not None and watch.proof is not None
    assert watch.proof.audits == 0 and watch.proof.delta < before.proof.delta / 100
    count(before, 2)
    assert before.may_hit and not watch.may_hit
    count(watch, watch.proof.required)
    assert watch.may_hit
    while watch.may_hit:
        watch.audited(agreed=[False] * settings)
    assert before.may_hit
    draining.close()
    look(started)
    count(watch, 5)
    assert watch.state == "stopped" and audits(watch) == 5, "what is withdrawn here is proven again here"
    started.close()


def test_what_serves_goes_on_serving_while_looser_settings_are_proven_apart(tmp_path: Path) -> None:
    draining = opened(tmp_path)
    before = of(draining, settings=3)
    while not before.level:
        before.audited(agreed=[True, False, False])
    recorded(draining)
    started = opened(tmp_path)
    watch = of(started, settings=3)
    assert (watch.level, watch.proven_on) == (1, before.proven_on) and audits(watch) == 0 < audits(before)
    draining.close()
    started.close()


@pytest.mark.parametrize("more", [0, 50])
def test_the_proof_with_more_audits_goes_on_once_the_draining_process_has_ended(
    tmp_path: Path, more: int
) -> None:
    draining, before = under_way(tmp_path)
    started = opened(tmp_path)
    watch = of(started)
    assert before.proof is not None and watch.proof is not None
    count(watch, 3 + more)
    before.audited(agreed=False)
    mine, theirs = watch.proof.to_json(), before.proof.to_json()
    assert mine["audits"] != theirs["audits"]
    draining.close()
    look(started)
    assert watch.proof.to_json() == (mine if more else theirs)
    started.close()


def test_what_the_draining_process_has_proven_is_proven_once_it_has_ended(tmp_path: Path) -> None:
    draining, before = under_way(tmp_path, 3)
    started = opened(tmp_path)
    watch = of(started, settings=3)
    count(watch, 5)
    count(before, 2)
    draining.close()
    look(started)
    assert not watch.may_hit
    count(watch, 1)
    assert watch.level == before.level == 3 and watch.proven_on == before.proven_on + 1
    started.close()


def test_a_proof_that_is_less_sure_than_a_version_asks_by_now_is_not_taken(tmp_path: Path) -> None:
    draining, before = under_way(tmp_path)
    started = opened(tmp_path)
    watch = of(started, delta=0.01)
    count(watch, 5)
    draining.close()
    look(started)
    assert audits(watch) == 5
    started.close()


def test_a_proof_of_more_than_a_week_ago_is_not_taken(tmp_path: Path) -> None:
    draining, _ = under_way(tmp_path)
    started = opened(tmp_path)
    watch = of(started)
    draining.close()
    path = tmp_path / "small.json"
    document = json.loads(path.read_text())
    document["versions"]["a"]["heard_s"] -= 8 * 86_400.0
    path.write_text(json.dumps(document))
    look(started)
    assert audits(watch) == 0
    started.close()


@pytest.mark.parametrize("loaded", [False, True])
def test_two_processes_complete_no_proof_on_one_share_of_delta_though_the_file_is_lost(
    tmp_path: Path, loaded: bool
) -> None:
    """What was unloaded here, or never loaded, went on with a proof that the other had completed."""
    draining, before = under_way(tmp_path)
    assert before.proof is not None
    share = before.proof.delta
    started = opened(tmp_path)
    if loaded:
        of(started)
        started.watch_only(())
    count(before, 2)
    draining.close()
    (tmp_path / "small.json").write_text("{half")
    look(started)
    proof = of(started).proof
    assert before.may_hit and proof is not None and (proof.audits, proof.delta < share) == (0, True)
    started.close()
