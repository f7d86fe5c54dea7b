"""`gati explore --more`: what a library has is trained further, and nothing that serves changes."""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import gati
from gati.composition.composition import Composition
from gati.costs.overlap import OverlapCost
from gati.errors import DataError, LibraryError
from gati.exploration import candidates, stages
from gati.exploration.explore import explore
from gati.exploration.further import explore_more, named_in_round, with_round
from gati.exploration.library import Library
from gati.exploration.progress import SilentProgress
from gati.exploration.splits import held_out
from gati.model.data import load_data
from gati.types import Trial, TrialId
from tests.engine.cores import Cores
from tests.engine.served import composed, exit_at
from tests.exploration.killing import Killed, KilledAfter
from tests.exploration.networks import Pictures, trained_state, write_digits
from tests.exploration.quick import quick_selectors

pytestmark = pytest.mark.slow

NET = f"{Path(__file__).parent / 'networks.py'}:Net"
VARIANTS = ("student(8)", "grid(16)", "pyramid(4)")


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "too_slow", lambda *_: "")
        patch.setattr(stages, "LEAST_EXIT_STEPS", 30)
        patch.setattr(stages, "LEAST_STUDENT_STEPS", 30)
        quick_selectors(patch)
        yield


@pytest.fixture(scope="module")
def explored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library whose caches were trained shortly, with one composition."""
    folder = tmp_path_factory.mktemp("further")
    held, more = write_digits(folder)
    save_file(trained_state(), folder / "net.safetensors")
    library = explore(
        NET, folder / "net.safetensors", data=str(held), train_data=str(more), out=folder / "library",
        blocks="blocks.[12]", variants=VARIANTS, epochs=0.1,
    )  # fmt: skip
    # latencies, which differ from run to run, have no say in it
    trials = [trial for trial in library.trials if trial.variant in ("student(8)", "grid(16)")][:2]
    exits = tuple(
        replace(
            exit_at(trial.block_index, 0.5), trial_id=trial.trial_id, block=trial.block, variant=trial.variant
        )
        for trial in trials
    )
    composed(library.manifest.checkpoint_sha256, exits).save(library.composition_path())
    return library.directory


@pytest.fixture
def directory(explored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(explored, tmp_path / "library"))


def _worths(library: Library) -> dict[tuple[str, str], tuple[float, float]]:
    return {
        (trial.block, trial.variant): stages.worth(trial)
        for trial in library.trials
        if trial.status == "trained"
    }


@pytest.fixture(scope="module")
def further(explored: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same library after a round in which caches learn something. Tests must not change it."""
    directory = shutil.copytree(explored, tmp_path_factory.mktemp("round") / "library")
    return explore_more(directory, epochs=6).directory


def test_no_cache_gets_worse_on_the_select_inputs_and_some_get_better(explored: Path, further: Path) -> None:
    before, after = _worths(Library.open(explored)), _worths(Library.open(further))
    assert after.keys() == before.keys()
    assert all(after[key] >= before[key] for key in before)
    assert sum(after[key] > before[key] for key in before) >= len(before) // 2


def test_what_was_there_stays_and_a_composition_goes_on_with_its_caches(
    explored: Path, further: Path, tmp_path: Path
) -> None:
    files = [path for path in explored.rglob("*.safetensors") if path.parent.name != "training"]
    for path in (*files, explored / "compositions" / "default.json"):
        assert filecmp.cmp(path, further / path.relative_to(explored), shallow=False), path.name
    directory = Path(shutil.copytree(further, tmp_path / "library"))
    library = Library.open(directory)
    images = np.load(library.manifest.settings["data"])["images"][:50]
    with gati.load(explored) as engine:
        before = [(each.class_index, each.exit) for each in engine(engine.preprocessing(images))]
    with gati.load(directory) as engine:
        after = [(each.class_index, each.exit) for each in engine(engine.preprocessing(images))]
    assert after == before
    composition = Composition.load(library.composition_path())
    assert len(gati.explain(composition, directory)) == len(composition.exits) == 2
    rows = {trial.trial_id: trial for trial in library.trials}
    replaced = [trial for trial in library.trials if trial.status == "replaced"]
    assert replaced
    for trial in replaced:
        better = rows[TrialId(trial.reason.rpartition(" ")[2])]
        assert better.status == "trained" and better.images_seen > trial.images_seen
    again = gati.compose(directory, accuracy=0.8, backend="torch", confidence=None, name="new")
    assert all(rows[leaving.trial_id].status == "trained" for leaving in again.exits)


