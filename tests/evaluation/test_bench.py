"""`gati bench`: every way to answer, counted and timed on the same inputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import gati
from gati.cli import render, run
from gati.composition.composition import Composition
from gati.composition.cost_files import BackendCosts
from gati.composition.engines import graph_files
from gati.composition.load import open_model
from gati.engine.backends import BACKENDS, GraphBackend, get_backend
from gati.engine.backends.base import Path as EnginePath
from gati.engine.backends.torch import TorchBackend
from gati.errors import BackendError, DataError
from gati.evaluation.limit import drawn_inputs
from gati.evaluation.timing import measure_latency, mixed_inputs, requests_of
from gati.exploration.library import Library
from gati.model.data import load_data
from gati.model.pictures import open_image
from gati.model.segments import TracedModel
from gati.model.sequence import Data
from tests.engine.served import PREPROCESSING, images, make_served, rewrite

bench = import_module("gati.evaluation.bench")  # the verb of that name hides the room


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Compiling for each backend, once a client, takes most of a minute.
    monkeypatch.setattr(bench, "BACKENDS", {"torch": BACKENDS["torch"]})
    np.savez(tmp_path / "test.npz", images=images(12), labels=np.arange(12) % 4)
    return make_served(tmp_path)


@pytest.mark.slow
def test_base_and_gati_are_measured_and_what_cannot_be_is_named(library: Path) -> None:
    result = gati.bench(library, library.parent / "test.npz", repetitions=2, clients=2, seconds=0.05)
    rows = {row.name: row for row in result.rows}
    base, ours = rows["base torch"], rows["gati torch"]
    assert (result.n, result.repetitions) == (12, 2)
    assert base.agreement == 1.0 and base.hit_rate == 0.0
    assert base.gain_same.min == base.gain_same.max == 1.0
    assert ours.hit_rate > 0.0 and ours.memory_bytes > base.memory_bytes
    assert ours.gain_same.min <= ours.gain_same.median <= ours.gain_same.max
    assert set(ours.throughput) == {"1", "2"} and ours.throughput["2"].median > 0
    assert sum(ours.histogram.counts) == 24
    # The peers need what explore recorded, which this library does not have.
    assert any("exits" in left.name and left.reason for left in result.left_out)


def test_agreement_and_accuracy_are_those_of_evaluate(library: Path) -> None:
    data = library.parent / "test.npz"
    result = gati.bench(library, data, repetitions=1, seconds=0)
    ours = next(row for row in result.rows if row.name == "gati torch")
    measured = gati.evaluate(library, data)
    assert (ours.agreement, ours.accuracy, ours.hit_rate) == (
        measured.agreement,
        measured.accuracy,
        measured.hit_rate,
    )
    assert ours.throughput == {}


@pytest.mark.slow
def test_the_command_writes_the_same_into_the_library_and_the_file(
    library: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = library.parent / "test.npz", library.parent / "bench.json"
    arguments = ["bench", str(library), "--data", str(data), "--json", str(out), "--repetitions", "1"]
    assert run([*arguments, "--clients", "1", "--limit", "4", "--seconds", "0.05"]) == 0
    assert "gati torch" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found == json.loads((library / "bench.json").read_text())
    assert found["n"] == 4 and found["machine"]["cores"] and found["versions"]["torch"]


@pytest.mark.slow
def test_every_installed_backend_is_measured_and_answers_alike(tmp_path: Path) -> None:
    np.savez(tmp_path / "test.npz", images=images(12))
    result = gati.bench(make_served(tmp_path), tmp_path / "test.npz", repetitions=1, seconds=0)
    left_out = {left.name for left in result.left_out}
    for backend in BACKENDS:
        names = {f"base {backend}", f"gati {backend}"}
        assert names <= {row.name for row in result.rows} or backend in left_out
    early = {
        row.hit_rate for row in result.rows if row.kind == "gati" and BACKENDS[row.backend].precision == "f32"
    }
    assert len(early) == 1


class Broken(TorchBackend):
    """Seems to run here, but fails when the base model first answers."""

    def path(self, traced: TracedModel, blocks: Sequence[str]) -> EnginePath:
        def fails(*_: Tensor) -> Tensor:
            raise RuntimeError("Python.h: No such file or directory\nand much more")

        return EnginePath(fails, super().path(traced, blocks).segments)


class Hasty(TorchBackend):
    """A second backend; the tests say how fast it is, and what it answers."""


@pytest.mark.parametrize(
    ("differ", "words"),
    [
        (0, "fastest network alone that keeps the target of 97 %: base torch"),
        (1, "fastest network alone: base hasty, whose agreement is below the target of 97 %"),
        (2, "fastest network alone: base hasty, whose agreement is below the target of 97 %"),
    ],
)
def test_the_fastest_network_alone_keeps_the_target_or_does_no_worse_than_gati(
    differ: int,
    words: str,
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In 8-bit integers, the network may be fast and answer otherwise too often; so may Gati, by chance."""

    def measured(contenders: Any, *given: Any) -> Any:
        found = measure_latency(contenders, *given)
        by_name = {each.name: each for each in contenders}
        right = by_name["base torch"].answers
        for name, count in (("base hasty", 1), ("gati hasty", differ)):
            by_name[name].answers = [(answer + 1) % 4 for answer in right[:count]] + right[count:]
        by_name["base hasty"].times_ms = [[1e-6] * len(times) for times in by_name["base torch"].times_ms]
        return found

    monkeypatch.setattr(bench, "measure_latency", measured)
    monkeypatch.setattr(Hasty, "name", "hasty", raising=False)
    monkeypatch.setitem(BACKENDS, "hasty", Hasty)
    monkeypatch.setattr(bench, "BACKENDS", {name: BACKENDS[name] for name in ("torch", "hasty")})
    rewrite(library, backend="hasty")
    result = gati.bench(library, library.parent / "test.npz", repetitions=1, seconds=0)
    assert result.fastest_static == ("base hasty" if differ else "base torch")
    rows = {row.name: row for row in result.rows}
    assert rows["base hasty"].agreement < result.accuracy_target <= rows["base torch"].agreement
    assert rows[result.fastest_static].gain_fastest.median == 1.0
    assert result.fastest_words == words
    render.bench(result)
    assert words in capsys.readouterr().out
    gati.report(library)
    assert words in (library / "report.html").read_text(encoding="utf-8")


