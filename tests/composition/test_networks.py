"""Whole networks by turns: what `--backend auto` measures in full, and what it need not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gati.composition import backends, networks
from gati.composition.backends import choose_backend, reduced_precisions
from gati.composition.costs import CostedLibrary
from gati.composition.networks import disturbed_comparison, network_times
from gati.composition.pieces import Pieces
from gati.composition.plans import Settings
from gati.costs import hardware
from gati.engine.backends import BACKENDS, get_backend
from gati.errors import BackendError, GatiError, LibraryError, ModelError
from gati.exploration.library import Library
from gati.types import Trial, TrialId
from tests.composition.test_costs import costs_of
from tests.engine.networks import BLOCKS
from tests.engine.served import make_served

FOUND = {"onnxruntime": 2.0, "openvino": 1.0, "openvino-bf16": 3.0, "openvino-int8": 3.0}
AUTO = Settings(backend="auto", objective="exact")


@pytest.fixture
def library(tmp_path: Path) -> Library:
    found = Library(make_served(tmp_path))
    found.write_trials([Trial(TrialId("trial-0"), 0, BLOCKS[0], "pool-linear(64)", "trained")], [])
    return Library.open(found.directory)


def keep(library: Library, times: Mapping[str, float], threads: int | None = None) -> Path:
    path = library.directory / "profiles" / "networks.json"
    path.parent.mkdir(exist_ok=True)
    threads = threads or torch.get_num_threads()
    path.write_text(json.dumps({"format": 1, "threads": threads, "base_ms": times}))
    return path


def compared(names: Iterable[str], base_ms: float) -> Callable[..., networks._Compared]:
    return lambda *_: networks._Compared(base_ms=dict.fromkeys(names, base_ms))


@pytest.fixture
def no_race(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(networks, "_compare", refused)


def test_networks_are_timed_and_what_was_found_is_kept(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("openvino")
    names = ["onnxruntime", "openvino"]
    found = network_times(library, names, Pieces(library))
    assert list(found) == names and all(base_ms > 0.0 for base_ms in found.values())
    monkeypatch.setattr(networks, "_compare", compared(names, 7.0))
    assert network_times(library, names, Pieces(library)) == found
    assert network_times(library, names[:1], Pieces(library)) == {"onnxruntime": found["onnxruntime"]}
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(hardware, "software", lambda: "torch 99")
        assert network_times(library, names, Pieces(library)) == dict.fromkeys(names, 7.0)
    assert network_times(library, names, Pieces(library)) == found, "nothing was replaced"


def test_times_of_other_numbers_of_threads_are_measured_again(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["onnxruntime", "openvino"]
    keep(library, dict.fromkeys(names, 1.0), threads=torch.get_num_threads() + 1)
    monkeypatch.setattr(networks, "_compare", compared(names, 7.0))
    assert network_times(library, names, Pieces(library)) == dict.fromkeys(names, 7.0)


def test_networks_timed_on_another_processor_are_timed_again(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["onnxruntime", "openvino"]
    monkeypatch.setattr(networks, "_compare", compared(names, 7.0))
    path = keep(library, dict.fromkeys(names, 1.0))
    assert network_times(library, names, Pieces(library)) == dict.fromkeys(names, 1.0)  # of an older Gati
    path.write_text(json.dumps({**json.loads(path.read_text()), "processor": "abacus"}))
    assert network_times(library, names, Pieces(library)) == dict.fromkeys(names, 7.0)
    monkeypatch.setattr(networks, "_compare", compared(names, 9.0))
    assert network_times(library, names, Pieces(library)) == dict.fromkeys(names, 7.0)  # kept, of this one


def test_reduced_precisions_are_not_tried_where_they_cannot_be_checked(
    library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The held-out inputs of this library are gone."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("openvino")
    tried: list[str] = []

    def race(library: Library, names: Iterable[str], *_: object) -> networks._Compared:
        tried.extend(names)
        return compared(tried, 1e9)()

    monkeypatch.setattr(networks, "_compare", race)
    assert choose_backend(library, AUTO) is library
    assert "onnxruntime" in tried and not {"openvino-bf16", "openvino-int8"} & set(tried)
    assert reduced_precisions(library, library, AUTO, None, Pieces(library)) == []
    assert "reduced precision is not tried: " in caplog.text


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1}', '{"format": 1, "threads": 1, "base_ms": 3}'])
def test_a_damaged_file_is_one_line(library: Library, text: str) -> None:
    keep(library, {}).write_text(text)
    with pytest.raises(LibraryError, match=r"networks.json is damaged .* delete it, gati compose measures"):
        network_times(library, ["openvino"], Pieces(library))


def test_a_newer_file_is_one_line(library: Library) -> None:
    keep(library, {}).write_text('{"format": 2}')
    with pytest.raises(LibraryError, match="has format 2, this Gati reads up to 1: .*upgrade gati"):
        network_times(library, ["openvino"], Pieces(library))


@pytest.mark.slow
@pytest.mark.usefixtures("no_race")
@pytest.mark.parametrize("fastest", ["onnxruntime", "openvino"])
def test_only_the_fastest_is_measured_in_full(library: Library, fastest: str) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("openvino")
    keep(library, {**FOUND, fastest: 1e-6})
    assert choose_backend(library, AUTO).manifest.profile.backend == fastest
    kept = {path.stem for path in (library.directory / "profiles").rglob("*.json")}
    assert kept == {"networks", fastest}


@pytest.mark.usefixtures("no_race")
def test_what_explore_measured_stays_where_nothing_is_faster(library: Library) -> None:
    keep(library, dict.fromkeys(FOUND, 1e9))
    assert choose_backend(library, AUTO) is library


@pytest.mark.usefixtures("no_race")
def test_the_engine_with_coarser_lookups_is_tried_where_its_network_is_the_fastest(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs the network that was chosen, so there is nothing to race for."""
    pytest.importorskip("onnxruntime")
    tried: list[str] = []

    def costed(library: Library, backend: str, **_: object) -> CostedLibrary:
        tried.append(backend)
        costed = CostedLibrary(library, costs_of(library, backend, 1.0))
        costed.__dict__["answers"] = object()
        return costed

    def held_out(library: Library) -> tuple[list[int], list[int]]:
        return [1], [0]

    monkeypatch.setattr("gati.exploration.splits.held_out", held_out)
    monkeypatch.setattr(backends, "on_backend", costed)
    keep(library, {**FOUND, "onnxruntime": 1e-6})
    chosen = choose_backend(library, AUTO)
    others = reduced_precisions(library, chosen, AUTO, None, Pieces(library))
    assert tried == ["onnxruntime", "onnxruntime-int8-lookups"]
    assert [other.manifest.profile.backend for other in others] == tried[1:]


