"""A network of many classes and a folder of some pictures: every verb runs, and no accuracy is made up."""

from __future__ import annotations

import importlib.util
import json
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

import gati
from gati.cli import run
from gati.composition.load import open_model
from gati.evaluation import bench as bench_module
from gati.exploration import candidates, stages
from gati.exploration.library import Library
from tests.conftest import SHARED_DATA
from tests.engine.served import composed, exit_at
from tests.exploration.networks import digits, trained_state
from tests.exploration.quick import quick_selectors

NET = f"{Path(__file__).parent / 'exploration' / 'networks.py'}:Net"  # of 10 classes
FOLDERS = {"five": 5, "seven": 7, "two": 2}  # sorted as they stand: their numbers say nothing
NAMES = [f"digit {number}" for number in range(10)]
PICTURES = 40  # of each digit, in each folder


def write_pictures(folder: Path, skip: int) -> None:
    images, labels = digits()
    for name, digit in FOLDERS.items():
        (folder / name).mkdir(parents=True)
        for row in np.flatnonzero(labels == digit)[skip : skip + PICTURES]:
            Image.fromarray(images[row, ..., 0]).save(folder / name / f"{row}.png")


@pytest.fixture(scope="module", autouse=True)
def _no_cache_is_too_slow_and_none_learns_long() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "too_slow", lambda *arguments: "")
        patch.setattr(stages, "LEAST_EXIT_STEPS", 60)
        quick_selectors(patch)
        yield


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder / "val", 0)
    write_pictures(folder / "test", PICTURES)
    save_file(trained_state(), folder / "net.safetensors")
    (folder / "map.json").write_text(json.dumps(FOLDERS))
    (folder / "names.txt").write_text("\n".join(NAMES))
    return folder


def explored(pictures: Path, out: str, *more: str) -> str:
    command = ["explore", NET, "--checkpoint", str(pictures / "net.safetensors")]
    command += ["--data", str(pictures / "val"), "--out", str(pictures / out), "--variants", "grid(8)"]
    assert run([*command, "--epochs", "1", *more]) == 0
    composed_of_one_cache(Library(pictures / out))
    return str(pictures / out)


def composed_of_one_cache(library: Library) -> None:
    """A composition that latencies, which differ from run to run, have no say in."""
    trial = next(trial for trial in library.trials if trial.status == "trained")
    leaving = replace(exit_at(0, 0.5), trial_id=trial.trial_id, block=trial.block, variant=trial.variant)
    composed(library.manifest.checkpoint_sha256, (leaving,)).save(library.composition_path())


@pytest.fixture(scope="module")
def plain(pictures: Path) -> str:
    """A library explored and composed without a word about names or labels."""
    return explored(pictures, "plain")


@pytest.fixture(scope="module")
def true_accuracy(pictures: Path, plain: str) -> float:
    """Of the network on the test pictures, counted here."""
    right = []
    for name, digit in FOLDERS.items():
        answers = gati.predict(plain, sorted((pictures / "test" / name).iterdir()))
        right += [answer.class_index == digit for answer in answers]
    return float(np.mean(right))