def test_a_backend_that_fails_at_its_first_request_is_left_out(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Broken, "name", "broken", raising=False)
    monkeypatch.setitem(BACKENDS, "broken", Broken)
    monkeypatch.setattr(bench, "BACKENDS", {name: BACKENDS[name] for name in ("torch", "broken")})
    result = gati.bench(library, library.parent / "test.npz", repetitions=1, seconds=0)
    assert [row.name for row in result.rows] == ["base torch", "gati torch"]
    told = [left.reason for left in result.left_out if "broken" in left.name]
    assert told == ["RuntimeError: Python.h: No such file or directory"]  # once, not for base and gati each


def test_a_composition_whose_own_backend_fails_is_refused_with_the_reason(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Broken, "name", "broken", raising=False)
    monkeypatch.setitem(BACKENDS, "broken", Broken)
    rewrite(library, backend="broken")
    with pytest.raises(BackendError, match="backend 'broken' does not run here: RuntimeError: Python.h: No"):
        gati.bench(library, library.parent / "test.npz", repetitions=1, seconds=0)


def composed_for(library: Path, backend: str) -> Library:
    """The library, its composition for `backend`, with latencies as if measured there."""
    opened = Library.open(library)
    rewrite(library, backend=backend)
    profile = replace(opened.manifest.profile, backend=backend)
    (library / "profiles").mkdir()
    (library / "profiles" / f"{backend}.json").write_text(BackendCosts(profile, 0.0, {}).to_json())
    return opened


