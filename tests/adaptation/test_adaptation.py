"""Adaptation on streams of digits that change: swaps, alarms, and restarts."""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gati.adaptation import adaptation as adaptation_module
from gati.adaptation import references, renewal
from gati.adaptation.adaptation import Adaptation
from gati.adaptation.background import Background, Inline
from gati.adaptation.deployments import Deployments
from gati.adaptation.replay import RecordedRequests, Replayed, replay, sweep
from gati.adaptation.retrain import Retrained, retrain
from gati.adaptation.scene import scene_signature
from gati.adaptation.settings import AdaptSettings, Answered, Audit, Change
from gati.adaptation.streaming import classify
from gati.adaptation.window import Window
from gati.composition.load import Served
from gati.engine.engine import Engine
from gati.engine.exits import Prediction
from gati.errors import AdaptError, StorageError
from gati.guard.auditor import RECALL
from gati.samples.store import RecordStore
from gati.samples.writer import BackgroundWriter
from gati.versions.engines import save_version
from gati.versions.lineage import Lineage
from gati.versions.repository import ModelRepository
from gati.video import Frame, SourceState
from tests.adaptation.deployed import FAMILIAR, STRANGE, make_deployed, stream, window_of
from tests.waiting import LONG_S

pytestmark = pytest.mark.slow