@pytest.mark.usefixtures("no_race")
@pytest.mark.parametrize(
    "elsewhere", [{"processor": "abacus"}, {"threads": 77}], ids=["processor", "threads"]
)
def test_what_explore_measured_elsewhere_is_measured_again(
    library: Library, monkeypatch: pytest.MonkeyPatch, elsewhere: dict[str, Any]
) -> None:
    """A library that was copied: on that machine the network was faster than on any engine here."""
    pytest.importorskip("onnxruntime")
    manifest = library.manifest
    profile = replace(manifest.profile, base_ms=1e-6, **elsewhere)
    library.write_manifest(replace(manifest, profile=profile))

    def costed(library: Library, backend: str, *, explored: bool, **_: object) -> Library:
        return library if explored else CostedLibrary(library, costs_of(library, backend, 1.0))

    monkeypatch.setattr(backends, "on_backend", costed)
    for here, fastest in ((9.0, "onnxruntime"), (1.0, "torch")):
        keep(library, {**dict.fromkeys(FOUND, 9.9), "onnxruntime": 5.0, "torch": here})
        assert choose_backend(library, AUTO).manifest.profile.backend == fastest
    assert isinstance(choose_backend(library, Settings(backend="torch")), CostedLibrary)
    published = Settings(objective="full")
    assert choose_backend(library, published) is library, "which needs no model, so nothing is measured"


