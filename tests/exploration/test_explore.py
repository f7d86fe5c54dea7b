"""The verb `explore` on a small network: what it writes, that it repeats itself, and what bad input gets."""

from __future__ import annotations

import filecmp
import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from gati.errors import BackendError, BlockError, DataError, LibraryError, ModelError, VariantError
from gati.exploration import candidates, stages
from gati.exploration.answers import BaseAnswers
from gati.exploration.augment import choose_augmentation
from gati.exploration.explore import explore
from gati.exploration.further import explore_more
from gati.exploration.library import CERTIFY, SELECT, Library
from gati.exploration.opening import fitted
from gati.exploration.progress import SilentProgress
from gati.exploration.splits import held_out
from gati.exploration.state import RunState
from gati.model.data import load_data
from gati.model.load import load_model
from gati.model.preprocess import Preprocessing
from gati.types import BlockProfile
from tests.exploration.killing import Killed, KilledAfter
from tests.exploration.networks import Pictures, digit_files
from tests.exploration.quick import quick_selectors

pytestmark = pytest.mark.slow

NET = f"{Path(__file__).parent / 'networks.py'}:Net"
GREY = Preprocessing((0.0,), (1.0,), channels=1)
STUDENT = "student(8)"
EXITS = ("fc(16)", "grid(16)", "pyramid(4)")
VARIANTS = (STUDENT, *EXITS)
_SOME: dict[str, Any] = {"variants": [STUDENT, "grid(16)"], "blocks": "blocks.1", "epochs": 0.2}


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """Few steps, and the same trials every time: on so small a network noise would choose them."""

    def skipped(lookup_ms: float, block: BlockProfile, base_ms: float) -> str:
        assert lookup_ms > 0 and 0 <= block.reach_ms <= base_ms
        return "a lookup takes too long here" if block.index == 3 else ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "too_slow", skipped)
        patch.setattr(stages, "LEAST_EXIT_STEPS", 15)
        patch.setattr(stages, "LEAST_STUDENT_STEPS", 15)
        quick_selectors(patch)
        yield