SETTINGS = AdaptSettings(
    interval_s=1e9, window_inputs=600, accuracy=0.9, blocks=("blocks.0",), original_inputs=0,
    rest=False, seed=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_deployed(tmp_path_factory.mktemp("deployed"))


@pytest.fixture(scope="module")
def drift() -> Tensor:
    """What the caches do not know, then what they know, then the former again."""
    parts = [stream(STRANGE, 1200, seed=2), stream(FAMILIAR, 1200, seed=5), stream(STRANGE, 600, seed=7)]
    return torch.cat(parts)


class Told:
    """Keeps changes and audits."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.audits: list[Audit] = []

    @property
    def kinds(self) -> list[str]:
        return [change.kind for change in self.changes]

    def first(self, kind: str) -> Change:
        return next(change for change in self.changes if change.kind == kind)


@pytest.fixture
def told() -> Told:
    return Told()


def adapting(served: Served, told: Told, settings: AdaptSettings = SETTINGS, **options: Any) -> Adaptation:
    options = {"deterministic": True, **options}
    return Adaptation(served, settings, on_change=told.changes.append, on_audit=told.audits.append, **options)


def feed(adaptation: Adaptation, inputs: Tensor, begin_s: float = 0.0) -> Iterator[Answered]:
    for number, x in enumerate(inputs.split(1)):
        yield adaptation.answer(x, time_s=begin_s + 0.1 * number, source="test")


def fed_until(
    adaptation: Adaptation, told: Told, inputs: Tensor, *kinds: str, more: int = 0, begin_s: float = 0.0
) -> list[Answered]:
    """The answers up to the first change of one of these kinds, and `more` after it."""
    answers: list[Answered] = []
    for answer in feed(adaptation, inputs, begin_s):
        answers.append(answer)
        more -= bool(set(kinds) & set(told.kinds))
        if more < 0:
            break
    return answers


def test_the_course_of_things(served: Served, drift: Tensor, told: Told) -> None:
    """Alarm, retraining, probation, and versions that serve once what follows has proven them."""
    with adapting(served, told) as adaptation:
        answers = list(feed(adaptation, drift[:1600]))
        status = adaptation.status
    stopped, activated = told.first("alarm").request, told.first("activated").request
    assert stopped < activated < 1200
    assert not any(answer.hit for answer in answers[stopped:activated])  # from the very next request on
    assert np.mean([answer.hit for answer in answers[activated:1200]]) > 0.5
    for change in told.changes:
        if change.kind == "activated":  # looked up before, for as many audits as the proof took
            shadow = [a for a in told.audits if a.shadow and a.version == change.version]
            proving = [audit for audit in shadow if audit.request <= change.request]
            assert len(proving) > 50 and np.mean([audit.agreed for audit in proving]) > 0.9
    assert all(answer.agreed is (None if answer.hit else True) for answer in answers)
    assert status.requests == 1600 and status.hits == sum(answer.hit for answer in answers)
    base = served.engine.reference(drift[:1600]).tolist()
    agreed = [answer.prediction.class_index == other for answer, other in zip(answers, base, strict=True)]
    assert np.mean(agreed[stopped:]) >= 0.9


def test_every_request_is_answered_by_one_version(served: Served, drift: Tensor, told: Told) -> None:
    with adapting(served, told) as adaptation:
        names: dict[int, set[str]] = {}
        answers = fed_until(adaptation, told, drift, "activated", more=100)
        for answer, x in zip(answers, drift.split(1), strict=False):
            names.setdefault(answer.version, set()).add(answer.prediction.version)
            if answer.hit:  # what that version says of this input, and no other
                again = adaptation._deployments.open(answer.version).served.engine(x)[0]
                assert again.exit == answer.prediction.exit
                assert torch.equal(again.probabilities, answer.prediction.probabilities)
    assert len(names) >= 2 and all(len(each) == 1 for each in names.values())


def test_while_stopped_the_base_model_answers(served: Served, drift: Tensor, told: Told) -> None:
    with adapting(served, told, replace(SETTINGS, enabled=False, audit_budget=0.5)) as adaptation:
        answers = fed_until(adaptation, told, drift, "alarm", more=100)
        x = drift[650:651]
        assert told.kinds == ["alarm"]
        assert not any(answer.hit for answer in answers[told.first("alarm").request :])
        given = adaptation.answer(x, time_s=1e3).prediction
        assert torch.equal(given.probabilities, served.engine.base(x)[0].probabilities)


@pytest.mark.parametrize("fault", ["slower", "hardly faster", "none at all"])
def test_new_caches_that_are_not_better_do_not_serve(
    served: Served, told: Told, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def worse(*arguments: Any, **options: Any) -> Retrained:
        found = retrain(*arguments, **options)
        before = replace(found.before, broken=False)
        factor = 1.1 if fault == "slower" else 0.99 if fault == "hardly faster" else 0.5
        after = replace(found.after, mean_latency_ms=before.mean_latency_ms * factor)
        settings = () if fault == "none at all" else found.settings
        return replace(found, before=before, after=after, settings=settings)

    monkeypatch.setattr(renewal, "retrain", worse)
    settings = replace(SETTINGS, interval_s=20.0, falls_to=0.0, accuracy=0.8)
    with adapting(served, told, settings) as adaptation:
        answers = fed_until(adaptation, told, stream(FAMILIAR, 600, seed=3), "kept", more=100)
    assert "kept" in told.kinds and "activated" not in told.kinds
    assert {answer.version for answer in answers} == {0} and any(answer.hit for answer in answers[-50:])


def test_a_new_version_waits_for_its_time(served: Served, drift: Tensor, told: Told) -> None:
    with adapting(served, told, replace(SETTINGS, delay_s=5.0)) as adaptation:
        fed_until(adaptation, told, drift[:800], "probation")
    assert told.first("probation").time_s >= told.first("retraining").time_s + 5.0


def test_audits_are_of_drawn_requests_and_within_the_budget(served: Served, told: Told) -> None:
    inputs = stream(FAMILIAR, 2000, seed=11)
    settings = replace(SETTINGS, sampling=1e-9, audit_budget=0.05, enabled=False, accuracy=0.5)
    with adapting(served, told, settings) as adaptation:
        answers = list(feed(adaptation, inputs))
    paid = [audit for audit in told.audits if audit.exit != "base"]
    assert 0 < len(paid) <= 0.05 * len(inputs)
    assert sum(answer.audited for answer in answers) == len(told.audits)
    base = served.engine.reference(inputs).tolist()
    for audit in told.audits:
        given = answers[audit.request - 1].prediction.class_index
        assert (audit.class_index, audit.base_class) == (given, base[audit.request - 1])


def recorded(served: Served, inputs: Tensor) -> RecordedRequests:
    rows = inputs.split(1)
    frames = np.arange(len(rows))
    return RecordedRequests("test", rows, 0.1 * frames, frames, [served.engine.base(x)[0] for x in rows])


@pytest.fixture(scope="module")
def recording(served: Served, drift: Tensor) -> RecordedRequests:
    return recorded(served, drift[:1000])


@pytest.fixture(scope="module")
def replayed(served: Served, recording: RecordedRequests) -> Replayed:
    return replay(served, recording, SETTINGS)


def test_a_replay_gives_the_same_twice(
    served: Served, recording: RecordedRequests, replayed: Replayed
) -> None:
    one, other = replayed, replay(served, recording, SETTINGS)
    assert (one.exits, one.classes) == (other.exits, other.classes)
    assert [(c.kind, c.request, c.version) for c in one.changes] == [
        (c.kind, c.request, c.version) for c in other.changes
    ]
    assert sum(period.requests for period in one.periods) == one.total.requests == 1000
    assert len(one.periods) > 1 and one.after is not None


def test_a_replay_counts_agreement_over_all_requests_and_windows(
    recording: RecordedRequests, replayed: Replayed
) -> None:
    report = replayed
    agreed = np.array(
        [given == base.class_index for given, base in zip(report.classes, recording.base, strict=True)]
    )
    assert report.total.agreement == agreed.mean()
    assert report.total.worst_agreement == min(agreed[at : at + 200].mean() for at in range(801))
    assert report.total.hit_rate == np.mean([name != "base" for name in report.exits])


def test_memory_answers_what_a_place_has_shown_before(served: Served, told: Told) -> None:
    """Two cameras, each with a few pictures and noise: most answers come from memory, and agree."""
    pictures = stream(FAMILIAR, 6, seed=5)
    noise = torch.randn(1200, *pictures.shape[1:], generator=torch.Generator().manual_seed(0))
    inputs = pictures.repeat_interleave(20, 0).repeat(10, 1, 1, 1) + 0.005 * noise
    base = served.engine.reference(inputs).tolist()
    with adapting(served, told) as adaptation:
        answers = [
            adaptation.answer(x, time_s=0.1 * number, source="test", place=f"camera:{number % 2}")
            for number, x in enumerate(inputs.split(1))
        ]
        status = adaptation.status
    began = told.first("recalling").request
    recalled = [answer.prediction.exit == RECALL for answer in answers]
    assert not any(recalled[:began]) and np.mean(recalled[600:]) > 0.8
    assert status.recalled == sum(recalled) and status.hits == sum(answer.hit for answer in answers)
    agreed = [answer.prediction.class_index == other for answer, other in zip(answers, base, strict=True)]
    assert np.mean(agreed) >= 0.9
    from_memory = [audit for audit in told.audits if audit.exit == RECALL]
    assert from_memory and all(recalled[audit.request - 1] for audit in from_memory)


def test_memory_has_room_for_as_many_places_as_it_is_asked_to(served: Served, told: Told) -> None:
    """Of one more, each was forgotten before it was shown again, and memory answered none."""
    pictures = stream(FAMILIAR, 3, seed=5)
    noise = torch.randn(1200, *pictures.shape[1:], generator=torch.Generator().manual_seed(0))
    inputs = pictures.repeat(400, 1, 1, 1) + 0.005 * noise
    recalled = {}
    for places in (2, 3):
        with adapting(served, told, replace(SETTINGS, places=places)) as adaptation:
            for number, x in enumerate(inputs.split(1)):
                adaptation.answer(x, time_s=0.1 * number, place=f"camera:{number % 3}")
            recalled[places] = adaptation.status.recalled
    assert recalled[2] == 0 and recalled[3] > 400


def without_caches(served: Served) -> Served:
    return replace(
        served,
        composition=replace(served.composition, exits=(), certificate=None),
        engine=Engine(served.engine.traced, [], outputs_kind="logits"),
    )


def test_without_caches_nothing_is_said_of_them(served: Served, told: Told) -> None:
    """They rested, and were on probation for ever, though the base model answers in any case."""
    none = without_caches(served)
    pictures = stream(FAMILIAR, 6, seed=5)
    noise = torch.randn(1200, *pictures.shape[1:], generator=torch.Generator().manual_seed(0))
    inputs = pictures.repeat_interleave(20, 0).repeat(10, 1, 1, 1) + 0.005 * noise
    with adapting(none, told, replace(SETTINGS, rest=True, falls_to=0.0)) as adaptation:
        for number, x in enumerate(inputs.split(1)):
            adaptation.answer(x, time_s=0.1 * number, place="gate")
        status, serving = adaptation.status, adaptation._succession.serving
        assert serving.after_memory and serving.of_rest.proof is None, "nothing but memory is proven"
    assert set(told.kinds) <= {"recalling", "tightened"} and status.recalled > 600
    assert (status.state, status.proof, status.on_trial, status.resting) == ("serving", "", None, False)


def test_without_a_place_nothing_is_recalled(served: Served, told: Told) -> None:
    still = stream(FAMILIAR, 1, seed=5).repeat(500, 1, 1, 1)
    with adapting(served, told, replace(SETTINGS, falls_to=0.0)) as adaptation:
        assert not any(answer.prediction.exit == RECALL for answer in feed(adaptation, still))


def test_lookups_that_do_not_pay_are_left_out(served: Served, told: Told) -> None:
    """Inputs that nothing answers early: after a while the base model is asked at once."""
    chosen = served.composition
    dear = replace(
        chosen, exits=tuple(replace(leaving, lookup_ms=0.9, exit_ms=1.9) for leaving in chosen.exits)
    )
    inputs = stream(STRANGE, 200, seed=9)
    with adapting(replace(served, composition=dear), told, replace(SETTINGS, rest=True)) as adaptation:
        answers = list(feed(adaptation, inputs))
    resting = told.first("resting").request
    assert 60 <= resting <= 100 and told.kinds.count("resting") == 1
    assert not any(answer.hit for answer in answers[resting:])
    base = served.engine.reference(inputs).tolist()
    assert [answer.prediction.class_index for answer in answers[resting:]] == base[resting:]


def test_caches_found_while_lookups_rest_prove_themselves_on_what_follows(served: Served, told: Told) -> None:
    """Nothing is lost by waiting: until the proof is there, the base model answers, as it did before."""
    strict = [replace(leaving, threshold=1e30) for leaving in served.engine.exits]
    idle = replace(served, engine=Engine(served.engine.traced, strict, outputs_kind="logits"))
    settings = replace(SETTINGS, rest=True, interval_s=30.0, falls_to=0.0)
    with adapting(idle, told, settings) as adaptation:
        answers = fed_until(adaptation, told, stream(STRANGE, 1800, seed=9), "activated", more=200)
    assert told.kinds[0] == "resting" and "alarm" not in told.kinds
    tried, activated = told.first("probation").request, told.first("activated").request
    assert tried < activated < 1500
    assert not any(answer.hit for answer in answers[:activated])
    assert np.mean([answer.hit for answer in answers[activated:]]) > 0.2


def test_a_sweep_has_every_combination() -> None:
    found = sweep(SETTINGS, sampling=[0.1, 0.2], interval_s=[5.0, 10.0, 20.0])
    counted = Counter((each.sampling, each.interval_s, each.window_s) for each in found)
    assert len(counted) == 6 and set(counted.values()) == {1}


def test_a_restart_goes_on_with_the_active_version_and_the_samples(
    served: Served, drift: Tensor, told: Told, tmp_path: Path
) -> None:
    repository = ModelRepository(tmp_path / "versions")
    with (
        RecordStore.open(f"sqlite:///{tmp_path}/records.db", clock=lambda: 1000.0) as store,
        BackgroundWriter(store) as writer,
    ):
        kept: Any = {"model": "digits", "standing": tmp_path / "standing.json"}
        with adapting(served, told, repository=repository, writer=writer, **kept) as adaptation:
            fed_until(adaptation, told, drift[:1200], "activated", more=50, begin_s=900.0)
            before = adaptation.status
        assert writer.flush(LONG_S)
        history = store.window("digits")
    assert len(history) >= before.samples > 200 and before.version >= 1
    again = Told()
    options: Any = {**kept, "repository": ModelRepository(tmp_path / "versions")}
    with adapting(served, again, history=history, **options) as adaptation:
        assert again.kinds == ["resumed"]
        assert adaptation.status.version == before.version and adaptation.status.samples == before.samples
        assert any(answer.hit for answer in feed(adaptation, drift[1100:1200], begin_s=1020.0))
    elsewhere = Told()
    with adapting(served, elsewhere, origin="yard", **options) as adaptation:
        assert elsewhere.kinds == ["resumed", "probation", "probation"]
        assert "not known to be of this source" in elsewhere.changes[1].message
        assert adaptation.status.version == 0
    unproven = Told()
    with adapting(served, unproven, model="digits", repository=options["repository"]) as adaptation:
        assert unproven.kinds == ["resumed", "probation"]  # what was proven of it is not known any more
        assert adaptation.status.version == 0


@pytest.mark.parametrize("activated", [True, False])
def test_a_version_made_for_another_backend_does_not_serve_and_hinders_nothing(
    served: Served, drift: Tensor, told: Told, tmp_path: Path, activated: bool
) -> None:
    """Compositions share a repository. Its misses counted as the reference's answers, or nothing started."""
    other = replace(served.composition, name="q", backend="openvino-bf16", certificate=None)
    folder = save_version(tmp_path / "q", other, served.engine.exits)
    scene = [float(value) for value in scene_signature(drift[600:1200])]
    repository = ModelRepository(tmp_path / "versions")
    lineage = Lineage(other.checkpoint_sha256, tags={"scene": scene})
    assert repository.publish("model", folder, lineage) == 1
    if activated:
        repository.activate("model", 1)
    with adapting(served, told, replace(SETTINGS, scene_tolerance=9.0), repository=repository) as adaptation:
        assert told.kinds == ["failed"] and adaptation.status.version == 0
        assert "'q' was made for backend openvino-bf16, but composition 'default' runs on torch" in (
            told.changes[0].message
        )
        fed_until(adaptation, told, drift[:1200], "activated")
    assert told.kinds.count("failed") == 1 and "activated" in told.kinds


def test_a_version_made_for_a_lower_promise_proves_itself_anew(
    served: Served, drift: Tensor, told: Told, tmp_path: Path
) -> None:
    """Compositions share a repository, but not what is proven."""
    repository = ModelRepository(tmp_path / "versions")
    with adapting(
        served, told, repository=repository, standing=tmp_path / "standing-default.json"
    ) as adaptation:
        fed_until(adaptation, told, drift[:1200], "activated")
        assert adaptation.status.version >= 1
    chosen = replace(served.composition, name="careful", accuracy_target=0.99, certificate=None)
    careful, again = replace(served, composition=chosen), Told()
    settings = replace(SETTINGS, accuracy=None)
    standing = tmp_path / "standing-careful.json"
    with adapting(careful, again, settings, repository=repository, standing=standing) as adaptation:
        assert again.kinds == ["resumed", "probation"]
        assert not any(answer.hit for answer in feed(adaptation, drift[1000:1050]))
        assert adaptation.status.proof.startswith("0.99: ")


class KilledError(BaseException):
    """The process dies here."""


@pytest.mark.parametrize("moment", ["publish", "activate"])
def test_killed_while_publishing_the_old_version_serves_and_the_next_attempt_succeeds(
    served: Served, drift: Tensor, told: Told, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = ModelRepository(tmp_path / "versions")

    def killed(*_: object, **__: object) -> None:
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(
            repository._place if moment == "publish" else repository,
            "publish" if moment == "publish" else "activate",
            killed,
        )
        with pytest.raises(KilledError), adapting(served, told, repository=repository) as adaptation:
            list(feed(adaptation, drift[:1200]))
    again = Told()
    with adapting(served, again, repository=ModelRepository(tmp_path / "versions")) as adaptation:
        assert adaptation.status.version == 0
        assert again.kinds == ([] if moment == "publish" else ["probation"])
        fed_until(adaptation, again, drift[:1200], "activated", "reused")
        assert adaptation.status.version >= 1 and {"activated", "reused"} & set(again.kinds)


def test_a_full_disk_keeps_the_old_version(
    served: Served, drift: Tensor, told: Told, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    repository = ModelRepository(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise StorageError("disk full")

    monkeypatch.setattr(repository, "publish", full)
    with adapting(served, told, repository=repository) as adaptation:
        answers = fed_until(adaptation, told, drift[:500], "failed", more=50)
    assert "failed" in told.kinds and {answer.version for answer in answers} == {0}


def test_a_setting_that_cannot_be_opened_is_told_once_and_the_base_model_goes_on(
    served: Served, drift: Tensor, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StorageError("disk full")

    monkeypatch.setattr(Deployments, "at", full)
    with adapting(served, told) as adaptation:
        answers = fed_until(adaptation, told, drift[:900], "failed", more=150)
    stopped = told.first("alarm").request
    assert 1 <= told.kinds.count("failed") <= told.kinds.count("probation")
    assert "activated" not in told.kinds and not any(answer.hit for answer in answers[stopped:])


def fed_as_by_a_camera(adaptation: Adaptation, told: Told, inputs: Tensor, until: str) -> list[Answered]:
    """The answers up to the first change of the kind `until`: background work has time in between."""
    answers: list[Answered] = []
    for answer in feed(adaptation, inputs):
        answers.append(answer)
        if len(answers) % 20 == 0:
            assert adaptation.wait(LONG_S)
        if until in told.kinds:
            break
    return answers


def test_live_it_adapts_in_the_background_and_counts_everything(
    served: Served, drift: Tensor, told: Told
) -> None:
    """Live, chance decides what is audited: the alarm or the lower hit rate begins the retraining."""
    with adapting(served, told, deterministic=False) as adaptation:
        answers = fed_as_by_a_camera(adaptation, told, drift[:1200].repeat(6, 1, 1, 1), "activated")
        status = adaptation.status
    assert {"retraining", "probation", "activated"} <= set(told.kinds)
    activated = told.first("activated").request
    assert told.first("retraining").request < activated
    alarms = [change.request for change in told.changes if change.kind == "alarm"]
    stopped = min([*alarms, activated])
    # The alarm comes from the background: one request may be under way.
    assert not any(answer.hit for answer in answers[stopped + 1 : activated])
    assert status.left_out == 0 and status.requests == len(answers) and status.version >= 1


def test_live_an_alarm_stops_the_caches(served: Served, drift: Tensor, told: Told) -> None:
    settings = replace(SETTINGS, enabled=False, audit_budget=0.5)
    with adapting(served, told, settings, deterministic=False) as adaptation:
        fed_as_by_a_camera(adaptation, told, drift[:1200].repeat(6, 1, 1, 1), "alarm")
        assert adaptation.wait(LONG_S) and told.kinds == ["alarm"]
        assert not any(answer.hit for answer in feed(adaptation, drift[:200], begin_s=1e3))


def test_background_work_that_fails_is_told_and_the_next_is_done() -> None:
    errors: list[Exception] = []
    done = threading.Event()
    worker = Background("test", limit=2, on_error=errors.append)
    worker.submit(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    worker.submit(done.set)
    assert done.wait(LONG_S) and worker.wait(LONG_S)
    assert isinstance(errors[0], ZeroDivisionError)
    worker.close(LONG_S)
    assert not worker.submit(done.set)


def test_a_place_that_was_reserved_is_kept_whatever_else_waits() -> None:
    """Whether there is time is decided once: what was drawn is never dropped later."""
    gate, done = threading.Event(), list[int]()
    worker = Background("test", limit=2)
    try:
        assert worker.reserve() and worker.reserve() and not worker.reserve()
        assert not worker.submit(gate.set), "the places are taken"
        worker.release()
        assert worker.submit(gate.wait)  # type: ignore[arg-type]
        assert worker.submit(lambda: done.append(1), reserved=True)
        gate.set()
        assert worker.wait(LONG_S) and done == [1]
    finally:
        worker.close(5.0)
    assert not worker.reserve()


def test_jobs_are_late_if_several_wait_and_the_first_has_for_two_seconds() -> None:
    gate, now_s, late = threading.Event(), [0.0], list[bool]()
    worker = Background("test", limit=100, clock=lambda: now_s[0])
    try:
        running = threading.Event()

        def held() -> None:
            running.set()
            gate.wait()

        worker.submit(held)
        assert running.wait(LONG_S)
        for _ in range(7):
            worker.submit(lambda: None)
        for jobs, at_s in ((0, 9.0), (1, 2.0), (0, 2.5)):
            for _ in range(jobs):
                worker.submit(lambda: None)
            now_s[0] = at_s
            late.append(worker.late)
        assert late == [False, False, True]
        gate.set()
        assert worker.wait(LONG_S) and not worker.late
    finally:
        gate.set()
        worker.close(5.0)


def test_while_audits_are_late_none_are_added_and_the_base_model_answers(
    served: Served, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if nothing hit any more, every request was sampled then: audits did not catch up for minutes."""
    inputs = stream(FAMILIAR, 500, seed=3)
    with adapting(served, told) as adaptation:
        list(feed(adaptation, inputs[:200]))
        before = adaptation.status
        monkeypatch.setattr(Inline, "late", True)
        answers = list(feed(adaptation, inputs[200:400], begin_s=20.0))
        late = adaptation.status
        monkeypatch.setattr(Inline, "late", False)
        later = list(feed(adaptation, inputs[400:], begin_s=40.0))
    assert not any(answer.hit or answer.audited or answer.sampled for answer in answers)
    assert (late.audits, late.samples, late.hit_rate) == (before.audits, before.samples, before.hit_rate)
    assert late.left_out > 0 and late.resting and not before.resting
    assert np.mean([answer.hit for answer in later]) > 0.2 and told.kinds.count("resting") == 1
    assert np.mean([answer.sampled for answer in later]) < 0.7


def test_it_is_not_told_that_early_answers_wait_for_audits_where_there_are_none(
    served: Served, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Inline, "late", True)
    with adapting(served, told, replace(SETTINGS, accuracy=0.97)) as adaptation:
        list(feed(adaptation, stream(FAMILIAR, 20, seed=3)))
    assert "resting" not in told.kinds


def test_without_caches_memory_waits_for_audits_as_soon_as_it_answers(
    served: Served, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event said so, and the status never did."""
    noise = torch.randn(600, *served.engine.traced.input_shape, generator=torch.Generator().manual_seed(0))
    inputs = stream(FAMILIAR, 1, seed=5) + 0.005 * noise
    seen = []
    with adapting(without_caches(served), told, replace(SETTINGS, falls_to=0.0)) as adaptation:
        for number, x in enumerate(inputs.split(1)):
            monkeypatch.setattr(Inline, "late", number in (50, 598))
            adaptation.answer(x, time_s=0.1 * number, place="gate")
            seen.append(adaptation.status)
    assert seen[-1].recalled > 100 and [number for number, each in enumerate(seen) if each.resting] == [598]
    assert (seen[50].promise, seen[598].promise) == (None, SETTINGS.accuracy)
    assert told.first("recalling").request > 50
    assert [change.request for change in told.changes if change.kind == "resting"] == [598]


def test_other_threads_come_first_as_long_as_there_is_work_beside() -> None:
    """The collector spares what was there, and nobody waits 5 ms for the interpreter."""
    before_s = sys.getswitchinterval()
    assert gc.get_freeze_count() == 0 and before_s > 1e-3
    workers = [Background("test", limit=1), Background("test", limit=1)]
    for worker in workers:
        assert gc.get_freeze_count() > 0 and sys.getswitchinterval() < 1e-4
        worker.close(LONG_S)
        worker.close(LONG_S)
    assert gc.get_freeze_count() == 0 and sys.getswitchinterval() == before_s


@pytest.mark.parametrize(
    "wrong",
    [
        {"sampling": 0.0},
        {"audit_budget": 2.0},
        {"interval_s": 0.0},
        {"margin": 1.0},
        {"delay_s": -1.0},
        {"places": 0},
        {"window_inputs": 139},  # a quarter is held out: hardly two stretches of ten
        {"window_inputs": 349, "held_share": 0.1},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(AdaptError):
        AdaptSettings(**wrong)  # type: ignore[arg-type]


# What may answer -------------------------------------------------------------------------------------------


def test_a_trial_goes_on_after_a_restart(served: Served, drift: Tensor, told: Told, tmp_path: Path) -> None:
    kept: Any = {"standing": tmp_path / "standing.json", "repository": ModelRepository(tmp_path / "versions")}
    with adapting(served, told, **kept) as adaptation:
        for _ in feed(adaptation, drift[:1200]):
            if "probation" in told.kinds and len([a for a in told.audits if a.shadow]) >= 20:
                break
        before = adaptation.status.proof
        adaptation._succession.standing.save()  # as happens every second
    again = Told()
    with adapting(served, again, **kept) as adaptation:
        assert again.kinds == ["probation"]
        assert adaptation.status.proof == before and not before.startswith("0.9: 0 of")
        assert adaptation.status.version == 0


def test_stopped_caches_are_still_stopped_after_a_restart(
    served: Served, drift: Tensor, told: Told, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, enabled=False, audit_budget=0.5)
    with adapting(served, told, settings, standing=tmp_path / "standing.json") as adaptation:
        fed_until(adaptation, told, drift[:1000], "alarm")
        assert adaptation.status.state == "stopped"
    again = Told()
    with adapting(served, again, settings, standing=tmp_path / "standing.json") as adaptation:
        assert adaptation.status.state == "stopped" and again.kinds == ["probation"]
        assert not any(answer.hit for answer in feed(adaptation, drift[:50]))


@pytest.mark.parametrize("why", ["more is asked for", "surer", "never certified", "certified to be worse"])
def test_what_is_not_covered_by_a_certificate_proves_itself_first(
    served: Served, told: Told, why: str
) -> None:
    settings, chosen = replace(SETTINGS, enabled=False, audit_budget=0.5), served.composition
    if why == "more is asked for":
        settings = replace(settings, accuracy=0.97)
    elif why == "surer":
        settings = replace(settings, confidence=0.99)
    elif why == "never certified":
        chosen = replace(chosen, certificate=None)
    else:
        assert chosen.certificate is not None
        chosen = replace(chosen, certificate=replace(chosen.certificate, deployed=None))
    with adapting(replace(served, composition=chosen), told, settings) as adaptation:
        answers = fed_until(adaptation, told, stream(FAMILIAR, 1500, seed=3), "returned", more=100)
        proof = adaptation.status.proof
    assert told.kinds[0] == "probation" and not any(answer.hit for answer in answers[:50])
    if "returned" in told.kinds:
        assert any(answer.hit for answer in answers[told.first("returned").request :])
    else:
        assert "of about" in proof and not any(answer.hit for answer in answers)


def test_the_time_of_a_proof_begins_with_its_first_request(served: Served, told: Told) -> None:
    """Not with the time of before any request: `time_s` may be seconds since 1970."""
    settings = replace(SETTINGS, enabled=False, audit_budget=1.0, accuracy=0.8)
    never = replace(served, composition=replace(served.composition, certificate=None))
    with adapting(never, told, settings) as adaptation:
        for _ in feed(adaptation, stream(FAMILIAR, 90, seed=3), 1e9):
            pass
        assert told.kinds == ["probation"] and "in at least 10 s" in adaptation.status.proof
        for _ in feed(adaptation, stream(FAMILIAR, 30, seed=4), 1e9 + 9.0):
            pass
        assert "returned" in told.kinds


def test_the_budget_for_audits_counts_what_memory_answers(served: Served, told: Told) -> None:
    """With caches stopped, memory's answers were hidden from the draws: the base model ran for 89 %."""
    pictures = stream(STRANGE, 4, seed=5)
    noise = torch.randn(2000, *pictures.shape[1:], generator=torch.Generator().manual_seed(0))
    inputs = pictures.repeat_interleave(25, 0).repeat(20, 1, 1, 1) + 0.005 * noise
    settings = replace(SETTINGS, sampling=0.01, audit_budget=0.1, falls_to=0.0)
    with adapting(served, told, settings) as adaptation:
        answers = [
            adaptation.answer(x, time_s=0.1 * at, source="test", place="gate")
            for at, x in enumerate(inputs.split(1))
        ]
    early = [answer for answer in answers if answer.hit]
    assert len(early) > 300
    share = np.mean([answer.audited for answer in answers])
    assert share <= 0.109 + 3.0 * (0.109 * 0.891 / len(answers)) ** 0.5


class Blurred(Engine):
    """An engine whose network, as one of reduced precision, now and then answers otherwise by itself."""

    def base(self, x: Tensor) -> list[Prediction]:
        answers = super().base(x)
        return [each._replace(class_index=0) if each.class_index == 7 else each for each in answers]

    def __call__(self, x: Tensor) -> list[Prediction]:
        return self.base(x)

    def inline(self, x: Tensor) -> list[Prediction]:
        return self.base(x)


def in_reduced_precision(served: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    traced = served.engine.traced
    monkeypatch.setattr(references, "is_exact", lambda _: False)
    base, reference = (partial(kind, traced, [], outputs_kind="logits") for kind in (Blurred, Engine))
    monkeypatch.setattr(references, "base_of", lambda _: base())
    for module in (references, adaptation_module):
        monkeypatch.setattr(module, "reference_of", lambda _: reference())
    given = {"outputs_kind": "logits", "preprocessing": served.engine.preprocessing}
    return replace(served, engine=Blurred(traced, served.engine.exits, **given))


@pytest.mark.parametrize("exact", [True, False])
def test_a_result_claims_agreement_only_of_the_references_own_answers(
    served: Served, told: Told, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    """In reduced precision a miss that disagreed was reported as agreed."""
    shown: Any = Shown(
        Frame(np.full((8, 8, 3), 10 * number, np.uint8), number, 0.1 * number, "gate") for number in range(20)
    )
    chosen = served if exact else in_reduced_precision(served, monkeypatch)
    settings = replace(SETTINGS, enabled=False, audit_budget=1.0)
    with adapting(chosen, told, settings) as adaptation:
        results = [streamed.results[0] for streamed in classify(adaptation, shown)]
    missed = {result.agreed for result in results if result.audited and result.exit == "base"}
    assert missed == ({True} if exact else {None})
    assert {result.agreed for result in results if result.exit != "base"} <= {None}


class Shown(list[Frame]):
    """Pictures as a source shows them."""

    state = SourceState.RUNNING


def test_in_reduced_precision_the_reference_is_what_was_promised(
    served: Served, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own losses count, misses included; and where caches are stopped the reference answers."""
    blurred = in_reduced_precision(served, monkeypatch)
    inputs = stream((6, 7, 8), 900, seed=4)
    base = served.engine.reference(inputs).tolist()
    with adapting(blurred, told, replace(SETTINGS, enabled=False, audit_budget=0.6)) as adaptation:
        answers = list(feed(adaptation, inputs))
    assert told.kinds[0] == "alarm"  # nothing ever left early
    stopped = told.first("alarm").request
    assert [answer.prediction.class_index for answer in answers[stopped:]] == base[stopped:]
    assert {answer.agreed for answer in answers[:stopped]} == {None}  # each of them may be wrong
    assert all(answer.agreed for answer in answers[stopped:])
    wrong = [audit for audit in told.audits if not audit.agreed]
    assert wrong and all(audit.exit == "base" for audit in wrong)


def test_where_too_little_was_sampled_it_is_told(served: Served, told: Told) -> None:
    settings = replace(SETTINGS, window_inputs=None, sampling=0.05, interval_s=20.0, falls_to=0.0)
    with adapting(served, told, settings) as adaptation:
        needed = adaptation._renewal.least_inputs
        assert (adaptation.settings.window_inputs or 0) >= needed
        list(feed(adaptation, stream(FAMILIAR, 450, seed=3)))
    skipped = told.first("skipped")
    assert str(needed) in skipped.message and told.kinds.count("skipped") == 2


def test_where_the_window_is_too_short_for_so_few_pictures_it_is_told(served: Served, told: Told) -> None:
    """At a picture a minute, an hour never has enough samples, and that was all it said."""
    settings = replace(SETTINGS, window_s=3600.0, interval_s=600.0, falls_to=0.0, recall=False)
    with adapting(served, told, settings) as adaptation:
        for number, x in enumerate(stream(FAMILIAR, 90, seed=3).split(1)):
            adaptation.answer(x, time_s=60.0 * number)
    said = [change.message for change in told.changes if change.kind == "skipped"]
    advice = ", but only those of the last 3600 s are kept: set window_s to more"
    assert len(said) >= 8 and [each.endswith(advice) for each in said[:5]] == [False] * 5
    assert said[-1].endswith(f"200 are needed{advice}")


def test_of_a_frozen_camera_no_longer_window_has_more_samples(served: Served, told: Told) -> None:
    """Its picture is kept once: none was dropped for its age, and `window_s` changes nothing."""
    settings = replace(SETTINGS, window_s=3600.0, interval_s=600.0, falls_to=0.0, recall=False)
    with adapting(served, told, settings) as adaptation:
        for number, x in enumerate(stream(FAMILIAR, 1, seed=3).repeat(90, 1, 1, 1).split(1)):
            adaptation.answer(x, time_s=60.0 * number, place="gate")
    said = [change.message for change in told.changes if change.kind == "skipped"]
    assert len(said) >= 8 and set(said) == {"1 samples, 200 are needed"}


@pytest.mark.parametrize(("times", "kinds"), [(1.5, {"retraining"}), (0.5, {"retraining", "failed"})])
def test_a_retraining_takes_no_more_memory_than_there_is(
    served: Served,
    told: Told,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    times: float,
    kinds: set[str],
) -> None:
    """With a network as large as ResNet-50 the first retraining took 14 GB: the stream was killed."""
    blocks = ("blocks.0", "blocks.1", "blocks.2")  # tried, and of the composition
    sizes = [4 * prod(served.engine.traced.hidden_shapes[block]) for block in blocks]
    fits = (200 * times + 0.5) * (sum(sizes) + 2 * max(sizes))
    monkeypatch.setattr("gati.adaptation.window.available_bytes", lambda: int(fits / 0.7))
    trained: list[int] = []

    def watched(network: Served, window: Window, **options: Any) -> Retrained:
        trained.append(len(window))
        return retrain(network, window, **options)

    monkeypatch.setattr(renewal, "retrain", watched)
    settings = replace(SETTINGS, sampling=1.0, interval_s=40.0, falls_to=0.0, recall=False)
    with adapting(served, told, settings) as adaptation:
        list(feed(adaptation, stream(FAMILIAR, 450, seed=3)))
    assert kinds <= set(told.kinds) and ("failed" in kinds) == ("failed" in told.kinds)
    if "failed" in kinds:
        assert "to train on 100 samples, 200 are needed" in told.first("failed").message and not trained
    else:
        assert trained == [300]
        assert "memory is left to retrain on the newest 300 of 4" in caplog.text


def test_original_data_that_are_held_already_are_counted_once(
    served: Served, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were subtracted again from what is available, which they no longer are, and failed it."""
    blocks = ("blocks.0", "blocks.1", "blocks.2")
    sizes = [4 * prod(served.engine.traced.hidden_shapes[block]) for block in blocks]
    copies, held = 2 * max(sizes), 0

    def available() -> int:
        free = 220 * (sum(sizes) + copies) + 100 * (sum(sizes) + copies) - held
        return int((free + 1) / 0.7)

    def originals(*_: Any, **__: Any) -> Window:
        return window_of(served.engine.traced, stream(FAMILIAR, 100, seed=9))

    trained: list[int] = []

    def watched(network: Served, window: Window, **options: Any) -> Retrained:
        nonlocal held
        held = 100 * sum(sizes)
        trained.append(len(window))
        return retrain(network, window, **options)

    monkeypatch.setattr("gati.adaptation.window.available_bytes", available)
    monkeypatch.setattr(renewal, "original_sample", originals)
    monkeypatch.setattr(renewal, "retrain", watched)
    settings = replace(
        SETTINGS, sampling=1.0, interval_s=25.0, falls_to=0.0, recall=False, original_inputs=100
    )
    with adapting(served, told, settings) as adaptation:
        for _ in feed(adaptation, stream(FAMILIAR, 800, seed=3)):
            if len(trained) == 2:
                break
    assert trained == [220, 220] and "failed" not in told.kinds


def test_at_a_high_target_it_retrains_and_serves_as_far_as_is_proven(served: Served, told: Told) -> None:
    """At 0.99 700 samples were kept and 1,196 needed: it never retrained, and said nothing."""
    settings = replace(
        SETTINGS, window_inputs=None, accuracy=0.99, confidence=0.8, sampling=0.5, interval_s=20.0
    )
    with adapting(served, told, settings) as adaptation:
        answers = fed_until(adaptation, told, stream((5, 6), 2600, seed=2), "activated", more=300)
        proof = adaptation.status.proof
    assert "retraining" in told.kinds and "skipped" not in told.kinds
    activated = told.first("activated").request
    assert not any(answer.hit for answer in answers[told.first("probation").request : activated])
    assert np.mean([answer.hit for answer in answers[activated:]]) > 0.1
    assert not proof or proof.startswith("0.99: ")


def test_a_promise_for_every_class_is_not_dropped_silently(served: Served, told: Told) -> None:
    every = replace(served, composition=replace(served.composition, per_class=True))
    with pytest.raises(AdaptError, match="in every class.*do not adapt"):
        adapting(every, told)