def test_every_round_goes_on_from_the_last(further: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(further, tmp_path / "library"))
    second = explore_more(directory, epochs=0.05)
    rounds = json.loads((directory / "training" / "rounds.json").read_text())["rounds"]
    assert [each["number"] for each in rounds] == [2, 3]
    trained = {trial.trial_id for trial in second.trials if trial.status == "trained"}
    weights = {path.stem for path in (directory / "training").glob("*.safetensors")}
    assert weights == trained, "weights of what was replaced are not kept"
    assert set(rounds[1]["better"]) | set(rounds[1]["no_better"]) == {
        named_in_round(TrialId(name), 3) for name in (rounds[0]["better"] + rounds[0]["no_better"])
    }


def test_a_round_interrupted_again_and_again_goes_on_and_ends_with_the_same_caches(
    explored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = (Path(shutil.copytree(explored, tmp_path / name)) for name in ("whole", "broken"))
    explore_more(whole, epochs=0.1)
    monkeypatch.setattr(stages, "_SAVE_EVERY_S", 0.0)
    for advances in (10, 25, 15):
        with pytest.raises(Killed):
            explore_more(broken, epochs=0.1, progress=KilledAfter(advances))
        assert Library.open(broken).trials == Library.open(explored).trials, "usable meanwhile, as it was"
    with pytest.raises(LibraryError, match="unfinished round of training with another epochs"):
        explore_more(broken, epochs=1)
    explore_more(broken, epochs=0.1)
    assert not (broken / ".state").exists()
    names = sorted(path.name for path in (whole / "caches").iterdir())
    assert names == sorted(path.name for path in (broken / "caches").iterdir())
    for name in names:
        one, two = (load_file(folder / "caches" / name) for folder in (whole, broken))
        assert all(torch.equal(one[key], two[key]) for key in one), name
    for path in (whole / "outcomes").iterdir():
        assert filecmp.cmp(path, broken / "outcomes" / path.name, shallow=False), path.name


@pytest.fixture(scope="module")
def digit_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder)
    save_file(trained_state(), folder / "net.safetensors")
    return folder


def shortly(folder: Path, data: Any, out: Path, **options: Any) -> Library:
    return explore(
        NET, folder / "net.safetensors", data=data, out=out, blocks="blocks.1", variants=("grid(16)",),
        epochs=0.05, **options,
    )  # fmt: skip


@pytest.mark.parametrize("unique", [False, True])
def test_what_trained_is_found_again_where_inputs_have_copies(
    digit_files: Path, tmp_path: Path, unique: bool
) -> None:
    images = np.load(digit_files / "val.npz")["images"]
    np.savez(tmp_path / "val.npz", images=np.concatenate([images, images[:60]]))
    library = shortly(digit_files, str(tmp_path / "val.npz"), tmp_path / "out", unique=unique)
    record = library.input_record()
    assert record is not None and record.new.all() == unique
    explore_more(library.directory, epochs=0.05)
    assert json.loads((library.directory / "training" / "rounds.json").read_text())["rounds"]


def test_an_older_library_which_held_out_all_copies_is_trained_further(
    digit_files: Path, tmp_path: Path
) -> None:
    images = np.load(digit_files / "val.npz")["images"]
    data = tmp_path / "val.npz"
    np.savez(data, images=np.concatenate([images, images[:60]]))
    library = shortly(digit_files, str(data), tmp_path / "out")
    record, held = library.input_record(), load_data(data, library.preprocessing)
    assert record is not None
    train = held.subset(np.flatnonzero(~np.isin(held.identities, record.identities)))
    told = {**library.manifest.data, "train": f"val.npz {train.fingerprint}"}
    assert told != library.manifest.data
    library.write_manifest(replace(library.manifest, data=told))
    explore_more(library.directory, epochs=0.05)


HELD = """
import numpy as np
from torch.utils.data import Dataset


class Pictures(Dataset):
    def __init__(self, name):
        self.images = np.load(FOLDER + "/" + name)["images"]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index]


def held():
    return Pictures("val.npz")


def more():
    return Pictures("more.npz")
"""