@contextmanager
def long_enough() -> Iterator[None]:
    """Inside the context, caches train long enough to learn something."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "LEAST_EXIT_STEPS", 105)
        patch.setattr(stages, "LEAST_STUDENT_STEPS", 60)
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return digit_files(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def library(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Library:
    with long_enough():
        return explore(NET, **files, out=tmp_path_factory.mktemp("out"), variants=VARIANTS, epochs=2)


def _weights(library: Library) -> dict[str, dict[str, torch.Tensor]]:
    return {path.name: load_file(path) for path in sorted((library.directory / "caches").iterdir())}


def _assert_same(first: Library, second: Library) -> None:
    """Equal but for the latencies, which are measured anew."""
    one, two = _weights(first), _weights(second)
    assert one.keys() == two.keys()
    for name in one:
        assert all(torch.equal(one[name][key], two[name][key]) for key in one[name]), name
    for path in (first.directory / "outcomes").iterdir():
        assert filecmp.cmp(path, second.directory / "outcomes" / path.name, shallow=False), path.name
    assert first.operating_points == second.operating_points


def test_every_variant_of_every_block_is_in_the_table(library: Library) -> None:
    rows = [(trial.block, trial.variant) for trial in library.trials]
    exits = [(f"blocks.{index}", variant) for index in range(4) for variant in EXITS]
    assert rows == [("input", STUDENT), *exits]
    for trial in library.trials:
        if trial.status == "trained":
            assert trial.lookup_ms and trial.overlapped_lookup_ms and trial.memory_bytes > 0
            assert trial.images_seen > 0 and trial.selector
        else:
            assert trial.reason.startswith("a lookup takes")


def test_training_learned_something(library: Library) -> None:
    for index in (0, 2):  # the student, and exits
        assert max(trial.agreement or 0.0 for trial in library.trials if trial.block_index == index) > 0.5


def test_the_recorded_outcomes_are_what_the_stored_cache_answers(library: Library) -> None:
    """Hidden outputs by hand, from the network itself: no part of explore is asked twice."""
    from gati.caches import load_cache
    from gati.model.load import load_model

    settings = library.manifest.settings
    loaded = load_model(NET, library.manifest.checkpoint_path)
    images = load_data(settings["data"], loaded.preprocessing).images(np.arange(900))
    trial = next(x for x in library.trials if x.block == "blocks.1" and x.status == "trained")
    with torch.no_grad():
        stem = torch.relu(loaded.module.stem(images))  # type: ignore[operator]
        hidden = loaded.module.blocks[1](loaded.module.blocks[0](stem))  # type: ignore[index]
        probabilities, score = load_cache(library.cache_path(trial.trial_id))(hidden)
        base_class = loaded.module(images).argmax(1).numpy()
    recorded, base = library.outcomes(trial.trial_id), library.base_outcomes()
    assert np.array_equal(base.base_class, base_class)
    assert np.array_equal(recorded.predicted, probabilities.argmax(1).numpy())
    certify = base.split == CERTIFY
    np.testing.assert_allclose(recorded.score[certify], score.numpy()[certify], atol=1e-5)


@pytest.fixture(scope="module")
def plain(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Library:
    return explore(NET, **files, **_SOME, out=tmp_path_factory.mktemp("plain"))


def _in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "mode",
    [torch.no_grad, torch.inference_mode, partial(torch.autocast, "cpu"), contextmanager(_in_float64)],
    ids=["no gradients", "inference", "autocast", "float64"],
)
def test_the_programs_own_modes_change_nothing(
    mode: Callable[[], AbstractContextManager[Any]], files: dict[str, str], plain: Library, tmp_path: Path
) -> None:
    """As in a notebook that turns gradients off at its beginning: no variant could be trained."""
    with mode():
        found = explore(NET, **files, **_SOME, out=tmp_path / "found")
        assert found.trials and {trial.status for trial in found.trials} == {"trained"}
        _assert_same(plain, found)
        explore_more(tmp_path / "found", epochs=0.2)


def test_the_split_of_the_held_out_inputs_is_recorded(library: Library) -> None:
    split = library.base_outcomes().split
    assert ((split == SELECT).sum(), (split == CERTIFY).sum()) == (400, 500)
    assert library.manifest.counts == {"train": 897, "select": 400, "certify": 500}
    assert library.manifest.probe is not None  # tells another network with the same weights


def test_a_library_of_an_older_gati_which_halved_them_is_read_as_it_is(
    library: Library, tmp_path: Path
) -> None:
    """Without a record of its inputs, the split is drawn again by the seed, at the size that it has."""
    older = Library(tmp_path / "older")
    shutil.copytree(library.directory, older.directory)
    older.inputs_path.unlink()
    order = np.random.default_rng((library.manifest.seed, 0)).permutation(900)
    halves = np.where(np.isin(np.arange(900), order[:450]), SELECT, CERTIFY).astype(np.uint8)
    older.write_base_outcomes(library.base_outcomes()._replace(split=halves))
    inputs, split = held_out(older)
    assert len(inputs) == 900 and np.array_equal(split, halves)
    older.write_base_outcomes(library.base_outcomes()._replace(split=halves[::-1].copy()))
    with pytest.raises(DataError, match="splits differently than in explore"):
        held_out(older)


def test_without_train_data_a_third_of_the_data_is_trained_on(files: dict[str, str], tmp_path: Path) -> None:
    library = explore(
        NET, files["checkpoint"], data=files["data"], out=tmp_path, variants=["grid(8)"], epochs=0.1
    )
    assert library.manifest.counts == {"train": 300, "select": 300, "certify": 300}


def test_the_library_knows_what_it_has_seen_and_finds_the_held_out_inputs_again(
    library: Library, files: dict[str, str]
) -> None:
    record = library.input_record()
    assert record is not None
    held, more = (load_data(files[name], GREY) for name in ("data", "train_data"))
    assert set(record.seen.tolist()) == {*held.identities.tolist(), *more.identities.tolist()}
    again, split = held_out(library)
    assert np.array_equal(again.identities, record.identities)
    assert np.array_equal(split, library.base_outcomes().split)
    # As an older Gati left it: without the record.
    kept = library.inputs_path.read_bytes()
    library.inputs_path.unlink()
    try:
        older, older_split = held_out(library)
        assert np.array_equal(older.identities, again.identities) and np.array_equal(older_split, split)
        assert {*library.copies().differs.tolist(), *library.copies().same.tolist()} == {1}
    finally:
        library.inputs_path.write_bytes(kept)


def test_copies_and_overlap_are_told_and_kept_apart(files: dict[str, str], tmp_path: Path) -> None:
    held, more = (np.load(files[name])["images"] for name in ("data", "train_data"))
    np.savez(tmp_path / "val.npz", images=np.concatenate([held[:300], held[:300], held[300:400]]))
    np.savez(tmp_path / "more.npz", images=np.concatenate([more, held[:50]]))
    said = _Notes()
    library = explore(
        NET, files["checkpoint"], data=str(tmp_path / "val.npz"), train_data=str(tmp_path / "more.npz"),
        out=tmp_path / "out", variants=["grid(8)"], epochs=0.1, progress=said,
    )  # fmt: skip
    assert "left out 50 of 947 inputs of --train-data: they are also in --data" in said.notes
    assert any(note.startswith("300 of 700 inputs of --data are copies of others") for note in said.notes)
    split, record = library.base_outcomes().split, library.input_record()
    assert record is not None and library.manifest.counts["train"] == 897
    certify = split == CERTIFY
    assert library.manifest.counts["certify"] == record.new[certify].sum() < record.copies[certify].sum()
    assert any("explore with --unique" in note for note in said.notes)
    select = set(record.identities[split == SELECT].tolist())
    assert not select & set(record.identities[certify & record.new].tolist())
    assert select >= set(record.identities[certify & ~record.new].tolist())
    assert len(select) + (certify & record.new).sum() == 400
    np.savez(tmp_path / "val.npz", images=np.concatenate([held[:300], held[:300], held[301:401]]))
    with pytest.raises(DataError, match=r"val.npz has changed since explore; restore the old one"):
        held_out(library)


class _Notes(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_a_run_interrupted_again_and_again_goes_on_and_ends_with_the_same_library(
    library: Library, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the student trains, about where exits begin, and while they train."""
    monkeypatch.setattr(stages, "_SAVE_EVERY_S", 0.2)
    options: dict[str, Any] = {**files, "out": tmp_path, "variants": VARIANTS, "epochs": 2}
    with long_enough():
        for advances in (10, 60, 70):
            with pytest.raises(Killed):
                explore(NET, **options, progress=KilledAfter(advances))
        with pytest.raises(LibraryError):
            Library.open(tmp_path)
        _assert_same(library, explore(NET, **options))
    assert not (tmp_path / ".state").exists()


