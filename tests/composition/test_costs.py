"""Latencies of other backends: kept in the library, read back, put in place of what explore measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gati.composition import costs as backend_costs
from gati.composition.compose import compose
from gati.composition.composition import Composition, Objective
from gati.composition.cost_files import BackendCosts, keep_costs
from gati.composition.costs import as_composed, on_backend, other_processor
from gati.composition.pieces import Pieces
from gati.costs import graph as graph_costs
from gati.costs import hardware
from gati.costs.hardware import conditions_here, cpu_name
from gati.errors import BackendError, LibraryError, ModelError
from gati.exploration.library import SELECT, Library
from gati.types import Trial, TrialId
from tests.composition.libraries import make_library
from tests.engine.networks import BLOCKS
from tests.engine.served import make_served

pytestmark = pytest.mark.usefixtures("unbounded")


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return make_library(tmp_path / "library", quality=6.0, overlapped=True)


def costs_of(library: Library, backend: str = "openvino", speed: float = 4.0) -> BackendCosts:
    """As if this network were `speed` times as fast there, and lookups as dear as here."""
    known = library.manifest.profile
    blocks = tuple(
        replace(block, latency_ms=block.latency_ms / speed, reach_ms=block.reach_ms / speed)
        for block in known.blocks
    )
    profile = replace(
        known,
        backend=backend,
        base_ms=known.base_ms / speed,
        blocks=blocks,
        threads=torch.get_num_threads(),
    )
    shapes = ["x".join(map(str, block.output_shape)) for block in blocks]
    lookups = {
        f"{shapes[trial.block_index]} {trial.variant}": trial.lookup_ms or 0.0 for trial in library.trials
    }
    return BackendCosts(profile, 0.01, lookups)


def keep(library: Library, costs: BackendCosts) -> Path:
    path = library.directory / "profiles" / f"{costs.profile.backend}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(costs.to_json())
    return path


def test_costs_survive_their_file(library: Library) -> None:
    costs = costs_of(library)
    assert BackendCosts.from_json(costs.to_json(), "here") == costs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "here is damaged .* delete it, gati compose measures again"),
        ('{"format": 99}', "here has format 99, this Gati reads up to 4: .*upgrade gati"),
        ('{"format": 3, "profile": {}}', "here: profile: has no field 'backend'; delete it, gati compose"),
    ],
)
def test_a_damaged_file_is_one_line(text: str, message: str) -> None:
    with pytest.raises(LibraryError, match=message) as caught:
        BackendCosts.from_json(text, "here")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text_is_one_line(library: Library) -> None:
    keep(library, costs_of(library)).write_bytes(b"\xff\xfe")
    with pytest.raises(LibraryError, match=r"openvino.json is damaged .* delete it, gati compose measures"):
        as_composed(library, "openvino")


@pytest.mark.parametrize("version", [1, 2])
def test_what_an_older_gati_measured_otherwise_is_measured_anew(version: int) -> None:
    assert BackendCosts.from_json(f'{{"format": {version}}}', "here") is None


def test_variants_of_an_older_file_are_called_as_today(library: Library) -> None:
    lookup_ms = {"8x6x6 pool(64)": 0.2, "8x6x6 grid(8)": 0.3}
    raw = json.loads(replace(costs_of(library), lookup_ms=lookup_ms).to_json())
    for version, name in ((3, "pool-linear(64)"), (raw["format"], "pool(64)")):
        found = BackendCosts.from_json(json.dumps({**raw, "format": version}), "here")
        assert found is not None and found.lookup_ms == {f"8x6x6 {name}": 0.2, "8x6x6 grid(8)": 0.3}


@pytest.mark.slow
def test_no_exit_is_free_where_the_clock_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences of medians that are all noise: whatever is added to the network seems to take no time."""
    pytest.importorskip("onnxruntime")
    library = Library(make_served(tmp_path))
    trials = [
        Trial(TrialId(f"trial-{index}"), index, BLOCKS[index], "pool-linear(64)", "trained")
        for index in (0, 1)
    ]
    library.write_trials(trials, [])
    monkeypatch.setattr(graph_costs, "_medians", lambda *_: (1.0, 0.0))
    costed = on_backend(Library.open(library.directory), "onnxruntime")
    known, found = library.manifest.profile, costed.manifest.profile
    assert found.base_ms == 1.0
    for there, elsewhere in zip(found.blocks, known.blocks, strict=True):
        assert there.reach_ms >= 0.49 * elsewhere.reach_ms / known.base_ms > 0.0
    assert all((trial.lookup_ms or 0.0) > 0.0 for trial in costed.trials)
    assert as_composed(library, "onnxruntime").manifest.profile == found  # and so it is kept