@pytest.mark.slow
def test_names_and_labels_that_are_not_the_networks_are_left_out_everywhere(
    pictures: Path, plain: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(Path(plain))
    assert library.manifest.class_names is None and library.base_outcomes().label is None
    monkeypatch.setattr(bench_module, "BACKENDS", {"torch": bench_module.BACKENDS["torch"]})
    data = ["--data", str(pictures / "test")]
    evaluation = pictures / "evaluation.json"
    note = "note: test has 3 classes and the network 10: labels and names are not the network's"
    assert run(["evaluate", plain, *data, "--per-class", "--json", str(evaluation)]) == 0
    assert capsys.readouterr().out.count(note) == 1
    found = json.loads(evaluation.read_text())
    assert found["accuracy"] is None and found["base_accuracy"] is None and 0.0 < found["agreement"] <= 1.0
    assert run(["bench", plain, *data, "--repetitions", "1", "--seconds", "0"]) == 0
    assert capsys.readouterr().out.count(note) == 1
    rows = json.loads((library.directory / "bench.json").read_text())["rows"]
    assert {row["accuracy"] for row in rows} == {None}
    assert run(["certify", plain, *data, "--per-class"]) == 0
    said = capsys.readouterr().out
    assert said.count(note) == 1 and "accuracy:" not in said
    assert run(["predict", plain, *map(str, sorted((pictures / "test" / "two").iterdir())[:3])]) == 0
    assert run(["report", plain]) == 0
    assert open_model(plain).class_names is None, "what `gati serve` and `gati stream` answer with"


@pytest.mark.slow
def test_explore_says_what_it_left_out(pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    explored(pictures, "told")
    lines = "".join(capsys.readouterr()).splitlines()
    assert sum("val has 3 classes and the network 10" in line for line in lines) == 1


@pytest.mark.slow
def test_a_label_map_gives_the_true_accuracy(pictures: Path, plain: str, true_accuracy: float) -> None:
    assert 0.5 < true_accuracy < 1.0
    test = pictures / "test"
    measured = gati.evaluate(plain, test, label_map=FOLDERS, class_names=pictures / "names.txt")
    answers = gati.evaluate(plain, test)
    assert measured.note == "" and answers.accuracy is None
    assert measured.accuracy == pytest.approx(true_accuracy)
    assert {each.name for each in measured.classes} <= set(NAMES)
    found = gati.certify(plain, test, label_map=pictures / "map.json")
    assert found.accuracy_drop is not None and found.accuracy_drop.n == 3 * PICTURES


@pytest.mark.slow
def test_what_explore_was_told_later_verbs_know(pictures: Path, true_accuracy: float) -> None:
    told = ["--class-names", str(pictures / "names.txt"), "--label-map", str(pictures / "map.json")]
    directory = explored(pictures, "named", *told)
    library = Library(Path(directory))
    assert library.manifest.class_names == tuple(NAMES)
    label = library.base_outcomes().label
    assert label is not None and set(label.tolist()) == {2, 5, 7}
    measured = gati.evaluate(directory, pictures / "test")
    assert measured.base_accuracy is not None and abs(measured.base_accuracy - true_accuracy) < 0.2
    (answer,) = gati.predict(directory, [next((pictures / "test" / "two").iterdir())])
    assert answer.class_name == NAMES[answer.class_index]
    (pictures / "map.json").rename(pictures / "elsewhere.json")  # what it says is kept, not where it lay
    try:
        assert gati.evaluate(directory, pictures / "test", limit=10).accuracy is not None
    finally:
        (pictures / "elsewhere.json").rename(pictures / "map.json")
    images, labels = digits()
    np.savez(pictures / "all.npz", images=images[-50:], labels=labels[-50:])
    assert gati.evaluate(directory, pictures / "all.npz").note == "", "the map is not for these labels"


def test_measuring_on_what_explore_has_seen_is_told(pictures: Path, plain: str) -> None:
    (pictures / "mixed").mkdir()
    for folder, count in (("val", 7), ("test", 5)):
        for path in sorted((pictures / folder / "two").iterdir())[:count]:
            (pictures / "mixed" / f"another name for {path.name}").write_bytes(path.read_bytes())
    note = "gati explore has seen 7 of these 12 inputs, so the results are too optimistic"
    assert gati.evaluate(plain, pictures / "mixed").note == note
    assert gati.evaluate(plain, pictures / "test").note.startswith("test has 3 classes")


def test_a_library_that_an_older_gati_named_wrongly_still_runs(pictures: Path, plain: str) -> None:
    manifest = Library(Path(plain)).manifest_path
    kept = manifest.read_text()
    manifest.write_text(json.dumps({**json.loads(kept), "class_names": sorted(FOLDERS)}))
    try:
        measured = gati.evaluate(plain, pictures / "test")
        assert measured.accuracy is None and all(each.name.isdigit() for each in measured.classes)
    finally:
        manifest.write_text(kept)


def test_wrong_names_are_refused_before_anything_is_trained(
    pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pictures / "few.txt").write_text("one\ntwo\n")
    command = ["explore", NET, "--data", str(pictures / "val"), "--out", str(pictures / "refused")]
    assert run([*command, "--class-names", str(pictures / "few.txt")]) == 2
    assert "few.txt has 2 names and the network 10 classes" in capsys.readouterr().err
    assert not (pictures / "refused" / "manifest.json").exists()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="needs timm")
def test_efficientnet_and_a_folder_of_imagenette(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network of 1,000 classes and the ten folders with which every verb but `explore` used to fail."""
    weights = SHARED_DATA / "checkpoints" / "tf_efficientnet_lite0.safetensors"
    packed = SHARED_DATA / "imagenette" / "imagenette224_val.tar.gz"
    if not (weights.is_file() and packed.is_file()):
        pytest.skip("needs EfficientNet-Lite0 and Imagenette in ../shared/data, not part of the repository")
    with tarfile.open(packed) as archive:
        members = [member for member in archive if member.isfile() and member.name.endswith(".JPEG")]
        members.sort(key=lambda member: member.name)
        chosen = [("val", member) for member in members[::14]] + [
            ("test", member) for member in members[1::98]
        ]
        for part, member in sorted(chosen, key=lambda each: each[1].offset):  # going back unpacks all again
            member.name = str(Path(part, *Path(member.name).parts[1:]))
            archive.extract(member, tmp_path, filter="data")
    monkeypatch.setattr(stages, "LEAST_EXIT_STEPS", 4)
    monkeypatch.setattr("gati.exploration.budget._TRIED", 8)  # too few for augmentations
    classes = {
        "n01440764": 0, "n02102040": 217, "n02979186": 482, "n03000684": 491, "n03028079": 497,
        "n03394916": 566, "n03417042": 569, "n03425413": 571, "n03445777": 574, "n03888257": 701,
    }  # fmt: skip
    library = gati.explore(
        "timm:tf_efficientnet_lite0", weights, data=tmp_path / "val", out=tmp_path / "out", resize=224,
        blocks="blocks.4.0", variants=["grid(8)"], epochs=0.1,
    )  # fmt: skip
    names = library.manifest.class_names
    assert names is not None and len(names) == 1000 and names[701].startswith("parachute")
    assert library.base_outcomes().label is None
    composed_of_one_cache(library)
    mapped = gati.evaluate(library.directory, tmp_path / "test", label_map=classes)
    assert mapped.base_accuracy is not None and mapped.base_accuracy > 0.6
    assert {each.name for each in mapped.classes} <= set(names)
    (picture,) = gati.predict(library.directory, [next((tmp_path / "test" / "n03888257").iterdir())])
    assert picture.class_name in names