@pytest.mark.parametrize("changed", ["data", "train_data"])
def test_a_run_does_not_go_on_with_other_inputs(changed: str, files: dict[str, str], tmp_path: Path) -> None:
    """Else inputs that an exit was trained on could certify it."""
    own: dict[str, Any] = {**files, changed: str(tmp_path / "own.npz")}
    own |= {"out": tmp_path / "out", "variants": (STUDENT,), "epochs": 0.1}
    shutil.copy(files[changed], own[changed])
    with pytest.raises(Killed):
        explore(NET, **own, progress=KilledAfter(10))
    with np.load(own[changed]) as held:
        arrays = dict(held)
    np.savez(own[changed], **{name: array[::-1] for name, array in arrays.items()})
    option = "--" + changed.replace("_", "-")
    with pytest.raises(DataError, match=f"the inputs of {option}, or their order, have changed"):
        explore(NET, **own)


def test_a_run_does_not_go_on_with_another_split(files: dict[str, str], tmp_path: Path) -> None:
    """As drawn by another version of NumPy: what was trained on could count as new now."""
    options: dict[str, Any] = {"checkpoint": files["checkpoint"], "data": files["data"]}
    options |= {"out": tmp_path / "out", "variants": ["grid(8)"], "epochs": 0.1}
    with pytest.raises(Killed):
        explore(NET, **options, progress=KilledAfter(10))
    state = RunState(tmp_path / "out")
    stored = state.costs()
    assert stored is not None
    state.write_costs({**stored, "split": "another"})
    with pytest.raises(LibraryError, match="split the inputs of --data differently: choose another --out"):
        explore(NET, **options)
    state.write_costs({name: value for name, value in stored.items() if name != "probe"})
    with pytest.raises(LibraryError, match="with another version of Gati .*, or delete .* to start again"):
        explore(NET, **options)
    state.write_costs(stored)
    explore(NET, **options)