def from_elsewhere(library: Library, base_ms: float) -> None:
    manifest = library.manifest
    profile = replace(manifest.profile, base_ms=base_ms, processor="abacus")
    library.write_manifest(replace(manifest, profile=profile))


@pytest.mark.usefixtures("no_race")
def test_a_latency_from_elsewhere_does_not_compete(
    library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The backend that `explore` measured cannot be timed here, and was faster there than any is here."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("openvino")
    from_elsewhere(library, 1e-6)
    path = keep(library, {name: FOUND[name] for name in ("onnxruntime", "openvino")})
    failed = {name: "fails here" for name in BACKENDS if name not in ("onnxruntime", "openvino")}
    path.write_text(json.dumps({**json.loads(path.read_text()), "failed": failed}))
    tried: list[str] = []

    def costed(library: Library, backend: str, **_: object) -> Library:
        tried.append(backend)
        raise BackendError("fails here")

    monkeypatch.setattr(backends, "on_backend", costed)
    assert choose_backend(library, AUTO) is library, "the last resort"
    assert tried == ["openvino", "onnxruntime", "torch"]
    assert "backend torch is not tried: fails here" in caplog.text


@pytest.mark.parametrize("error", [BackendError, ModelError])
def test_what_explore_measured_elsewhere_is_used_where_its_backend_cannot_be_measured(
    library: Library,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type[GatiError],
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error("the model is gone")

    from_elsewhere(library, 1.0)
    monkeypatch.setattr(backends, "on_backend", failing)
    assert choose_backend(library, Settings(backend="torch")) is library
    assert "the latencies are those that explore measured elsewhere: the model is gone" in caplog.text
    asked = Settings(backend="torch", threads=torch.get_num_threads())
    for settings in (Settings(backend="onnxruntime"), asked):
        with pytest.raises(error, match="the model is gone"):
            choose_backend(library, settings)


@pytest.mark.usefixtures("no_race")
def test_a_comparison_that_was_disturbed_is_told(library: Library) -> None:
    path = keep(library, dict.fromkeys(FOUND, 1e9))
    assert disturbed_comparison(library) == ""
    path.write_text(json.dumps({**json.loads(path.read_text()), "disturbed": True}))
    assert f"to compare again, delete {path}, then compose" in disturbed_comparison(library)


def failing(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A backend that raises what no one expects when it compiles; the list gets each try."""
    kind, tries = type(get_backend(name)), []

    def compile(*_: object) -> None:
        tries.append(name)
        raise RuntimeError("Check 'false' failed\nat src/plugins/abacus.cpp:7")

    monkeypatch.setattr(kind, "compile", compile)
    return tries


def test_a_backend_that_cannot_run_the_network_is_left_out_once(
    library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("openvino")
    names, tries = ["onnxruntime", "openvino"], failing("openvino", monkeypatch)
    found = network_times(library, names, Pieces(library))
    assert list(found) == ["onnxruntime"] and len(tries) == 1
    assert "backend openvino is not compared, now and from now on: backend 'openvino' cannot" in caplog.text
    (path,) = (library.directory / "profiles").rglob("networks.json")
    assert f"to try it again, delete {path}, then compose" in caplog.text
    assert network_times(library, names, Pieces(library)) == found
    assert len(tries) == 1, "why it failed is kept, so it is not tried each time"


def test_a_backend_that_fails_while_it_is_measured_is_one_line_and_auto_takes_the_next(
    library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("onnxruntime")
    keep(library, {**FOUND, "onnxruntime": 1e-6, "openvino": 1e9})
    failing("onnxruntime", monkeypatch)
    with pytest.raises(BackendError) as caught:
        choose_backend(library, Settings(backend="onnxruntime"))
    assert str(caught.value) == (
        "backend 'onnxruntime' cannot run this network (RuntimeError: Check 'false' failed); run gati "
        "compose with another --backend"
    )
    assert choose_backend(library, AUTO) is library
    assert "backend onnxruntime is not tried: backend 'onnxruntime' cannot run this network" in caplog.text
