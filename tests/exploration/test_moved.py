"""Explorations whose network, checkpoint, inputs or library are elsewhere than when they began."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gati.errors import DataError, LibraryError
from gati.exploration import stages
from gati.exploration.explore import explore
from gati.exploration.further import explore_more
from gati.exploration.library import Library
from gati.exploration.network import load_network
from gati.exploration.progress import SilentProgress
from gati.exploration.splits import held_out
from gati.exploration.state import RunState
from gati.model.load import LoadedModel, load_model
from tests.exploration import networks
from tests.exploration.killing import Killed, KilledAfter
from tests.exploration.networks import trained_state, write_digits
from tests.exploration.quick import few_steps

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        few_steps(patch)
        yield


class _Notes(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def project(folder: Path) -> Path:
    """A folder with all that an exploration reads."""
    folder.mkdir()
    write_digits(folder, count=300)
    save_file(trained_state(), folder / "net.safetensors")
    shutil.copy(networks.__file__, folder / "own.py")
    return folder


def explored(folder: Path, **options: Any) -> Library:
    given: dict[str, Any] = {
        "checkpoint": folder / "net.safetensors",
        "data": str(folder / "val.npz"),
        "train_data": str(folder / "more.npz"),
        "out": folder / "library",
        "variants": ["grid(8)", "fc(16)"],
        "blocks": "blocks.1",
        "epochs": 0.1,
    }
    return explore(f"{folder / 'own.py'}:Net", **given | options)


def trained_files(library: Library) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (library.directory / "caches").iterdir()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = project(tmp_path_factory.mktemp("finished") / "project")
    explored(folder)
    return folder


def test_a_finished_exploration_is_used_where_it_has_moved_to(finished: Path, tmp_path: Path) -> None:
    before = trained_files(Library.open(finished / "library"))
    moved = Path(shutil.copytree(finished, tmp_path / "elsewhere"))
    for name in ("own.py", "net.safetensors", "val.npz"):
        (finished / name).rename(finished / f"hidden-{name}")
    said, reading = _Notes(), Library.open(moved / "library")
    try:
        library = explored(moved, progress=said)
        reading.check_unchanged()
        load_network(library, torch.device("cpu"))
        assert len(held_out(library)[0]) == 300
    finally:
        for name in ("own.py", "net.safetensors", "val.npz"):
            (finished / f"hidden-{name}").rename(finished / name)
    assert trained_files(library) == before
    assert [note.split(" ", 1)[1][:24] for note in said.notes[-2:]] == [
        "has the new places of ne", "is already finished: gat",
    ]  # fmt: skip
    written = library.manifest_path.stat().st_mtime_ns
    explored(moved)
    assert library.manifest_path.stat().st_mtime_ns == written, "nothing has moved since"


_OF_ARRAYS = """
from torch import nn

class OfArrays(nn.Sequential):
    def __init__(self):
        blocks = (nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh()) for _ in range(3))
        super().__init__(*blocks, nn.Linear(16, 3, bias=False))

    def forward(self, x):
        return super().forward(x - 0.5)
