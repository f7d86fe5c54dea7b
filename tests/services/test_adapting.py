"""What `gati serve` shows of adaptation, when it looks for better caches, and how it opens what was found."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gati.adaptation.deployments import Deployed
from gati.adaptation.renewal import RenewalOutcome
from gati.composition import engines
from gati.composition.load import Served
from gati.errors import DataError
from gati.exploration.library import SELECT, Library
from gati.samples.record import Record
from gati.samples.store import Outcome, RecordStore
from gati.versions.engines import Graphs, open_version, save_version
from gati.versions.lineage import Lineage
from gati.versions.repository import ModelRepository
from services.adaptation.model import ModelAdaptation
from services.adaptation.settings import AdaptationSettings, AdaptedModel
from services.inference.opening import Opener
from services.inference.settings import InferenceSettings
from services.scheduler import adapting
from services.wire.codec import Service
from services.wire.gen import Adaptation
from services.wire.server import WireServer
from tests.adaptation.deployed import FAMILIAR, make_deployed, stream
from tests.conftest import REPOSITORY
from tests.waiting import LONG_S


@pytest.mark.slow
def test_its_process_imports_nothing_that_starts_threads_before_it_gives_way() -> None:
    """Threads that torch and BLAS started at import competed with requests for good."""
    program = (
        "import sys, services.adaptation.__main__; "
        "sys.exit(bool({'torch', 'numpy', 'sqlalchemy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=False).returncode == 0


def adapted(served: Served, folder: Path) -> AdaptedModel:
    return AdaptedModel(
        name="digits",
        library=served.library.directory,
        composition="default",
        records=f"sqlite:///{folder}/records.db",
        repository=str(folder / "versions"),
    )


def test_a_slow_adaptation_process_hides_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs when nothing else wants a core, so on a busy machine it may not answer in time."""
    monkeypatch.setattr(adapting, "_TIMEOUT_S", LONG_S)

    async def never() -> Any:
        await asyncio.Event().wait()

    async def main() -> None:
        server = WireServer(Service(Adaptation), {"status": never})
        port = await server.start("127.0.0.1", 0)

        async def address() -> str:
            monkeypatch.setattr(adapting, "_TIMEOUT_S", 0.2)  # for the call alone, not for connecting
            return f"127.0.0.1:{port}"

        supervised: Any = SimpleNamespace(address=address, cause="")
        found = await adapting.adaptation_status({}, supervised)
        assert found["models"] == []
        assert found["error"].startswith("the adaptation process does not answer: no answer within 200 ms")
        await server.drain(0.0)

    asyncio.run(main())


def test_time_that_others_take_is_not_that_of_training(tmp_path: Path) -> None:
    """Training was cut short by the time for which requests pause the process."""
    adaptation = ModelAdaptation(adapted(make_deployed(tmp_path), tmp_path), AdaptationSettings(models=()))
    assert adaptation._renewal._clock is time.thread_time
    adaptation.close()


def test_a_clock_that_is_set_back_postpones_no_attempt(tmp_path: Path) -> None:
    """An hour back, and nothing was tried for more than an hour."""
    served = make_deployed(tmp_path)
    model, began_s = adapted(served, tmp_path), time.time()
    with RecordStore.open(model.records) as store:
        store.add([Record(np.zeros((1, 8, 8), np.float32), "input", 1, began_s, "digits", source="default")])
    settings = AdaptationSettings(models=(model,), interval_s=600.0)
    now_s, steady_s = began_s, 50.0
    adaptation = ModelAdaptation(model, settings, now=lambda: now_s, clock=lambda: steady_s)
    adaptation.look()
    now_s, steady_s = began_s - 3600.0, 350.0
    adaptation.look()
    assert adaptation.status().outcome == "" and adaptation.status().next_s == 300.0
    now_s, steady_s = now_s + 301.0, 651.0
    adaptation.look()
    assert adaptation.status().outcome == "skipped"
    adaptation.close()


