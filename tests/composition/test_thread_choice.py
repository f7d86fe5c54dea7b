"""How many threads run the network: timed, kept, and used for all that is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gati.cli import run
from gati.composition import compose as composing
from gati.composition import pareto as frontier
from gati.composition import threads
from gati.composition.backends import choose_backend
from gati.composition.compose import compose
from gati.composition.costs import as_composed
from gati.composition.pareto import pareto
from gati.composition.pieces import Pieces
from gati.composition.plans import Settings
from gati.composition.threads import fastest_number, fewest_as_fast, numbers_to_try, using_threads
from gati.cores import core_count
from gati.costs import graph as graph_costs
from gati.costs import hardware
from gati.costs.hardware import conditions_here
from gati.engine.backends import Graph
from gati.errors import BackendError
from gati.exploration.library import Library
from gati.types import Trial, TrialId
from tests.composition.libraries import make_library
from tests.engine.cores import grant
from tests.engine.networks import BLOCKS
from tests.engine.served import make_served


@pytest.fixture
def library(tmp_path: Path) -> Library:
    found = Library(make_served(tmp_path))
    found.write_trials([Trial(TrialId("trial-0"), 0, BLOCKS[0], "pool-linear(64)", "trained")], [])
    return Library.open(found.directory)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """A machine of four cores; times of a backend's network on 1, 2 and 4 threads are what the test sets."""
    found: dict[str, list[float]] = {}

    def times(library: Library, backend: str, pieces: Pieces, notes: list[str]) -> dict[int, float]:
        if backend not in found:
            raise BackendError(f"{backend} fails")
        return dict(zip((1, 2, 4), found.pop(backend), strict=True))

    monkeypatch.setattr(threads, "_times", times)
    monkeypatch.setattr("gati.cores.usable_cores", lambda: set(range(4)))
    return found


@pytest.mark.parametrize(
    ("cores", "numbers"),
    [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (64, [1, 2, 4, 8, 16, 32, 64])],
)
def test_powers_of_two_and_all_cores_are_tried(cores: int, numbers: list[int]) -> None:
    assert numbers_to_try(cores) == numbers


def test_fewer_threads_win_where_more_are_hardly_faster() -> None:
    assert fewest_as_fast({1: 4.0, 2: 2.03, 4: 2.0, 8: 3.0}) == 2
    assert fewest_as_fast({1: 4.0, 2: 2.05, 4: 2.0, 8: 3.0}) == 4
    assert fewest_as_fast({1: 1.0}) == 1


def test_the_fastest_engine_decides_and_is_timed_once(
    library: Library, timed: dict[str, list[float]]
) -> None:
    timed |= {"torch": [3.0, 2.0, 4.0], "openvino": [1.5, 1.2, 1.0]}
    names = ["torch", "openvino", "onnxruntime"]
    assert fastest_number(library, names, Pieces(library)) == 4
    assert fastest_number(library, names, Pieces(library)) == 4, (
        "the times are kept: none are left to be told"
    )
    assert fastest_number(library, names[:1], Pieces(library)) == 2
    with pytest.raises(
        BackendError, match="no number of threads can be chosen on onnxruntime; give a number"
    ):
        fastest_number(library, ["onnxruntime"], Pieces(library))