"""


def test_an_exploration_of_arrays_by_an_older_gati_is_finished(tmp_path: Path) -> None:
    """It kept no ranges of whole numbers; the same command replaced its library."""
    (tmp_path / "own.py").write_text(_OF_ARRAYS)
    bits = np.random.default_rng(0).integers(0, 2, (300, 16))
    np.savez(tmp_path / "val.npz", inputs=bits.astype(np.float32))
    given: dict[str, Any] = {"data": str(tmp_path / "val.npz"), "out": tmp_path / "library"}
    given |= {"variants": ["fc(16)"], "blocks": "1", "epochs": 0.1}
    library = explore(f"{tmp_path / 'own.py'}:OfArrays", **given)
    assert library.preprocessing.tensors != library.preprocessing.tensors.without_ranges()
    older = json.loads(library.manifest_path.read_text())
    for each in (older, older["settings"]):
        for part in each["preprocessing"]["tensors"]:
            part.pop("ranges", None)
    library.manifest_path.write_text(json.dumps(older))
    explore(f"{tmp_path / 'own.py'}:OfArrays", **given)
    assert json.loads(library.manifest_path.read_text()) == older


@pytest.mark.parametrize("name", ["val.npz", "more.npz"])
def test_inputs_that_have_moved_are_named_with_the_library_that_needs_them(tmp_path: Path, name: str) -> None:
    """The user of a library did not name them, as `--data` or otherwise."""
    option = {"val.npz": "--data", "more.npz": "--train-data"}[name]
    project(tmp_path / "project")
    library = explored(tmp_path / "project", variants=["grid(8)"])
    gone = tmp_path / "project" / name
    gone.rename(tmp_path / "elsewhere.npz")
    with pytest.raises(DataError) as refused:
        explore_more(library.directory, epochs=0.1)
    assert str(refused.value) == (
        f"the library in {library.directory} was explored with {gone}, which is not there any more: put it "
        f"back, or give its new place with {option}"
    )
    if name == "val.npz":
        with pytest.raises(DataError, match=f"{gone}, which is not there .* repeat the gati explore command"):
            held_out(library)
    places: dict[str, Any] = {option[2:].replace("-", "_"): str(tmp_path / "elsewhere.npz")}
    explore_more(library.directory, epochs=0.1, **places)


@pytest.mark.parametrize("changed", ["fewer", "more", "labels", "names", "train", "code"])
def test_what_is_other_than_it_was_is_another_exploration(
    changed: str, finished: Path, tmp_path: Path
) -> None:
    """Else a library would be used with inputs, or a network, that its certificates do not speak of."""
    moved = Path(shutil.copytree(finished, tmp_path / "elsewhere"))
    if changed == "code":
        code = (moved / "own.py").read_text()
        (moved / "own.py").write_text(code.replace("x + 0.3 * self.conv(x)", "x + 0.6 * self.conv(x)"))
    else:
        path = moved / ("more.npz" if changed == "train" else "val.npz")
        found = dict(np.load(path))
        images, labels = found["images"], found["labels"]
        fewer = {"images": images[:-1], "labels": labels[:-1]}
        changes: dict[str, dict[str, Any]] = {
            "fewer": fewer,
            "more": {"images": np.concatenate((images, 255 - images)), "labels": np.tile(labels, 2)},
            "labels": {"labels": labels[::-1]},
            "names": {"class_names": np.array([f"digit {number}" for number in range(10)])},
            "train": fewer,
        }
        np.savez(path, **found | changes[changed])

    class Stopped(_Notes):
        def note(self, text: str) -> None:
            super().note(text)
            if text.startswith("replacing the finished exploration"):
                raise Killed

    with pytest.raises(Killed):
        explored(moved, progress=Stopped())


def test_an_unfinished_exploration_goes_on_where_it_has_moved_to(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "_SAVE_EVERY_S", 0.0)
    here = project(tmp_path / "here")
    with pytest.raises(Killed):
        explored(here, progress=KilledAfter(30))
    there, said = here.rename(tmp_path / "there"), _Notes()
    library = explored(there, progress=said)
    assert any(note.startswith("resuming at step ") for note in said.notes)
    assert trained_files(library) == trained_files(Library.open(finished / "library"))
    assert library.manifest.settings["data"] == str(there / "val.npz")


def test_an_unfinished_exploration_does_not_go_on_with_others(tmp_path: Path) -> None:
    here = project(tmp_path / "here")
    with pytest.raises(Killed):
        explored(here, progress=KilledAfter(3))
    np.savez(here / "other.npz", images=np.load(here / "val.npz")["images"][::-1])
    with pytest.raises(DataError, match="the inputs of --data, or their order, have changed since"):
        explored(here, data=str(here / "other.npz"))
    explored(here)


def test_how_pictures_are_cut_is_kept_by_an_exploration_until_it_is_finished(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older Gati did not look how a network's processor rounds: half of the answers would be to others."""

    def rounding(*arguments: Any, **options: Any) -> LoadedModel:
        loaded = load_model(*arguments, **options)
        return replace(loaded, preprocessing=replace(loaded.preprocessing, crop_rounds_down=True))

    here, said = project(tmp_path / "here"), _Notes()
    with pytest.raises(Killed):
        explored(here, progress=KilledAfter(3))
    monkeypatch.setattr("gati.exploration.explore.load_model", rounding)
    with pytest.raises(LibraryError, match="holds an unfinished exploration with another preprocessing"):
        explored(here)
    explored(finished, progress=said)
    assert "is already finished" in said.notes[-1]


def test_answers_to_some_inputs_are_not_given_up_for_others(tmp_path: Path) -> None:
    """A slow network answers for hours; until it has, nothing tells its inputs from others."""
    state = RunState(tmp_path / "library")
    state.claim({"data": "here.npz", "model": "net.py:Net"})
    state.write_spent(5000.0)
    with pytest.raises(LibraryError, match="with another data .'here.npz', now 'there.npz'"):
        state.claim({"data": "there.npz", "model": "net.py:Net"})
    state.write_costs({})
    state.claim({"data": "there.npz", "model": "net.py:Net"})
    assert state.claimed()["data"] == "there.npz"