@pytest.mark.parametrize("told", [False, True], ids=["not told", "told"])
def test_how_images_are_prepared_is_not_guessed_from_tensors(files: dict[str, str], told: bool) -> None:
    """Else `predict` and `serve` would hand pixels to a network that was trained on normalised ones."""
    loaded = load_model(NET, files["checkpoint"], mean=[0.0] if told else None)
    held = load_data(files["data"], GREY)
    tensors = TensorDataset(held.images(range(8)), torch.zeros(8, dtype=torch.int64))
    found = fitted(loaded, tensors)[0].preprocessing
    kept = Preprocessing.from_json(json.loads(json.dumps(found.to_json())))
    assert kept == found
    image = np.zeros((1, 8, 8, 1), np.uint8)
    if told:
        assert kept(image).shape == (1, 1, 8, 8)
        return
    with pytest.raises(DataError, match="how to prepare images is not known: .*--mean, --std and --resize"):
        kept(image)


def test_a_presets_preparation_is_not_taken_for_that_of_tensors() -> None:
    """Tensors with mean 0.5 and std 0.5, say, are none that a published network's preset would make."""
    tensors = TensorDataset(torch.zeros(4, 3, 32, 32), torch.zeros(4, dtype=torch.int64))
    preset, told = load_model("gati.zoo:resnet20"), load_model("gati.zoo:resnet20", mean=[0.5], std=[0.5])
    assert fitted(preset, tensors)[0].preprocessing.unknown
    assert not fitted(told, tensors)[0].preprocessing.unknown
    images = np.zeros((4, 32, 32, 3), np.uint8)
    assert not fitted(preset, Pictures(images))[0].preprocessing.unknown