def test_times_of_other_software_are_measured_again(
    library: Library, timed: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed["torch"] = [1.0, 2.0, 3.0]
    assert fastest_number(library, ["torch"], Pieces(library)) == 1
    monkeypatch.setattr(hardware, "software", lambda: "torch 99")
    timed["torch"] = [3.0, 2.0, 1.0]
    assert fastest_number(library, ["torch"], Pieces(library)) == 4


def test_times_of_more_cores_than_are_usable_are_measured_again(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a library that was composed on all cores, a container with a quota of three took eight threads."""
    told: list[int] = []

    def times(library: Library, backend: str, pieces: Pieces, notes: list[str]) -> dict[int, float]:
        told.append(core_count())
        return {count: 1.0 / count for count in numbers_to_try(core_count())}

    monkeypatch.setattr(threads, "_times", times)
    monkeypatch.setattr("gati.cores.usable_cores", lambda: set(range(8)))
    assert fastest_number(library, ["torch"], Pieces(library)) == 8
    grant(3, tmp_path, monkeypatch)
    assert fastest_number(library, ["torch"], Pieces(library)) == 3
    grant(1, tmp_path, monkeypatch)
    assert fastest_number(library, ["torch"], Pieces(library)) == 1
    assert told == [8, 3], "a smaller number of threads has been timed"


def test_on_a_gpu_no_number_is_timed_and_a_quota_holds(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all threads of the machine, other than explore used, everything was measured again."""
    profile = replace(library.manifest.profile, device="cuda:0")
    library.write_manifest(replace(library.manifest, profile=profile))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    grant(2, tmp_path, monkeypatch)
    with using_threads(4):
        assert fastest_number(library, ["torch"], Pieces(library)) == 2


def test_times_that_other_programs_disturbed_are_used_but_not_kept(
    library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def disturbed(library: Library, backend: str, pieces: Pieces, notes: list[str]) -> dict[int, float]:
        notes.append("the measurement stayed disturbed")
        return {1: 1.0, 2: 2.0}

    monkeypatch.setattr("gati.cores.usable_cores", lambda: set(range(2)))
    monkeypatch.setattr(threads, "_times", disturbed)
    assert fastest_number(library, ["torch"], Pieces(library)) == 1
    assert "may be wrong, and will be timed again: the measurement stayed disturbed" in caplog.text
    monkeypatch.setattr(threads, "_times", lambda *_: {1: 2.0, 2: 1.0})
    assert fastest_number(library, ["torch"], Pieces(library)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_each_number_is_timed_with_that_many_threads(
    library: Library, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    before, made, ran = torch.get_num_threads(), [], []
    monkeypatch.setattr("gati.cores.usable_cores", lambda: set(range(3)))
    plain = threads.plain_graph

    def making(*given) -> Graph:
        made.append(torch.get_num_threads())
        return plain(*given)

    def timing(graphs: Sequence[Graph], x: torch.Tensor, notes: list[str]) -> list[float]:
        for each in graphs:
            each.answer(x)
            ran.append(torch.get_num_threads())
        return [3.0, 1.0, 2.0]

    monkeypatch.setattr(threads, "plain_graph", making)
    monkeypatch.setattr(graph_costs, "by_turns_ms", timing)
    assert fastest_number(library, [backend], Pieces(library)) == 2
    assert (ran if backend == "torch" else made) == [1, 2, 3]
    assert torch.get_num_threads() == before


@pytest.mark.slow
def test_all_is_measured_with_the_number_that_is_asked_for(library: Library) -> None:
    """Also what `explore` measured, with another number: its latencies are no measure for these."""
    count = library.manifest.profile.threads + 1
    with using_threads(count):
        asked = Settings(backend="torch", threads=count)
        found = choose_backend(library, asked)
        assert found.manifest.profile.conditions == conditions_here("cpu")
        assert choose_backend(library, asked).manifest.profile == found.manifest.profile, "kept"
    assert found.manifest.profile.threads == count
    assert choose_backend(library, Settings(backend="torch")) is library
    conditions = found.manifest.profile.conditions
    assert as_composed(library, "torch", conditions).manifest.profile == found.manifest.profile
    assert as_composed(library, "torch", library.manifest.profile.conditions) is library


@pytest.mark.slow
def test_a_composition_says_with_how_many_threads_it_was_measured(tmp_path: Path) -> None:
    library = make_library(tmp_path / "library", quality=6.0)
    known = library.manifest.profile.threads
    with using_threads(known + 1):
        composition = compose(library.directory, accuracy=0.95, backend="torch", threads=known)
        assert torch.get_num_threads() == known + 1
    assert composition.measured_on is not None and composition.measured_on.threads == known


def test_a_library_is_composed_with_the_threads_it_was_explored_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the function as by the command: latencies of other numbers cannot be compared."""
    library = make_library(tmp_path / "library")
    here, explored = torch.get_num_threads(), torch.get_num_threads() + 2
    manifest = library.manifest
    library.write_manifest(replace(manifest, profile=replace(manifest.profile, threads=explored)))
    found: list[int] = []

    def told(*_: object) -> None:
        found.append(torch.get_num_threads())
        raise BackendError("enough")

    for module in (composing, frontier):
        monkeypatch.setattr(module, "choose_backend", told)
    monkeypatch.setattr("gati.cores.usable_cores", lambda: set(range(64)))
    for set_for_all in (False, True):
        monkeypatch.setenv("OMP_NUM_THREADS", str(here))
        if not set_for_all:
            monkeypatch.delenv("OMP_NUM_THREADS")
        for ask in (compose, pareto):
            with pytest.raises(BackendError, match="enough"):
                ask(library.directory)
        assert run(["compose", str(library.directory)]) == BackendError.exit_status
        assert found == [here if set_for_all else explored] * 3
        found.clear()
    monkeypatch.delenv("OMP_NUM_THREADS")
    for backend, count in (("auto", here), ("torch", here), ("onnxruntime", explored)):
        with pytest.raises(BackendError, match="enough"):
            compose(library.directory, objective="full", backend=backend)
        assert found.pop() == count, "measured only on other backends than that of explore"
    assert torch.get_num_threads() == here


def test_a_number_that_no_process_can_have_is_refused(tmp_path: Path) -> None:
    library = make_library(tmp_path / "library")
    for count in (0, 1025):  # torch ends a process that has far too many
        with pytest.raises(BackendError, match=f"threads is {count}; give 1 to 1024, or auto"):
            compose(library.directory, threads=count)