def test_a_version_that_never_came_to_answer_is_not_brought_back_again_and_again(tmp_path: Path) -> None:
    """It knew the scene, but was not proven, or not faster: nothing was ever retrained."""
    served, now_s = make_deployed(tmp_path), time.time()
    kept: list[Record] = []
    tried: list[set[int]] = []
    model = adapted(served, tmp_path)
    settings = AdaptationSettings(models=(model,), interval_s=600.0)
    adaptation = ModelAdaptation(model, settings, now=lambda: now_s, clock=lambda: now_s)
    adaptation._store.window = lambda *_, **__: list(kept)  # type: ignore[method-assign]
    adaptation._store.outcomes = lambda *_: list(kept)  # type: ignore[method-assign]
    folder = save_version(tmp_path / "v1", served.composition, served.engine.exits)
    repository = ModelRepository(tmp_path / "versions")
    number = repository.publish("digits", folder, Lineage(served.composition.checkpoint_sha256))
    known = adaptation._deployments.open(number)

    def reuses(current: Deployed, *given: Any, unproven: Any) -> RenewalOutcome:
        assert current.number == 0, "it answers"
        tried.append(set(unproven))
        return RenewalOutcome("reused", known, "it knows this scene")

    adaptation._renewal = reuses  # type: ignore[assignment]
    wrong = Record(np.zeros((1, 8, 8), np.float32), "input", 1, now_s, "digits", source="default")
    wrong = replace(wrong, exit="blocks.1", agreed=False)
    for _ in range(3):
        now_s += 3.5 * settings.interval_s
        kept.extend([replace(wrong, time_s=now_s)] * 60)
        adaptation.look()
    assert tried == [set(), {number}, {number}]
    kept.append(replace(wrong, time_s=now_s + 1.0, source=str(number), exit=None, agreed=None))
    now_s += 2.0
    adaptation.look()
    assert adaptation._unproven == set(), "it answers after all"
    adaptation.close()


def test_an_alarm_of_few_requests_is_looked_into_although_no_retraining_was_possible(tmp_path: Path) -> None:
    """Each interval with too few samples made it wait for fifty others: at 150 an hour, for ever."""
    model, began_s = adapted(make_deployed(tmp_path), tmp_path), time.time()
    kept: list[Outcome] = []
    now_s, reasons = began_s, list[str]()
    settings = AdaptationSettings(models=(model,), interval_s=600.0)
    adaptation = ModelAdaptation(model, settings, now=lambda: now_s, clock=lambda: now_s)
    adaptation._store.outcomes = lambda *_: list(kept)  # type: ignore[method-assign]
    adaptation._renewal = lambda _, samples, reason, **__: reasons.append(reason)  # type: ignore[assignment]
    for minute in range(70):
        now_s = began_s + 60.0 * minute
        kept += [Outcome(now_s, "default", "blocks.1", minute < 30)] * 2
        adaptation.look()
        if minute == 29:
            assert adaptation.status().outcome == "skipped" and not reasons
    assert reasons == ["alarm", "alarm"], "the second one has fifty samples more"
    adaptation.close()


def test_a_retraining_that_fails_in_any_way_is_told_until_another_one_ends(tmp_path: Path) -> None:
    """Of errors that were not Gati's, the next look, seconds later, told nothing any more."""
    model, now_s = adapted(make_deployed(tmp_path), tmp_path), time.time()
    adaptation = ModelAdaptation(model, AdaptationSettings(models=(model,)), now=lambda: now_s)

    def fails(*_: Any, **__: Any) -> RenewalOutcome:
        raise MemoryError("it takes 9 GiB")

    adaptation._renewal = fails  # type: ignore[assignment]
    adaptation.look(asked=True)
    adaptation.look()
    told = adaptation.status()
    assert (told.outcome, told.message, told.changed_s) == ("failed", "it takes 9 GiB", now_s)
    adaptation.close()


def test_inputs_are_read_only_to_train_on_them(tmp_path: Path) -> None:
    """Each look, every five seconds, read up to a gigabyte."""
    model = adapted(make_deployed(tmp_path), tmp_path)
    with RecordStore.open(model.records) as store:
        kept = Record(np.zeros((1, 8, 8), np.float32), "input", 1, time.time(), "digits", source="default")
        store.add([kept] * 3)
    adaptation = ModelAdaptation(model, AdaptationSettings(models=(model,)))
    read: list[int] = []
    window = adaptation._store.window

    def counted(*given: Any, **options: Any) -> list[Record]:
        found = window(*given, **options)
        read.append(len(found))
        return found

    adaptation._store.window = counted  # type: ignore[method-assign]
    adaptation.look()
    assert (adaptation.status().samples, read) == (3, [])
    adaptation.look(asked=True)
    assert read == [3] and adaptation.status().outcome == "skipped"
    adaptation.close()