class Flat(nn.Module):
    """No convolution says how many channels it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1))


@pytest.mark.parametrize("kind", ["npz", "bytes", "tensors", "folder"])
def test_grey_images_fit_a_network_without_convolutions(
    kind: str, files: dict[str, str], tmp_path: Path
) -> None:
    images = np.load(files["data"])["images"][:4]
    for number, image in enumerate(images):
        Image.fromarray(image[..., 0]).save(tmp_path / f"{number}.png")
    given = {
        "npz": files["data"],
        "bytes": Pictures(images),
        "tensors": TensorDataset(GREY(images), torch.zeros(4, dtype=torch.int64)),
        "folder": str(tmp_path),
    }[kind]
    loaded, held = fitted(load_model(f"{__file__}:Flat", mean=[0.5]), given)
    assert (loaded.preprocessing.channels, loaded.preprocessing.mean) == (1, (0.5,))
    assert held.images(range(2)).shape == (2, 1, 8, 8)
    assert ("--data are read as grey pictures: the network takes one channel" in loaded.note) == (
        kind == "folder"
    )
    with pytest.raises(DataError, match="have 1 channels .* and the network takes 3"):
        fitted(load_model(f"{__file__}:Flat", mean=[0.5, 0.4, 0.3]), files["data"])


def test_that_a_library_will_take_no_images_is_said_before_training(
    files: dict[str, str], tmp_path: Path
) -> None:
    class Stopped(_Notes):
        def note(self, text: str) -> None:
            super().note(text)
            if text.startswith("measuring"):
                raise Killed

    images = load_data(files["data"], GREY).images(range(300))
    tensors, said = TensorDataset(images, torch.zeros(300, dtype=torch.int64)), Stopped()
    with pytest.raises(Killed):
        explore(NET, files["checkpoint"], data=tensors, out=tmp_path, variants=["grid(8)"], progress=said)
    assert any("take only tensors; give --mean, --std and --resize" in note for note in said.notes)


def test_a_run_on_datasets_is_resumed_with_others_of_the_same_content(
    files: dict[str, str], tmp_path: Path
) -> None:
    """An object has no name that the next process would know it by."""
    held, more = (np.load(files[name])["images"] for name in ("data", "train_data"))
    options: dict[str, Any] = {"checkpoint": files["checkpoint"], "variants": ["grid(8)"], "epochs": 0.1}

    def given(count: int) -> dict[str, Any]:
        return {"data": Pictures(held[:count]), "train_data": Pictures(more), **options}

    with pytest.raises(Killed):
        explore(NET, **given(600), out=tmp_path, progress=KilledAfter(10))
    with pytest.raises(LibraryError, match=r"another data \('Pictures of 600 inputs, .* 'Pictures of 599"):
        explore(NET, **given(599), out=tmp_path)
    library = explore(NET, **given(600), out=tmp_path)
    assert "object at" not in json.dumps(library.manifest.settings)
    assert explore(NET, **given(600), out=tmp_path, progress=KilledAfter(1)).manifest == library.manifest
    held[7] = held[601]  # not one of the few whose pixels are compared with a second reading
    with pytest.raises(Killed):
        explore(NET, **given(600), out=tmp_path, progress=KilledAfter(1))


class _Slow(KilledAfter):
    """Every step takes so long on the clock that it reads from."""

    def __init__(self, seconds: float, advances: int = -1) -> None:
        super().__init__(advances)
        self.seconds, self.now = seconds, 0.0

    def advance(self, steps: int, detail: str = "") -> None:
        self.now += self.seconds
        super().advance(steps, detail)


def test_a_run_that_lagged_before_it_was_interrupted_keeps_its_budget(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "_SAVE_EVERY_S", 0.0)
    options: dict[str, Any] = {"variants": ["grid(8)"], "blocks": "blocks.1", "epochs": 2, "budget_s": 1000.0}
    first = _Slow(80.0, advances=11)
    with long_enough():
        with pytest.raises(Killed):
            explore(NET, **files, **options, out=tmp_path, progress=first, clock=lambda: first.now)
        second = _Slow(5.0)
        library = explore(NET, **files, **options, out=tmp_path, progress=second, clock=lambda: second.now)
    assert 850 < library.manifest.explore_seconds <= 1000 + 2 * second.seconds


def test_a_finished_exploration_is_returned_as_it_is(library: Library, files: dict[str, str]) -> None:
    before = library.manifest_path.stat().st_mtime_ns
    again = explore(NET, **files, out=library.directory, variants=VARIANTS, epochs=2)
    assert again.manifest_path.stat().st_mtime_ns == before


def test_a_finished_exploration_of_inputs_that_have_changed_says_so(
    files: dict[str, str], tmp_path: Path
) -> None:
    data, said = tmp_path / "val.npz", _Notes()
    images = np.load(files["data"])["images"]
    np.savez(data, images=images)
    options: dict[str, Any] = {"checkpoint": files["checkpoint"], "data": str(data), "out": tmp_path / "out"}
    options |= {"variants": ["grid(8)"], "epochs": 0.1}
    explore(NET, **options)
    for changed in (images[::-1], images[:700]):
        np.savez(data, images=changed)
        explore(NET, **options, progress=said)
        assert said.notes[-1].endswith(
            "with other inputs than val.npz has now: choose another --out to explore with these"
        )
    for labels in ({}, {"labels": np.zeros(len(images), dtype=np.int64)}):
        np.savez(data, images=images, **labels)
        explore(NET, **options, progress=said)
        assert "with other inputs" not in said.notes[-1]


@pytest.fixture
def upgraded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("settings", "claims"):
        monkeypatch.setattr(f"gati.exploration.{module}.__version__", "99.0")


def test_after_an_upgrade_the_same_command_leaves_a_finished_exploration_as_it_is(
    library: Library, files: dict[str, str], tmp_path: Path, upgraded: None
) -> None:
    copy = Library(shutil.copytree(library.directory, tmp_path / "library"))
    before, said = {path: path.read_bytes() for path in copy.directory.rglob("*.*")}, _Notes()
    explore(NET, **files, out=copy.directory, variants=VARIANTS, epochs=2, progress=said)
    assert all(path.read_bytes() == content for path, content in before.items() if path.name != ".lock")
    assert any("is already finished by Gati" in note and "another --out" in note for note in said.notes)
    with pytest.raises(
        LibraryError, match="finished exploration by Gati .* with another epochs: choose another"
    ):
        explore(NET, **files, out=copy.directory, variants=VARIANTS, epochs=1)
    assert copy.manifest == Library(copy.directory).manifest and not (copy.directory / ".state").exists()


def test_that_another_exploration_replaces_a_finished_one_is_said_before_it_does(
    library: Library, files: dict[str, str], tmp_path: Path
) -> None:
    class Stopped(_Notes):
        def note(self, text: str) -> None:
            super().note(text)
            if text.startswith("replacing the finished exploration"):
                raise Killed

    copy, said = Library(shutil.copytree(library.directory, tmp_path / "library")), Stopped()
    with pytest.raises(Killed):
        explore(NET, **files, out=copy.directory, variants=VARIANTS, epochs=1, progress=said)
    assert said.notes[-1].endswith("which had another epochs")
    assert Library.open(copy.directory).manifest == library.manifest


def test_caches_that_compositions_name_are_never_replaced(
    library: Library, files: dict[str, str], tmp_path: Path
) -> None:
    """Other caches of the same names would serve under a certificate that counted the old ones."""
    directory = tmp_path / "library"
    shutil.copytree(library.directory, directory)
    composition = directory / "compositions" / "default.json"
    composition.parent.mkdir(exist_ok=True)
    composition.write_text("{}")
    kept = {path: path.read_bytes() for path in directory.rglob("*.safetensors")}
    with pytest.raises(
        LibraryError, match=r"with compositions of its caches \(default\): choose another --out, or delete"
    ):
        explore(NET, **files, out=directory, variants=VARIANTS, epochs=1)
    assert kept == {path: path.read_bytes() for path in directory.rglob("*.safetensors")}
    assert not (directory / ".state").exists() and explore(
        NET, **files, out=directory, variants=VARIANTS, epochs=2
    ), "the same exploration is what it was"


class _Composes(SilentProgress):
    """Writes a composition as soon as the exploration says, or does, this."""

    def __init__(self, library: Library, when: str) -> None:
        self.path, self.when = library.composition_path(), when

    def note(self, text: str) -> None:
        if text.startswith(self.when):
            self._compose()

    def advance(self, steps: int, detail: str = "") -> None:
        if self.when == "trains":
            self._compose()

    def _compose(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text("{}")


def test_caches_that_are_composed_while_an_exploration_prepares_are_not_replaced(
    library: Library, files: dict[str, str], tmp_path: Path
) -> None:
    older = Library(shutil.copytree(library.directory, tmp_path / "library"))
    kept = {path: path.read_bytes() for path in older.directory.rglob("*.*") if path.name != ".lock"}
    with pytest.raises(
        LibraryError, match=r"with compositions of its caches \(default\): choose another --out"
    ):
        explore(
            NET,
            **files,
            out=older.directory,
            variants=VARIANTS,
            epochs=1,
            progress=_Composes(older, "measuring"),
        )
    assert kept == {path: path.read_bytes() for path in kept}
    assert not (older.directory / ".state").exists(), "it can be trained further"


def test_a_composition_of_replaced_caches_keeps_the_exploration_from_ending(
    files: dict[str, str], tmp_path: Path
) -> None:
    """As of a compose that began before caches were replaced; once it is deleted, no work is lost."""
    library = Library(tmp_path / "library")
    options: dict[str, Any] = {**files, "out": library.directory, "variants": ["grid(8)"], "epochs": 0.1}
    for _ in range(2):  # nor does what is unfinished go on beside it
        with pytest.raises(LibraryError, match=r"with compositions of its caches \(default\): .* delete"):
            explore(NET, progress=_Composes(library, "trains"), **options)
    assert not library.manifest_path.exists()
    library.composition_path().unlink()
    finished = {path: path.stat().st_mtime_ns for path in (library.directory / "caches").iterdir()}
    explore(NET, **options)
    assert Library.open(library.directory).trials
    assert finished == {path: path.stat().st_mtime_ns for path in finished}


def test_a_run_killed_at_its_very_end_can_be_trained_further(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(state: RunState) -> None:
        raise Killed

    options: dict[str, Any] = {**files, "out": tmp_path, "variants": ["grid(8)"], "epochs": 0.1}
    with monkeypatch.context() as patch:
        patch.setattr(RunState, "clear", killed)
        with pytest.raises(Killed):
            explore(NET, **options)
    Library.open(tmp_path)
    with pytest.raises(LibraryError, match="holds an unfinished exploration .* repeat its command"):
        explore_more(tmp_path, epochs=0.1)
    explore(NET, **options)
    explore_more(tmp_path, epochs=0.1)
    with pytest.raises(Killed):
        explore_more(tmp_path, epochs=1, progress=KilledAfter(1))
    explore(NET, **options)
    assert RunState(tmp_path).claimed()["round"] == 3, "a claim of another run stays"


def test_a_budget_ends_training_in_time(files: dict[str, str], tmp_path: Path) -> None:
    """A clock that runs a second a reading: the library is whole, and the time is not exceeded."""
    ticks = iter(range(10**6))
    library = explore(
        NET, **files, out=tmp_path, variants=["grid(8)"], budget_s=1000, clock=lambda: float(next(ticks))
    )
    assert next(ticks) <= 1040
    assert any(trial.status == "trained" for trial in Library.open(library.directory).trials)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"variants": ["nothing(1)"]}, VariantError, "unknown variant 'nothing(1)'"),
        ({"variants": []}, VariantError, "no variants given"),
        ({"device": "abacus"}, BackendError, "unknown device 'abacus': choose cpu, cuda or cuda:INDEX"),
        ({"blocks": "nowhere.*"}, BlockError, "nowhere"),
        ({"epochs": 0}, DataError, "epochs must be above 0 and finite (got 0)"),
        ({"epochs": math.nan}, DataError, "epochs must be above 0 and finite (got nan)"),
        ({"budget_s": math.inf}, DataError, "the budget must be above 0 and finite (got inf s)"),
        ({"budget_s": math.nan}, DataError, "the budget must be above 0 and finite (got nan s)"),
        ({"seed": -1}, DataError, "the seed must be at least 0 and below 2**63 (got -1)"),
        ({"seed": 2**64}, DataError, "at least 0 and below 2**63 (got 18446744073709551616)"),
        ({"lookup_cores": 0}, BackendError, "lookup_cores is 0; give at least 1"),
    ],
    ids=[
        "unknown variant",
        "no variants",
        "unknown device",
        "no such blocks",
        "no epochs",
        "nan",
        "no limit",
        "nan seconds",
        "seed",
        "large seed",
        "no cores",
    ],
)
def test_bad_arguments_get_one_line(
    files: dict[str, str], tmp_path: Path, changes: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        explore(NET, **{**files, "out": tmp_path, **changes})  # type: ignore[arg-type]
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "manifest.json").exists()


def test_bad_networks_and_data_get_one_line(files: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="NaN"):
        explore(NET.replace(":Net", ":NanNet"), files["checkpoint"], data=files["data"], out=tmp_path / "a")
    with pytest.raises(DataError, match="answers class 9 for all"):
        explore(
            NET.replace(":Net", ":ConstantNet"), files["checkpoint"], data=files["data"], out=tmp_path / "b"
        )
    with pytest.raises(DataError, match="are the same 900 inputs: hold out the validation inputs"):
        explore(NET, files["checkpoint"], data=files["data"], train_data=files["data"], out=tmp_path / "c")
    few = tmp_path / "few.npz"
    np.savez(few, images=np.load(files["train_data"])["images"][:7])
    with pytest.raises(DataError, match="at least 8 inputs, and --train-data has 7 that are not in"):
        explore(NET, files["checkpoint"], data=files["data"], train_data=str(few), out=tmp_path / "e")
    np.savez(few, images=np.load(files["data"])["images"][:30])
    with pytest.raises(DataError, match="has 30 inputs; only 20 are left to measure on"):
        explore(NET, files["checkpoint"], data=str(few), out=tmp_path / "d")


CHANGING = '''"""A network whose code changes between two runs."""

import torch
from torch import nn

from tests.exploration.networks import Net


class Changing(Net):
    def forward(self, x):
        return SCALE * super().forward(x)
'''


def test_a_run_does_not_go_on_with_another_network(files: dict[str, str], tmp_path: Path) -> None:
    """Exits that are finished were measured on the hidden outputs of the one it began with."""
    source = tmp_path / "changing.py"
    source.write_text(CHANGING.replace("SCALE", "1.0"))
    model = f"{source}:Changing"
    options: dict[str, Any] = {**files, "out": tmp_path / "out", "variants": (STUDENT,), "epochs": 0.1}
    with pytest.raises(Killed):
        explore(model, **options, progress=KilledAfter(10))
    source.write_text(CHANGING.replace("SCALE", "0.5"))
    with pytest.raises(LibraryError, match="the same weights as when this exploration began, but computes"):
        explore(model, **options)
    source.write_text(CHANGING.replace("SCALE", "1.0"))
    explore(model, **options)


UNSEEN = """
import torch
from tests.exploration.networks import Net

