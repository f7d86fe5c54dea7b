"""Audits of whole requests: late rows, batches at the moment when a scene changes, memory that pauses."""

from __future__ import annotations

import asyncio
import gc
import json
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gati.adaptation.recall import Recall
from gati.adaptation.recall_records import Looked
from gati.composition.composition import Composition
from gati.composition.walk import certify as walk
from gati.engine.exits import Prediction
from gati.errors import CancelledError, DeadlineError, RequestError, UnavailableError
from gati.exploration.library import Library
from gati.guard.standing import identity_of
from services.inference.following import Following
from services.inference.keeping import ServedStanding
from services.inference.loaded import LoadedVersion
from services.inference.service import InferenceService
from services.inference.versions import Versions
from services.wire.gen.ttypes import InferRequest, VersionSource
from services.wire.tensors import to_tensor
from tests.engine.served import images
from tests.services import in_process
from tests.services.running import LITTLE, make_folder
from tests.waiting import LONG_S, in_the_end

STRICT = 0.5  # a stricter promise than the first version's


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A library with a certified composition, and others of stricter promises."""
    folder = make_folder(tmp_path)
    path = Library(folder / "library").composition_path()
    chosen = Composition.load(path)
    for name, accuracy, certified in (("certified", STRICT, True), ("unproven", STRICT, False)):
        certificate = walk([(0, 1500)], accuracy, 0.05) if certified else None
        fields = {"accuracy_target": accuracy, "confidence": 0.95, "certificate": certificate}
        replace(chosen, name=name, **fields).save(path.with_name(f"{name}.json"))  # type: ignore[arg-type]
    return folder


# Every request is audited, and proofs take no time.
run = partial(in_process.run, audit_budget=1.0, proof_s=0.0)


def versions_of(service: InferenceService) -> Versions:
    return service._versions


def request(rows: Any, name: str = "asked", *, place: str | None = None, version: str | None = None) -> Any:
    tensor, left_ms = to_tensor(rows), int(1e3 * LONG_S)
    return InferRequest(name, tensor, left_ms, "0" * 32, priority=2, place=place, version=version)


async def on_trial(service: InferenceService, name: str) -> LoadedVersion:
    await service.load(VersionSource(name, composition=name))
    await service.activate(name)
    found = versions_of(service).pending
    assert found is not None and found.name == name
    return found


async def answering_after_memory(service: InferenceService, monkeypatch: pytest.MonkeyPatch) -> Versions:
    """The versions of a service whose memory answers half of the requests."""
    monkeypatch.setattr(Recall, "next_to_caches", (0.5, 1))
    versions = versions_of(service)
    await service.infer(request(images(1), place="gate"))
    assert versions.active.following.after_memory
    return versions


def hold_back(
    version: LoadedVersion, monkeypatch: pytest.MonkeyPatch, *, answered: int, error: Exception | None = None
) -> None:
    """Let the version answer so many inputs, and no more: others wait, or fail with `error`."""
    runner = version.post.deployed.queue._runner
    submit, asked = runner.submit, [0]

    def held(x: Any) -> Future[Prediction]:
        asked[0] += 1
        if asked[0] <= answered:
            return submit(x)
        never: Future[Prediction] = Future()
        if error is not None:
            never.set_exception(error)
        return never

    monkeypatch.setattr(runner, "submit", held)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["deadline", "cancelled", "disconnected", "failed"])
def test_rows_without_an_answer_are_audits_of_the_trial_and_the_others_of_both(
    made: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """All audits of a batch were dropped where one row was late: the trial never saw what is hard.

    Those of a row whose engine failed, which may be only on misses, were dropped for longer.
    """

    async def test(service: InferenceService) -> None:
        trial, serving = await on_trial(service, "unproven"), versions_of(service).active
        proof, watch = trial.post.of_all.proof, serving.post.of_all
        assert proof is not None
        monkeypatch.setattr(Following, "_probes", False)  # else the costs of audits leave some rows out
        monkeypatch.setattr("services.inference.following.audit_share", lambda *_: 1.0)
        error = RuntimeError("out of memory") if way == "failed" else None
        hold_back(serving, monkeypatch, answered=1, error=error)
        asked = asyncio.create_task(service.infer(request(images(3))))
        queue = serving.post.deployed.queue
        if way != "failed":
            await in_the_end(lambda: queue.waiting + queue.running == 2)
        if way == "deadline":  # not a real one, which may pass before the first row is answered
            for ask in [*queue._running, *(each[-1] for each in queue._waiting)]:
                queue._expire(ask)
        elif way == "cancelled":
            await service.cancel("asked")
        elif way == "disconnected":
            asked.cancel()
        expected = {"deadline": DeadlineError, "cancelled": CancelledError, "failed": UnavailableError}
        with pytest.raises(expected.get(way, asyncio.CancelledError)):
            await asked
        await in_the_end(lambda: proof.audits == 3)
        assert watch.audits == 1

    run(made, test)


@pytest.mark.slow
def test_no_row_of_a_batch_is_answered_by_caches_proven_elsewhere_when_a_scene_begins(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place was asked before any of its rows was looked at: all 8 were answered as before."""
    told: list[bool] = []
    draw = Following.draw

    def told_of(self: Following, trial: Any, looked: Looked | None = None, *, places: bool = False) -> Any:
        told.append(looked is not None and looked.new_scene)
        return draw(self, trial, looked, places=places)

    monkeypatch.setattr(Following, "draw", told_of)

    async def test(service: InferenceService) -> None:
        shape = versions_of(service).model.traced.input_shape
        chance = np.random.default_rng(0)

        def rows(level: float) -> Any:
            return (level + 0.01 * chance.normal(size=(8, *shape))).astype(np.float32)

        memory = versions_of(service)._memory
        assert memory is not None
        checked = memory.recall._checked
        while memory.recall._risk is None or sum(len(each._wrong) for each in checked.values()) < 40:
            await service.infer(request(rows(0.0), place="gate"))
            checked = memory.recall._checked
        assert not any(told)
        await service.infer(request(rows(50.0), place="gate"))
        assert told[-8:] == [True] * 8
        await service.infer(request(rows(0.0), place="yard"))
        assert told[-8:] == [True] * 8, "a new place is as new"
        await service.infer(request(rows(0.0)))
        assert not any(told[-8:])

    run(made, test)