def test_a_version_that_waits_for_its_proof_has_longer_than_an_interval(tmp_path: Path) -> None:
    """For two of the three intervals, the next attempt was said to be due in 0 s."""
    model, now_s = adapted(make_deployed(tmp_path), tmp_path), time.time()
    settings = AdaptationSettings(models=(model,), interval_s=600.0)
    adaptation = ModelAdaptation(model, settings, now=lambda: now_s, clock=lambda: now_s)
    due_s = []
    for _ in range(4):
        adaptation.look()
        due_s.append(adaptation.status().next_s)
        now_s += 500.0
    assert due_s == pytest.approx([600.0, 100.0, 800.0, 300.0])
    adaptation.close()


def test_after_a_rollback_the_version_that_answers_is_the_one_that_is_renewed(tmp_path: Path) -> None:
    """Its disagreements were not counted, and the one that was rolled back was retrained."""
    served, now_s = make_deployed(tmp_path), time.time()
    kept: list[Record] = []
    renewed: list[int] = []
    model = adapted(served, tmp_path)
    repository = ModelRepository(tmp_path / "versions")
    for folder in (tmp_path / "v1", tmp_path / "v2"):
        save_version(folder, served.composition, served.engine.exits)
        number = repository.publish("digits", folder, Lineage(served.composition.checkpoint_sha256))
        repository.activate("digits", number)
    settings = AdaptationSettings(models=(model,), interval_s=600.0)
    adaptation = ModelAdaptation(model, settings, now=lambda: now_s, clock=lambda: now_s)
    adaptation._store.window = lambda *_, **__: list(kept)  # type: ignore[method-assign]
    adaptation._store.outcomes = lambda *_: list(kept)  # type: ignore[method-assign]

    def renews(current: Deployed, *given: Any, unproven: Any) -> RenewalOutcome:
        renewed.append(current.number)
        return RenewalOutcome("kept", current, "nothing is better")

    adaptation._renewal = renews  # type: ignore[assignment]
    right = Record(np.zeros((1, 8, 8), np.float32), "input", 1, now_s, "digits", source="2", exit="blocks.1")
    kept.append(replace(right, agreed=True))
    adaptation.look()
    assert adaptation.status().version == 2 and not renewed
    assert repository.rollback("digits") == 1
    adaptation.look()
    assert adaptation.status().version == 1
    now_s += 100.0
    kept.extend([replace(right, source="1", agreed=False, time_s=now_s)] * 30)
    adaptation.look()
    assert renewed == [1]
    adaptation.close()


@pytest.mark.slow
def test_a_version_of_a_calibrated_backend_is_served_as_it_was_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not be opened: where versions are served, there are no inputs to calibrate on."""
    pytest.importorskip("onnxruntime")
    served, inputs = make_deployed(tmp_path), stream(FAMILIAR, 60, seed=6)
    held: Any = SimpleNamespace(images=lambda rows: inputs[rows])
    monkeypatch.setattr(engines, "held_out", lambda library: (held, np.full(len(inputs), SELECT)))
    composition = replace(served.composition, backend="onnxruntime-int8-lookups", certificate=None)
    folder = save_version(tmp_path / "v1", composition, served.engine.exits)
    made = open_version(replace(served, composition=composition), folder, graphs=Graphs(())).engine

    def gone(library: Library) -> Any:
        raise DataError("the held-out inputs are gone")

    monkeypatch.setattr(engines, "held_out", gone)
    settings = InferenceSettings(name="digits", library=served.library.directory, threads=1, workers=1)
    repository = ModelRepository(tmp_path / "versions")
    number = repository.publish("digits", folder, Lineage(composition.checkpoint_sha256))
    repository.fetch("digits", number, tmp_path / "fetched")
    opened = Opener(settings).open(None, tmp_path / "fetched")
    assert opened.retrained and opened.engine.backend == composition.backend
    for answer, other in zip(opened.engine(inputs), made(inputs), strict=True):
        assert answer.exit == other.exit
        torch.testing.assert_close(answer.probabilities, other.probabilities)