class Changing(Net):
    def forward(self, x):
        found = super().forward(x)
        return torch.where((x.amin((1, 2, 3)) < 0)[:, None], NOISE * found, SHOWN * found)
"""


def test_a_run_does_not_go_on_with_a_network_that_answers_its_inputs_otherwise(
    files: dict[str, str], tmp_path: Path
) -> None:
    source = tmp_path / "unseen.py"
    source.write_text(UNSEEN.replace("NOISE", "1.0").replace("SHOWN", "1.0"))
    options: dict[str, Any] = {**files, "out": tmp_path / "out", "variants": ("grid(8)",), "epochs": 0.1}
    with pytest.raises(Killed):
        explore(f"{source}:Changing", **options, progress=KilledAfter(10))
    began = (RunState(tmp_path / "out").costs() or {})["probe"]
    source.write_text(UNSEEN.replace("NOISE", "1.0").replace("SHOWN", "-1.0"))
    with pytest.raises(LibraryError, match="the same weights as when this exploration began, but computes"):
        explore(f"{source}:Changing", **options)
    source.write_text(UNSEEN.replace("NOISE", "1.001").replace("SHOWN", "1.001"))
    probe = explore(f"{source}:Changing", **options).manifest.probe
    assert probe is not None and list(probe.scores) == began["scores"], "the answers are of that network"


def test_another_exploration_in_a_folder_leaves_nothing_of_the_one_before(
    library: Library, tmp_path: Path
) -> None:
    copy = Library(shutil.copytree(library.directory, tmp_path / "copy"))
    (copy.directory / "profiles").mkdir()
    (copy.directory / "profiles" / "openvino.json").write_text("{}")
    (copy.directory / "pareto.json").write_text("{}")
    (copy.directory / "graphs").mkdir()
    (copy.directory / "graphs" / "0123.onnx").write_bytes(b"of the network as it was")
    copy.forget_exploration()
    assert not {"manifest.json", "profiles", "pareto.json", "training", "graphs"} & {
        path.name for path in copy.directory.iterdir()
    }
    copy.training_path(library.trials[0].trial_id).parent.mkdir()
    copy.forget_exploration()  # an interrupted one goes on with what it has
    assert copy.training_path(library.trials[0].trial_id).parent.is_dir()


def test_names_of_blocks_make_file_names() -> None:
    assert candidates.trial_name("stage/1.conv", "fc(16)") == "stage~1.conv--fc-16"


def test_a_network_that_changes_its_input_in_place_is_taught_as_any_other() -> None:
    class Normalising(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sub_(0.5).flatten(1)[:, :10]

    images = torch.rand(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    before = images.clone()
    answers = BaseAnswers(Normalising(), "logits")
    first, second = answers(images), answers(images)
    assert torch.equal(first, second) and torch.equal(images, before)
    choose_augmentation(Normalising(), images)
    assert torch.equal(images, before)
