"""An engine runs on the number of threads that its composition was measured with."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gati
from gati.composition.load import load, open_served
from gati.composition.threads import using_threads
from gati.costs.hardware import conditions_here, cpu_name
from gati.engine import threads as engine_threads
from gati.engine.backends import BACKENDS, Graph, GraphBackend, openvino
from gati.engine.engine import Engine
from gati.engine.exits import EngineExit
from gati.engine.threads import limit_threads, on_granted_threads, one_thread, takes_every_core
from gati.errors import DataError
from gati.types import Conditions
from services.inference.opening import Opener
from services.inference.settings import InferenceSettings
from tests.engine.cores import Cores, grant
from tests.engine.networks import CLASSES, traced_network
from tests.engine.served import SOURCE, exit_at, images, rewrite
from tests.engine.test_graph_backends import exits, requests
from tests.waiting import LONG_S

OURS, RECORDED = 3, 2  # threads of torch here, and those that the composition was measured with


class Answering(Graph):
    def answer(self, x: Tensor) -> tuple[Tensor, int]:
        return torch.full((1, CLASSES), 1.0 / CLASSES), 0


class Counting(GraphBackend):
    """Compiles nothing, and notes for how many threads it was asked to."""

    name = "counting"
    compiled: list[int]

    def assembled(self, traced: Any, settings: Sequence[Sequence[EngineExit]], *_: Any, **__: Any) -> Any:
        yield from (b"" for _ in settings)

    def compile(self, model: bytes, threads: int | None = None) -> Graph:
        self.compiled.append(threads or torch.get_num_threads())
        return Answering()


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(OURS)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def compiled(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of threads of each graph; the composition is for a backend that compiles graphs."""
    found: list[int] = []
    monkeypatch.setattr(Counting, "compiled", found, raising=False)
    monkeypatch.setitem(BACKENDS, "counting", Counting)
    rewrite(directory, backend="counting", measured_on=measured())
    return found


def measured(**changes: Any) -> Conditions:
    return replace(Conditions(processor=cpu_name(), threads=RECORDED, software=""), **changes)


def test_an_engine_compiles_for_the_number_that_was_measured(directory: Path, compiled: list[int]) -> None:
    served = open_served(directory)
    served.engine.base(served.engine.traced.example())
    served.model.engine_of([], "other", "counting")  # as the reference of audits is made
    assert compiled == [RECORDED] * 3
    assert served.engine.threads == RECORDED
    assert torch.get_num_threads() == OURS, "the user's program keeps its own"
    with one_thread():
        served.engine.twin()  # one of many workers
    assert compiled[3:] == [1]


def test_an_engine_makes_no_folder_where_its_library_was(directory: Path, compiled: list[int]) -> None:
    """It stored a graph there, so that a library moved to that place went into the folder."""
    engine = load(directory)
    directory.rename(directory.with_name("moved"))
    engine.base(engine.traced.example())
    assert len(compiled) == 2 and not directory.exists()


def test_a_number_that_is_given_comes_first(directory: Path, compiled: list[int]) -> None:
    assert load(directory, threads=1).threads == 1
    assert compiled == [1] and torch.get_num_threads() == 1