@pytest.mark.slow
@pytest.mark.parametrize("why", ["it promises more", "it is named"])
def test_a_new_scene_is_noticed_also_where_memory_must_not_answer(
    made: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Caches that audits had proven elsewhere answered there at once."""
    told: list[bool] = []
    draw = Following.draw

    def told_of(self: Following, trial: Any, looked: Looked | None = None, *, places: bool = False) -> Any:
        assert not places, "no work for a memory that must not answer"
        told.append(looked is not None and looked.new_scene)
        return draw(self, trial, looked, places=places)

    monkeypatch.setattr(Following, "draw", told_of)

    async def test(service: InferenceService) -> None:
        versions = versions_of(service)
        memory, chance = versions._memory, np.random.default_rng(0)
        assert memory is not None
        if why == "it promises more":
            await service.load(VersionSource("certified", composition="certified"))
            await service.activate("certified")

        async def ask(level: float) -> None:
            shape = (8, *versions.model.traced.input_shape)
            rows = (level + 0.01 * chance.normal(size=shape)).astype(np.float32)
            named = "default" if why == "it is named" else None
            answered = await service.infer(request(rows, place="gate", version=named))
            assert all(each.exit != "recall" for each in answered.answers)

        before = memory.recall.state()
        while memory.recall._risk is None:
            await ask(0.0)
        for _ in range(4):
            await ask(0.0)
        assert not any(told)
        await ask(50.0)
        assert told[-8:] == [True] * 8
        await in_the_end(lambda: memory.recall._scenes.new != ())
        assert memory.recall.state() == before, "it was not asked: nothing is proven, and no guard is told"

    run(made, test)


@pytest.mark.slow
def test_a_certified_version_that_memory_must_not_answer_for_serves_by_its_certificate(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share of a memory that is not used any more stayed as it was, and the version on probation."""

    async def test(service: InferenceService) -> None:
        versions = await answering_after_memory(service, monkeypatch)
        assert versions.memory_for(versions.active) is not None
        await service.load(VersionSource("certified", composition="certified"))
        await service.activate("certified")
        for _ in range(3):
            answered = await service.infer(request(images(1), place="gate"))
        assert answered.version == "certified" and versions.memory_for(versions.active) is None
        assert not versions.active.following.after_memory
        assert (answered.state, versions.active.standing.certified) == ("serving", True)

    run(made, test)


@pytest.mark.slow
def test_memory_pauses_while_a_version_is_on_trial_that_it_must_not_answer_next_to(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proven on what memory leaves, it would serve without memory, be unproven there, and so on."""

    async def test(service: InferenceService) -> None:
        versions = await answering_after_memory(service, monkeypatch)
        assert not versions.memory_pauses
        trial = await on_trial(service, "unproven")
        await service.infer(request(images(1), place="gate"))
        assert versions.memory_pauses and not versions.active.following.after_memory
        assert not trial.following.after_memory
        proof = trial.post.of_all.proof
        while not trial.post.of_all.may_hit:
            trial.post.of_all.audited(agreed=True)
        assert proof is not None and versions.active is trial and not versions.memory_pauses
        for _ in range(5):
            await service.infer(request(images(1), place="gate"))
            assert versions.active is trial and trial.following.may_hit

    run(made, test)


@pytest.mark.slow
def test_no_request_is_decided_by_what_is_proven_next_to_memory_once_memory_pauses(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that came before the next answer were answered by caches proven on what memory leaves."""
    judged: list[bool] = []
    draw = Following.draw

    def told_of(self: Following, *given: Any, **options: Any) -> Any:
        drawn = draw(self, *given, **options)
        judged.append(drawn.decided.after_memory)
        return drawn

    monkeypatch.setattr(Following, "draw", told_of)

    async def test(service: InferenceService) -> None:
        versions = await answering_after_memory(service, monkeypatch)
        await service.infer(request(images(1), place="gate"))
        assert judged[-1]
        trial = await on_trial(service, "unproven")
        await service.infer(request(images(2), place="gate"))
        assert versions.memory_pauses and not any(judged[-2:])
        await service.unload(trial.name)
        await service.infer(request(images(2), place="gate"))
        assert not versions.memory_pauses and all(judged[-2:])

    run(made, test)


@pytest.mark.slow
@pytest.mark.parametrize("before", ["none", "failed"])
def test_caches_that_are_certified_while_they_serve_answer_once_their_composition_is_loaded_again(
    made: Path, before: str
) -> None:
    """The certificate counted after a restart only, as the watch of the caches was loaded already.

    An answer of the version of before named its certificate that had failed, with the confidence of that.
    """
    path = Library(made / "library").composition_path()
    chosen = Composition.load(path)
    assert chosen.certificate is not None
    failed = replace(chosen.certificate, deployed=None, delta=0.01)
    replace(chosen, certificate=failed if before == "failed" else None).save(path)

    async def test(service: InferenceService) -> None:
        waits = await service.infer(request(images(1)))
        assert (waits.state, waits.answers[0].exit) == ("probation", "base")
        chosen.certified_by(chosen.certificate).save(path)  # type: ignore[arg-type]
        await service.load(VersionSource("again", composition="default"))
        await service.activate("again")
        after = await service.infer(request(images(1)))
        assert (after.version, after.state) == ("again", "serving") and after.certificate_id is not None
        named = await service.infer(request(images(1), version="default"))
        assert named.certificate_id is None and "certified with 95 % confidence" in named.promise

    run(made, test, memory=False, audit_budget=0.05)


@pytest.mark.slow
def test_what_only_counts_for_the_proof_of_memory_is_written_too(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written with the next audit of caches, and lost if the process was killed before."""
    monkeypatch.setattr("gati.guard.standing._SAVED_EVERY_S", 0.0)
    monkeypatch.setattr("services.inference.following.audit_share", lambda *_: 0.0)  # none but for memory
    path = Library(made / "library").composition_path()
    chosen = replace(Composition.load(path), certificate=None, accuracy_target=0.9)  # the base model answers
    chosen.save(path)

    async def test(service: InferenceService) -> None:
        versions, chance = versions_of(service), np.random.default_rng(0)
        memory, standing = versions._memory, versions._standing
        assert memory is not None and standing.path is not None
        shape = (8, *versions.model.traced.input_shape)
        recall = memory.recall
        while (proof := recall._ladders[0].proof) is None or not proof.audits:
            rows = (0.01 * chance.normal(size=shape)).astype(np.float32)
            await service.infer(request(rows, place="gate"))
        await versions._line.settled()
        standing._thread.submit(int).result()
        kept = json.loads(standing.path.read_text())["parts"]["memory"]["state"]["ladders"][0]["ladder"]
        assert kept["proofs"][0]["audits"] == recall._ladders[0].state()["ladder"]["proofs"][0]["audits"] > 0

    run(made, test, trials=1e-9, audit_budget=0.05)


@pytest.mark.slow
def test_a_version_is_not_judged_by_another_promise_of_the_same_caches(made: Path) -> None:
    """As `gati certify --accuracy --write` leaves them. An alarm of one was told of both."""
    path = Library(made / "library").composition_path()
    chosen = Composition.load(path)

    async def test(service: InferenceService) -> None:
        versions, certificate = versions_of(service), walk([(0, 1500)], STRICT, 0.05)
        replace(chosen, accuracy_target=STRICT, certificate=certificate).save(path)
        await service.load(VersionSource("strict", composition="default"))
        strict, active = versions.get("strict"), versions.active
        assert strict.name != active.name and strict.following.may_hit
        while strict.following.may_hit:
            strict.post.of_all.audited(agreed=[False] * strict.post.of_all.settings)
        assert versions._roster is not None and not versions._roster.alarmed
        assert active.following.may_hit and active.standing.agreement == LITTLE
        await service.activate("strict")
        assert versions.active is active and versions.pending is strict

    run(made, test)


@pytest.mark.slow
def test_what_another_replica_stops_is_noticed_without_any_request(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.inference.service._HEEDED_EVERY_S", 0.01)
    state = tmp_path / "state"

    async def test(service: InferenceService) -> None:
        active = versions_of(service).active
        count = active.post.watch.settings
        assert active.composition is not None and active.following.may_hit
        other = ServedStanding(state / "m@1.json")
        watch = other.of(
            identity_of(active.composition),
            active.composition.accuracy_target,
            proven=True,
            settings=count,
            delta=0.05,
            on_event=lambda event: None,
        )
        while watch.may_hit:
            watch.audited(agreed=[False] * count)
        await other.recorded()
        await in_the_end(lambda: not active.following.may_hit)
        assert active.standing.state == "probation"
        other.close()

    run(made, test, state=state, replicas=2)


@pytest.mark.slow
def test_a_version_whose_caller_is_gone_before_it_is_loaded_is_loaded_all_the_same(made: Path) -> None:
    """Its engine and threads stayed, but were in no list, so nothing could ever close them."""

    async def test(service: InferenceService) -> None:
        versions = versions_of(service)
        loading = asyncio.create_task(service.load(VersionSource("certified", composition="certified")))
        await in_the_end(lambda: versions._loading == 1)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        await in_the_end(lambda: [each.name for each in versions.loaded] == ["default", "certified"])
        await service.unload("certified")

    run(made, test)


@pytest.mark.slow
def test_a_load_that_fails_after_its_caller_is_gone_is_no_error_of_the_service(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio logged a traceback: that of a request for a composition that does not exist."""
    logged: list[dict[str, Any]] = []

    async def test(service: InferenceService) -> None:
        is_gone = asyncio.Event()

        async def fails(*_: object) -> None:
            await is_gone.wait()
            raise RequestError("there is no such composition")

        monkeypatch.setattr(versions_of(service), "load", fails)
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        loading = asyncio.create_task(service.load(VersionSource("none", composition="none")))
        for _ in range(5):
            await asyncio.sleep(0)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        is_gone.set()
        for _ in range(5):
            await asyncio.sleep(0)
        gc.collect()  # what was never asked for its error is logged when it goes

    run(made, test)
    assert not logged


def test_the_first_promise_is_the_loosest(made: Path) -> None:
    """What the tests above rely on."""
    assert Composition.load(Library(made / "library").composition_path()).accuracy_target == LITTLE < STRICT


@pytest.mark.slow
def test_a_version_that_is_unloaded_leaves_no_watch_behind(made: Path) -> None:
    async def test(service: InferenceService) -> None:
        watches = versions_of(service)._standing._watches
        before = set(watches)
        await on_trial(service, "unproven")
        assert set(watches) > before
        await service.unload("unproven")
        await in_the_end(lambda: set(watches) == before)
        await on_trial(service, "unproven")

    run(made, test)