class Inputs:
    """Held-out inputs of the network of `make_served`."""

    def images(self, rows: Sequence[int]) -> torch.Tensor:
        return torch.randn(len(rows), 1, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_a_network_is_not_measured_again_for_other_lookups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the same graph: only lookups in 8-bit integers take another time."""
    pytest.importorskip("onnxruntime")
    library = Library(make_served(tmp_path))
    library.write_trials([Trial(TrialId("trial-0"), 0, BLOCKS[0], "pool-linear(64)", "trained")], [])
    library = Library.open(library.directory)
    known = costs_of(library, "onnxruntime")
    known = replace(known, profile=replace(known.profile, disturbance=""))  # whatever else runs here
    keep(library, known)
    disturbed = tmp_path / "disturbed"
    shutil.copytree(library.directory, disturbed)
    keep(Library(disturbed), replace(known, profile=replace(known.profile, disturbance="it was busy")))
    monkeypatch.setattr(graph_costs, "_medians", lambda *_: (1.0, 3.0))  # a lookup adds twice the network
    monkeypatch.setattr(Pieces, "held_out", (Inputs(), np.full(20, SELECT, dtype=np.uint8)))
    told: list[tuple[int, int]] = []
    found = on_backend(library, "onnxruntime-int8-lookups", progress=lambda done, of: told.append((done, of)))
    profile = found.manifest.profile
    assert told == [(1, 2), (2, 2)], "the plain network, and it with the lookup"
    assert replace(profile, backend="onnxruntime", blocks=()) == replace(known.profile, blocks=())
    reach_ms = [block.reach_ms for block in profile.blocks]
    assert reach_ms == pytest.approx([block.reach_ms for block in known.profile.blocks])
    assert found.trials[0].lookup_ms == pytest.approx(2.0 * known.profile.base_ms)
    told.clear()
    on_backend(
        Library(disturbed), "onnxruntime-int8-lookups", progress=lambda done, of: told.append((done, of))
    )
    assert told[-1][1] > 2, "what was disturbed is measured again, as its note asks for"


@pytest.mark.slow
def test_a_composition_is_made_with_the_latencies_of_its_backend(library: Library) -> None:
    costs = costs_of(library)
    keep(library, costs)
    composition = compose(library.directory, accuracy=0.95, backend="openvino", slowdown=0.5)
    assert composition.backend == "openvino"
    assert composition.placement == "inline"
    assert composition.expected.base_latency_ms == costs.profile.base_ms
    assert all(exit_.exit_ms < costs.profile.base_ms for exit_ in composition.exits)
    plain = compose(library.directory, accuracy=0.95, backend="torch", name="torch", slowdown=0.5)
    assert plain.expected.base_latency_ms == library.manifest.profile.base_ms
    assert len(plain.exits) >= len(composition.exits) > 0  # in proportion, lookups are dearer there


def test_a_library_is_itself_on_its_own_backend_and_untouched_on_another(library: Library) -> None:
    own = library.manifest.profile.backend
    assert on_backend(library, own) is library
    assert as_composed(library, own) is library
    keep(library, costs_of(library))
    before = library.trials
    other = on_backend(library, "openvino")
    assert other.manifest.profile.backend == "openvino"
    assert all(trial.overlapped_lookup_ms is None for trial in other.trials)
    assert library.trials == before
    assert Library.open(library.directory).manifest.profile.backend == own


@pytest.mark.slow
def test_auto_takes_the_fastest_that_is_measured(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gati.engine.backends.base.find_spec", lambda name: object())
    for backend, speed in (("openvino", 3.0), ("onnxruntime", 5.0)):
        keep(library, costs_of(library, backend, speed))
    assert compose(library.directory, accuracy=0.95).backend == "onnxruntime"
    overlapped = compose(library.directory, accuracy=0.95, placement="overlapped")
    assert overlapped.backend == library.manifest.profile.backend, "the only one that has it"
    keep(library, costs_of(library, "onnxruntime", 0.5))
    keep(library, costs_of(library, "openvino", 0.5))
    assert compose(library.directory, accuracy=0.95).backend == library.manifest.profile.backend


@pytest.mark.slow
def test_auto_stays_where_the_model_is_not_at_hand_and_a_name_says_why(library: Library) -> None:
    assert compose(library.directory, accuracy=0.95).backend == library.manifest.profile.backend
    with pytest.raises((BackendError, ModelError)) as caught:
        compose(library.directory, accuracy=0.95, backend="onnxruntime")
    assert "\n" not in str(caught.value)


def test_machines_that_share_a_library_keep_their_own_latencies(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither uses the other's silently, nor replaces them, and a composition remembers its own."""
    here = costs_of(library)
    there = costs_of(library, speed=2.0)
    speeds = {hardware.software(): here, "openvino 99": there}
    measured: list[str] = []

    def measure(*_: object) -> BackendCosts:
        software = hardware.software()
        measured.append(software)
        profile = replace(speeds[software].profile, processor=cpu_name(), software=software)
        return replace(speeds[software], profile=profile)

    monkeypatch.setattr(backend_costs, "measure", measure)
    first = compose(library.directory, accuracy=0.95, backend="openvino", name="here", confidence=None)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(hardware, "software", lambda: "openvino 99")
        other = compose(library.directory, accuracy=0.95, backend="openvino", name="there", confidence=None)
    again = compose(library.directory, accuracy=0.95, backend="openvino", name="again", confidence=None)
    assert measured == [*speeds]
    assert first.measured_on == again.measured_on == conditions_here("cpu")
    assert first.expected.base_latency_ms == again.expected.base_latency_ms == here.profile.base_ms
    assert other.measured_on is not None and other.measured_on.software == "openvino 99"
    for each, costs_then in ((first, here), (other, there)):
        composed = as_composed(library, "openvino", each.measured_on)
        assert composed.manifest.profile.base_ms == costs_then.profile.base_ms
        assert Composition.load(library.composition_path(each.name)).measured_on == each.measured_on


def test_latencies_of_other_software_are_measured_anew(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = costs_of(library)
    known = replace(found, profile=replace(found.profile, processor=cpu_name(), software=hardware.software()))
    keep_costs(library, known)
    assert on_backend(library, "openvino").manifest.profile == known.profile
    monkeypatch.setattr(hardware, "software", lambda: "openvino 99")
    with pytest.raises((BackendError, ModelError)):  # the model of this library does not exist
        on_backend(library, "openvino")
    assert as_composed(library, "openvino").manifest.profile == known.profile


def test_other_numbers_of_threads_are_measured_anew(library: Library) -> None:
    costs = costs_of(library)
    keep(library, replace(costs, profile=replace(costs.profile, threads=costs.profile.threads + 1)))
    with pytest.raises((BackendError, ModelError)):  # the model of this library does not exist
        on_backend(library, "openvino")
    assert as_composed(library, "openvino").manifest.profile.threads == costs.profile.threads + 1


def test_latencies_of_another_processor_are_measured_anew(library: Library) -> None:
    costs = costs_of(library)
    keep(library, replace(costs, profile=replace(costs.profile, processor=cpu_name())))
    assert on_backend(library, "openvino").manifest.profile == replace(costs.profile, processor=cpu_name())
    keep(library, replace(costs, profile=replace(costs.profile, processor="abacus")))
    with pytest.raises((BackendError, ModelError)):  # the model of this library does not exist
        on_backend(library, "openvino")


def test_latencies_of_a_gpu_that_is_not_here_are_kept_and_the_composition_says_so(library: Library) -> None:
    costs = costs_of(library, "cuda-graph")
    elsewhere = replace(
        costs.profile, device="cuda:99", processor="abacus", threads=costs.profile.threads + 1
    )
    keep(library, replace(costs, profile=elsewhere))
    found = on_backend(library, "cuda-graph")
    assert found.manifest.profile == elsewhere
    assert (
        "measured on another processor, abacus, not on a machine without cuda:99: explore"
        in other_processor(found)
    )


def test_disturbed_latencies_say_what_measures_them_again(library: Library) -> None:
    """Explored again in the same folder, a library is already finished."""
    profile = replace(library.manifest.profile, disturbance="other programs used the processor")
    library.write_manifest(replace(library.manifest, profile=profile))
    warning = backend_costs.disturbance(Library.open(library.directory))
    assert warning == (
        "chosen by latencies that may be wrong: other programs used the processor; to measure again, explore "
        "again with another --out"
    )


def test_costs_of_an_older_gati_count_as_measured_here(library: Library) -> None:
    raw = json.loads(costs_of(library).to_json())
    del raw["profile"]["processor"]
    (library.directory / "profiles").mkdir()
    (library.directory / "profiles" / "openvino.json").write_text(json.dumps(raw))
    assert on_backend(library, "openvino").manifest.profile == costs_of(library).profile


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["full", "exact"])
def test_a_composition_by_what_explore_measured_elsewhere_says_so(
    library: Library, objective: Objective
) -> None:
    def note() -> str:
        return compose(library.directory, accuracy=0.9, backend="torch", objective=objective).note

    assert "another processor" not in note()
    elsewhere = replace(library.manifest.profile, processor="abacus")
    library.write_manifest(replace(library.manifest, profile=elsewhere))
    assert f"measured on another processor, abacus, not on {cpu_name()}: explore again here" in note()


def test_an_unknown_backend_lists_the_known(library: Library) -> None:
    with pytest.raises(BackendError, match="unknown backend 'abacus'; choose one of auto, cuda-graph, onnx"):
        compose(library.directory, backend="abacus")


def test_costs_that_are_gone_are_one_line(library: Library) -> None:
    with pytest.raises(LibraryError, match=r"openvino.json is missing; run gati compose again"):
        as_composed(library, "openvino")