@pytest.mark.slow
def test_a_calibrated_backend_runs_the_stored_network_that_serves(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not be made again: the inputs to calibrate with are gone."""
    pytest.importorskip("onnxruntime")
    own = "onnxruntime-int8-lookups"
    opened = composed_for(library, own)
    model, composition = open_model(library), Composition.load(opened.composition_path())
    backend = get_backend(own, calibration=PREPROCESSING(images(16)))
    assert isinstance(backend, GraphBackend)
    setting = [(leaving.trial_id, leaving.threshold) for leaving in composition.exits]
    for path, exits in zip(graph_files(opened, setting, own), (model.exits(composition), []), strict=True):
        (graph,) = backend.assembled(model.traced, [exits], "logits")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(graph)
    result = gati.bench(library, library.parent / "test.npz", repetitions=1, seconds=0)
    assert {f"base {own}", f"gati {own}"} <= {row.name for row in result.rows}


@pytest.mark.slow
def test_peers_are_chosen_by_the_latencies_of_the_backend_that_they_run_on(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    composed_for(library, "onnxruntime")
    asked: list[str] = []

    def peers(library: Library, *_: object) -> tuple[()]:
        asked.append(library.manifest.profile.backend)
        return ()

    monkeypatch.setattr(bench, "build_peers", peers)
    gati.bench(library, library.parent / "test.npz", repetitions=1, seconds=0)
    assert asked == ["onnxruntime"]


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"repetitions": 0}, {"clients": 0}, {"seconds": -1.0}])
def test_impossible_numbers_are_refused(library: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(DataError, match=f"{next(iter(wrong))} is "):
        gati.bench(library, library.parent / "test.npz", **wrong)  # type: ignore[arg-type]


class Numbers(Data):
    """Inputs that are their own numbers; `in_use` counts the batches of them that are in memory."""

    name, labels, fingerprint = "numbers", None, "0" * 64

    def __init__(self, count: int) -> None:
        self._count = count
        self._read: list[ref[Tensor]] = []

    def __len__(self) -> int:
        return self._count

    def identify(self, indices: Any) -> Any:
        return np.asarray(indices, dtype=np.uint64)

    def images(self, indices: Any) -> Tensor:
        found = torch.tensor([float(index) for index in indices])[:, None]
        self._read.append(ref(found))
        return found

    @property
    def in_use(self) -> int:
        return sum(each() is not None for each in self._read)


def test_the_inputs_of_one_turn_are_in_memory() -> None:
    """Thousands of photographs would take gigabytes."""
    inputs = Numbers(200)
    request = requests_of(inputs)
    for index in (*range(200), 0):
        assert request(index).tolist() == [[index]]
        assert inputs.in_use == 1


def test_each_picture_is_decoded_once(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding between turns fills the processor's caches, and repetitions would decode all again."""
    folder = library.parent / "pictures"
    folder.mkdir()
    for number, picture in enumerate(images(6)):
        Image.fromarray(picture[:, :, 0]).save(folder / f"{number}.png")
    decoded: list[Path] = []

    def counted(path: Path) -> Any:
        decoded.append(path)
        return open_image(path)

    monkeypatch.setattr("gati.model.data.open_image", counted)
    gati.bench(library, folder, repetitions=3, seconds=0)
    assert len(decoded) <= 7


def test_clients_send_inputs_in_random_order_as_many_as_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short run answers only the first: in data that is ordered by class, they would be of one class."""
    every = mixed_inputs(Numbers(200)).flatten().tolist()
    assert sorted(every) == list(range(200))
    assert np.mean(every[:20]) > 50
    monkeypatch.setattr("gati.evaluation.timing.HELD_BYTES", 20 * 4)
    assert mixed_inputs(Numbers(200)).flatten().tolist() == every[:20]


@pytest.mark.parametrize(
    "verb", [gati.evaluate, partial(gati.bench, repetitions=1, seconds=0)], ids=["evaluate", "bench"]
)
def test_a_limit_takes_inputs_from_all_parts_of_the_data(library: Path, verb: Any) -> None:
    """A folder of one folder per class is ordered by class."""
    np.savez(library.parent / "ordered.npz", images=images(40), labels=np.arange(40) // 10)
    data = load_data(library.parent / "ordered.npz", PREPROCESSING, what="test data")
    read: set[int] = set()
    prepared = data.images

    def images_of(rows: Any) -> Tensor:
        read.update(int(row) for row in rows)
        return prepared(rows)

    data.images = images_of  # type: ignore[method-assign]
    assert verb(library, data, limit=8).n == len(read) == 8
    assert [sum(row // 10 == label for row in read) for label in range(4)] == [2, 2, 2, 2]
    assert drawn_inputs(data, 40) is data and drawn_inputs(data, None) is data


def test_every_method_gets_the_same_inputs_from_clients(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Tensor] = []

    def throughput(contender: object, inputs: Any, count: int, *_: object) -> float:
        sent.append(torch.cat([inputs(index) for index in range(count)]))
        return 1.0

    monkeypatch.setattr(bench, "measure_throughput", throughput)
    gati.bench(library, library.parent / "test.npz", repetitions=1, clients=2, seconds=1.0)
    assert len(sent) == 4 and len(sent[0]) == 12
    assert all(torch.equal(each, sent[0]) for each in sent)


@pytest.mark.parametrize("verb", [gati.bench, gati.evaluate, gati.certify], ids=lambda verb: verb.__name__)
def test_inputs_of_another_size_are_named_before_anything_is_measured(verb: Any, library: Path) -> None:
    np.savez(library.parent / "large.npz", images=np.zeros((3, 7, 7, 1), np.uint8))
    wrong = r"large\.npz does not fit: .*6, 6\], got \[1, 1, 7, 7\]; give inputs like those of gati explore$"
    with pytest.raises(DataError, match=wrong):
        verb(library, library.parent / "large.npz")


@pytest.mark.parametrize("verb", [gati.bench, gati.evaluate, gati.certify], ids=lambda verb: verb.__name__)
def test_texts_for_a_network_that_takes_images_are_refused(verb: Any, library: Path) -> None:
    """None of these verbs takes a tokenizer."""
    table = library.parent / "t.csv"
    table.write_text("text\na cat\n")
    said = f"{table} holds texts, and the network takes images; give inputs like those of gati explore$"
    with pytest.raises(DataError, match=said):
        verb(library, table)


def test_a_damaged_first_input_is_no_misfit(library: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no picture")
    with pytest.raises(DataError) as caught:
        gati.evaluate(library, tmp_path)
    assert "a.png" in str(caught.value) and "fit" not in str(caught.value)


@pytest.mark.parametrize("verb", [gati.bench, gati.evaluate], ids=lambda verb: verb.__name__)
def test_no_inputs_are_told(verb: Any, library: Path) -> None:
    with pytest.raises(DataError, match="data is empty; give at least one input"):
        verb(library, Numbers(0))