@pytest.mark.parametrize("more", [None, "inputs.py:more"])
def test_inputs_of_a_callable_are_found_again_from_another_folder(
    more: str | None, digit_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inputs.py").write_text(HELD.replace("FOLDER", repr(str(digit_files))))
    monkeypatch.chdir(tmp_path)
    library = shortly(digit_files, "inputs.py:held", tmp_path / "out", train_data=more)
    monkeypatch.chdir(digit_files)
    explore_more(library.directory, epochs=0.05)
    said = Notes()
    again = f"{tmp_path}/inputs.py:more" if more else None
    shortly(digit_files, f"{tmp_path}/inputs.py:held", tmp_path / "out", train_data=again, progress=said)
    assert "is already finished: gati explore --more" in said.notes[-1]


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_what_was_explored_from_an_object_needs_it_again(digit_files: Path, tmp_path: Path) -> None:
    images = np.load(digit_files / "val.npz")["images"]
    more = np.load(digit_files / "more.npz")["images"]
    directory = shortly(digit_files, Pictures(images), tmp_path, train_data=Pictures(more)).directory
    with pytest.raises(DataError, match=r"from an object \(Pictures of 900 inputs\): pass data= again"):
        explore_more(directory, epochs=0.05)
    with pytest.raises(DataError, match=r"from an object \(Pictures of .* inputs\): pass train_data= again"):
        explore_more(directory, epochs=0.05, data=Pictures(images))
    with pytest.raises(DataError, match="from an object .* cannot be read again; explore from a file"):
        held_out(Library.open(directory))
    explore_more(directory, epochs=0.05, data=Pictures(images), train_data=Pictures(more))


def test_overlapped_lookups_have_the_same_cores_from_measuring_to_serving(
    digit_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []

    def costs(*_: Any, cores: int, **__: Any) -> OverlapCost:
        measured.append(cores)
        return OverlapCost(0.001, 0.0)

    monkeypatch.setattr("gati.exploration.lookups.measure_overlap", costs)
    with pytest.MonkeyPatch.context() as four:
        Cores.instead(4, four)
        library = shortly(digit_files, str(digit_files / "val.npz"), tmp_path, lookup_cores=2)
        assert measured[-1] == library.manifest.profile.lookup_cores == 2
        composition = gati.compose(tmp_path, accuracy=0.5, confidence=None, placement="overlapped")
        assert composition.lookup_cores == 2
        with gati.load(tmp_path) as engine:
            assert engine.lookup_cores == 2
        with pytest.raises(
            LibraryError, match=r"another exploration, with compositions of its caches \(default\)"
        ):
            shortly(digit_files, str(digit_files / "val.npz"), tmp_path, lookup_cores=3)
    Cores.instead(2, monkeypatch)
    said = Notes()
    shortly(digit_files, str(digit_files / "val.npz"), tmp_path, lookup_cores=2, progress=said)
    assert "is already finished: gati explore --more" in said.notes[-1]
    trials = explore_more(tmp_path, epochs=4, progress=said).trials
    (row,) = (each for each in trials if each.trial_id.endswith("--r2"))
    assert row.lookup_ms and row.overlapped_lookup_ms is None
    told = "those of the library have 2 cores of their own, but at most 1 can be reserved here"
    assert f"overlapped lookups are not measured: {told}" in said.notes


def test_a_round_without_time_to_train_is_one_line_and_no_round(directory: Path) -> None:
    with pytest.raises(DataError, match=r"too short to train anything: give --more \d+m or more"):
        explore_more(directory, budget_s=1e-3)
    assert not (directory / ".state").exists() and not (directory / "training" / "rounds.json").exists()


def test_what_is_not_there_is_said_in_one_line(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the training time is missing"):
        explore_more(directory)
    with pytest.raises(DataError, match=r"epochs must be above 0 and finite \(got nan\)"):
        explore_more(directory, epochs=float("nan"))
    with pytest.raises(LibraryError, match="run gati explore"):
        explore_more(tmp_path / "nowhere", epochs=1)
    images = np.load(Library.open(directory).manifest.settings["data"])["images"]
    np.savez(tmp_path / "other.npz", images=images[::-1])
    with pytest.raises(DataError, match=r"other.npz has changed since explore"):
        explore_more(directory, epochs=1, data=str(tmp_path / "other.npz"))
    with pytest.raises(DataError, match=r"differ from those of the exploration"):
        explore_more(directory, epochs=1, train_data=str(tmp_path / "other.npz"))
    shutil.rmtree(directory / "training")
    shutil.rmtree(directory / ".state", ignore_errors=True)
    with pytest.raises(LibraryError, match="has no weights to continue from"):
        explore_more(directory, epochs=1)


trials = st.lists(st.tuples(st.integers(0, 9), st.booleans()), unique_by=lambda each: each[0], max_size=8)


@given(trials, st.integers(2, 5))
def test_entering_a_round_twice_is_entering_it_once(drawn: list[tuple[int, bool]], number: int) -> None:
    table = [
        Trial(TrialId(f"b{block}--grid-8"), block, f"b{block}", "grid(8)", "trained") for block, _ in drawn
    ]
    before = {named_in_round(trial.trial_id, number): trial for trial in table}
    new = [
        Trial(name, trial.block_index, trial.block, trial.variant, "trained", images_seen=1)
        for (name, trial), (_, better) in zip(before.items(), drawn, strict=True)
        if better
    ]
    once = with_round(table, new, before)
    assert with_round(once, new, before) == once
    assert sum(trial.status == "trained" for trial in once) == len(table)
    assert {trial.trial_id for trial in once} == {trial.trial_id for trial in (*table, *new)}


def test_a_round_has_one_name_whatever_came_before() -> None:
    assert named_in_round(TrialId("a--grid-8"), 2) == "a--grid-8--r2"
    assert named_in_round(TrialId("a--grid-8--r2"), 13) == "a--grid-8--r13"
