"""`gati bench`: every way to answer, counted and timed on the same inputs."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import gati
from gati.cli import run
from gati.engine.backends import BACKENDS
from gati.errors import DataError
from tests.engine.served import images, make_served


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Compiling for each backend, once a client, takes most of a minute.
    module = import_module("gati.evaluation.bench")  # the verb of that name hides the room
    monkeypatch.setattr(module, "BACKENDS", {"torch": BACKENDS["torch"]})
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
    assert run([*arguments, "--clients", "1", "--limit", "4"]) == 0
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
        assert names <= {row.name for row in result.rows} | left_out
    early = {
        row.hit_rate for row in result.rows if row.kind == "gati" and BACKENDS[row.backend].precision == "f32"
    }
    assert len(early) == 1


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"repetitions": 0}, {"clients": 0}, {"seconds": -1.0}])
def test_impossible_numbers_are_refused(library: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(DataError, match=f"{next(iter(wrong))} is "):
        gati.bench(library, library.parent / "test.npz", **wrong)  # type: ignore[arg-type]