def test_a_program_that_gives_torch_fewer_threads_is_not_given_more(
    directory: Path, compiled: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Its workers may share the cores."""
    torch.set_num_threads(1)
    with caplog.at_level(logging.WARNING):
        assert load(directory).threads == 1
    assert compiled == [1]
    (line,) = caplog.messages
    assert "measured with threads=2, but runs with 1" in line


@pytest.mark.parametrize(
    "measured_on",
    [
        pytest.param(None, id="not known"),
        pytest.param(measured(processor="another one"), id="on another processor"),
        pytest.param(measured(processor=""), id="by an older Gati, on an unknown processor"),
        pytest.param(measured(threads=5), id="on more cores than there are"),
    ],
)
def test_what_was_measured_elsewhere_says_nothing_here(
    directory: Path, compiled: list[int], measured_on: Conditions | None
) -> None:
    rewrite(directory, measured_on=measured_on)
    load(directory)
    assert compiled == [OURS]


def test_a_number_for_the_whole_process_holds(
    directory: Path, compiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(OURS))
    load(directory)
    assert compiled == [OURS]


def test_torch_keeps_its_number_and_the_log_says_so(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rewrite(directory, measured_on=measured())
    with load(directory) as engine:
        assert engine.threads == torch.get_num_threads() == OURS
    (line,) = caplog.messages
    assert line.startswith("composition 'default' was measured with threads=2, but runs with 3: ")
    caplog.clear()
    torch.set_num_threads(RECORDED)
    load(directory).close()
    assert not caplog.messages


@pytest.mark.parametrize(("cores", "here"), [(2, 2), (3, 3), (8, 3)])
def test_overlapped_lookups_have_the_cores_that_were_measured_or_as_many_as_there_are(
    cores: int, here: int, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    system = Cores.instead(4, monkeypatch)
    overlapped = replace(exit_at(0, 0.3), placement="overlapped")
    rewrite(directory, placement="overlapped", exits=(overlapped,), lookup_cores=cores)
    with load(directory) as engine, engine.twin() as twin:
        assert engine.lookup_cores == twin.lookup_cores == cores
        assert system.ours == (set(range(4 - here)), min(OURS, 4 - here))
        assert len(engine(engine.traced.example())) == 1
    assert system.ours == (set(range(4)), OURS)
    caplog.clear()
    with load(directory):  # in which those cores are reserved
        load(directory)
        served_on(directory, workers=1)
    measured_on = f"overlapped lookups of composition 'default' were measured on {cores} cores of their own"
    lacking, taking = f"{measured_on}, but have 3 here", f"{measured_on} and take as many here, though"
    expected = {2: [], 3: [taking], 8: [lacking] * 3}[cores]
    assert len(caplog.messages) == len(expected)
    assert all(map(str.startswith, caplog.messages, expected)), caplog.messages


def served_on(directory: Path, **settings: Any) -> None:
    given = {"threads_given": False, **settings}
    Opener(InferenceSettings(name="m", library=directory, threads=OURS, **given)).open("default", None)


def test_a_service_that_takes_one_request_at_a_time_uses_that_number(
    directory: Path, compiled: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    served_on(directory, workers=1)
    assert set(compiled) == {RECORDED} and not caplog.messages


@pytest.mark.parametrize(
    ("threads", "settings"),
    [
        pytest.param(RECORDED, {"threads_given": True}, id="the configuration names another number"),
        pytest.param(RECORDED, {"threads_given": None}, id="the settings of the process name another one"),
        pytest.param(4, {}, id="it shares the cores with other replicas"),
    ],
)
def test_a_service_on_another_number_says_so(
    directory: Path,
    compiled: list[int],
    caplog: pytest.LogCaptureFixture,
    threads: int,
    settings: dict[str, bool | None],
) -> None:
    rewrite(directory, measured_on=measured(threads=threads))
    with caplog.at_level(logging.WARNING, "gati.inference"):
        served_on(directory, workers=1, **settings)
    assert set(compiled) == {OURS}
    assert [message.partition(": ")[0] for message in caplog.messages] == [
        f"the latencies of this composition were measured with threads={threads}, but requests run on 3"
    ]


def test_workers_of_a_service_have_one_thread_each(
    directory: Path, compiled: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    served_on(directory)
    first, *workers = compiled
    assert set(workers) == {1} and len(workers) % OURS == 0, "as many workers as the process has cores"
    assert not caplog.messages


def test_a_version_on_fewer_threads_takes_no_workers_from_its_base_model(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were as few as its threads, for audits, probation and stopped caches."""
    overlapped = replace(exit_at(0, 0.3), placement="overlapped")
    rewrite(directory, placement="overlapped", measured_on=measured(), exits=(overlapped,))
    found: dict[bool, int] = {}

    def noted(engine: Engine, *, early: bool = True, workers: int | None = None) -> Any:
        found[early] = torch.get_num_threads()
        answered: Future[None] = Future()
        answered.set_result(None)
        return SimpleNamespace(submit=lambda x: answered, close=lambda: None)

    monkeypatch.setattr("services.inference.opening.open_runner", noted)
    served_on(directory)
    assert found == {True: RECORDED, False: OURS}


# CPU quotas: torch counts the cores of the whole machine ----------------------------------------------------


def test_a_quota_limits_the_threads_of_an_engine(
    directory: Path, compiled: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container with a quota, all threads of an engine stopped for most of each tenth of a second."""
    grant(1.2, tmp_path, monkeypatch)
    assert load(directory).threads == 1
    assert compiled == [1] and torch.get_num_threads() == 1


def test_a_number_that_is_given_comes_before_a_quota(
    directory: Path, compiled: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant(1, tmp_path, monkeypatch)
    load(directory, threads=OURS)
    assert compiled == [OURS] and torch.get_num_threads() == OURS


@pytest.mark.parametrize("given", ["3", " 3 ", "3,1", "3 , 01"])
def test_a_number_for_the_whole_process_comes_before_a_quota(
    given: str, directory: Path, compiled: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant(1, tmp_path, monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    load(directory)
    assert compiled == [OURS] and torch.get_num_threads() == OURS


@pytest.mark.parametrize("given", ["", " ", "0", "-1", "abc", "3x", "3,", "3.5"])
def test_what_openmp_ignores_is_no_number_for_the_whole_process(
    given: str, directory: Path, compiled: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP then counts all cores of the machine."""
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    load(directory)
    assert compiled == [RECORDED]
    grant(1, tmp_path, monkeypatch)
    load(directory)
    assert compiled[1:] == [1] and torch.get_num_threads() == 1


def test_a_service_keeps_the_threads_of_its_configuration_whatever_the_quota(
    directory: Path, compiled: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening its model lowered the number to the quota; versions opened later had the configuration's."""
    rewrite(directory, measured_on=measured(threads=OURS))
    grant(1, tmp_path, monkeypatch)
    opener = Opener(InferenceSettings(name="m", library=directory, threads=OURS, workers=1))
    opener.open("default", None)
    assert set(compiled) == {OURS}


@pytest.mark.parametrize("measuring", [on_granted_threads, partial(using_threads, None)])
def test_measuring_in_a_thread_with_fewer_changes_the_number_of_no_other_thread(
    measuring: Callable[[], AbstractContextManager[None]],
) -> None:
    """It set the thread's own number again, which new threads of the process then took."""

    def measured_alongside() -> None:
        limit_threads(1)
        with measuring():
            assert torch.get_num_threads() == 1

    with ThreadPoolExecutor(1) as thread:
        thread.submit(measured_alongside).result(LONG_S)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(torch.get_num_threads).result(LONG_S) == OURS


def test_a_quota_leaves_a_program_that_needs_less_alone(
    directory: Path, compiled: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading in a thread with a number of its own changes the number of no other thread."""
    grant(2, tmp_path, monkeypatch)
    torch.set_num_threads(2)

    def opened() -> int:
        limit_threads(1)
        return load(directory).threads

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(opened).result(LONG_S) == 1
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(torch.get_num_threads).result(LONG_S) == 2


def test_verbs_that_measure_heed_a_quota(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container with two of 64 cores, everything was measured with 64 threads."""
    grant(2, tmp_path, monkeypatch)
    np.savez(tmp_path / "val.npz", images=images(8))
    found: list[int] = []

    def told(*_: Any, **__: Any) -> None:
        found.append(torch.get_num_threads())
        raise DataError("enough")

    for name in (
        "exploration.explore.settings_of",
        "exploration.further.RunState",
        "evaluation.doctor.trace",
    ):
        monkeypatch.setattr(f"gati.{name}", told)
    for verb in (
        partial(gati.explore, f"{SOURCE}:Network", data=tmp_path / "val.npz", out=tmp_path / "out"),
        partial(gati.explore_more, directory, epochs=1),
    ):
        with pytest.raises(DataError, match="enough"):
            verb()
    gati.doctor(f"{SOURCE}:Network", size=(6, 6))
    assert found == [2, 2, 2] and torch.get_num_threads() == OURS


def test_measuring_heeds_a_quota_and_leaves_the_number_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant(2, tmp_path, monkeypatch)
    for measuring in (using_threads(None), on_granted_threads()):
        with measuring:
            assert torch.get_num_threads() == conditions_here("cpu").threads == 2
        assert torch.get_num_threads() == OURS


Siblings = Callable[[dict[int, str]], None]


@pytest.fixture
def siblings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Siblings:
    """Makes a machine of these hardware threads, each with the list of those on its core."""

    def make(listed: dict[int, str]) -> None:
        for core, text in listed.items():
            place = tmp_path / f"cpu{core}" / "topology"
            place.mkdir(parents=True)
            (place / "thread_siblings_list").write_text(f"{text}\n")
        monkeypatch.setattr(engine_threads, "_TOPOLOGY", tmp_path)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(listed), raising=False)
        monkeypatch.setattr(os, "cpu_count", lambda: len(listed))

    return make


def test_all_cores_are_taken_by_as_many_threads_as_there_are_cores(
    siblings: Siblings, monkeypatch: pytest.MonkeyPatch
) -> None:
    siblings({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"})
    assert [takes_every_core(count) for count in (1, 2, 3, 4)] == [False, True, True, True]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert not takes_every_core(2), "others have the rest of the machine"


def test_with_a_quota_others_have_the_rest_of_the_machine(
    siblings: Siblings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    siblings({core: str(core) for core in range(4)})
    grant(3.9, tmp_path, monkeypatch)
    assert takes_every_core(4)
    grant(3, tmp_path, monkeypatch)
    assert not takes_every_core(4)


def test_without_a_list_each_core_is_one(siblings: Siblings, tmp_path: Path) -> None:
    siblings({0: "0", 1: "1", 2: "2"})
    for each in tmp_path.rglob("thread_siblings_list"):
        each.unlink()
    assert [takes_every_core(count) for count in (2, 3)] == [False, True]


@pytest.mark.slow
@pytest.mark.skipif(not BACKENDS["openvino"].installed(), reason="openvino is not installed")
def test_a_network_on_a_part_of_the_machine_is_not_pinned(
    siblings: Siblings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenVINO pins threads to the first cores: networks of several processes would share these."""
    siblings({core: str(core) for core in range(4)})
    asked: list[dict[str, Any]] = []

    class Core:
        def compile_model(self, model: Any, device: str, settings: dict[str, Any]) -> Any:
            asked.append(settings)
            return runtime.compile_model(model, device, settings)

        def __getattr__(self, name: str) -> Any:
            return getattr(runtime, name)

    runtime = openvino.core()
    monkeypatch.setattr(openvino, "core", Core)
    for count in (1, 2, 4):
        Engine(traced_network(), exits(0.5), backend="openvino", threads=count)(requests(1))
    pinned = [(each["INFERENCE_NUM_THREADS"], each["ENABLE_CPU_PINNING"]) for each in asked]
    assert pinned == [(1, False), (2, False), (4, True)]
