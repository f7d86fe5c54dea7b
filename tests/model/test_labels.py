"""Names and labels of classes: taken where they are the network's, left out where they are not."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import Dataset

from gati.errors import DataError
from gati.model.data import Data, load_data
from gati.model.labels import fit_labels, names_of_classes, read_class_names, read_label_map
from gati.model.load import load_model
from gati.model.preprocess import Preprocessing

PLAIN = Preprocessing()


def folder(root: Path, *names: str) -> Data:
    for name in names:
        (root / name).mkdir(parents=True)
        Image.new("RGB", (4, 4), (len(name), 0, 0)).save(root / name / "one.png")
    return load_data(root, PLAIN)


def arrays(root: Path, labels: list[int], **more: np.ndarray) -> Data:
    images = np.zeros((len(labels), 4, 4, 3), np.uint8)
    np.savez(root / "test.npz", images=images, labels=np.array(labels), **more)
    return load_data(root / "test.npz", PLAIN)


def labels_of(data: Data) -> list[int] | None:
    return None if data.labels is None else data.labels.tolist()


def test_as_many_folders_as_classes_are_the_classes(tmp_path: Path) -> None:
    data = folder(tmp_path / "val", "dog", "cat")
    fitted = fit_labels(data, 2)
    assert (labels_of(fitted.data), fitted.note) == ([0, 1], "")
    assert names_of_classes(2, None, data) == ("cat", "dog")
    assert names_of_classes(2, ("Katze", "Hund"), data) == ("Katze", "Hund")


OF_TRANSFORMERS = """
from types import SimpleNamespace
from torch import nn

def net():
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
    network.config = SimpleNamespace(id2label=NAMES)
    return network
"""


@pytest.mark.parametrize(
    ("names", "expected", "labels"),
    [
        ({0: "dog", 1: "cat"}, ("dog", "cat"), [1, 0]),
        ({1: "cat", 0: "dog"}, ("dog", "cat"), [1, 0]),
        ({0: "LABEL_0", 1: "LABEL_1"}, None, [0, 1]),
        ({0: "dog", 2: "cat"}, None, [0, 1]),
        ("dog", None, [0, 1]),
    ],
    ids=["in order", "in another order", "unnamed", "with a gap", "no map"],
)
def test_names_in_the_config_of_a_network_of_transformers_are_its_classes(
    tmp_path: Path, names: object, expected: tuple[str, ...] | None, labels: list[int]
) -> None:
    """Else folders, whose order is that of the alphabet, would count as its classes in its order."""
    (tmp_path / "own.py").write_text(OF_TRANSFORMERS.replace("NAMES", repr(names)))
    known = load_model(f"{tmp_path / 'own.py'}:net").class_names
    assert known == expected
    data = folder(tmp_path / "val", "cat", "dog")
    assert labels_of(fit_labels(data, 2, names_of_classes(2, known, data)).data) == labels


def test_folders_called_as_unnamed_classes_are_these_by_number(tmp_path: Path) -> None:
    """Sorted as text, LABEL_10 comes before LABEL_2: accuracy was that of other classes."""
    numbered = tuple(f"LABEL_{number}" for number in range(11))
    data = folder(tmp_path, *numbered)
    assert data.class_names is not None and data.class_names[2] == "LABEL_10"
    named = names_of_classes(11, None, data)
    assert named == numbered
    assert labels_of(fit_labels(data, 11, named).data) == [0, 1, 10, *range(2, 10)]
    assert labels_of(fit_labels(data, 12).data) == [0, 1, 10, *range(2, 10)]


def test_fewer_folders_than_classes_are_not(tmp_path: Path) -> None:
    data = folder(tmp_path / "val", "dog", "cat")
    fitted = fit_labels(data, 1000)
    assert fitted.data.labels is None and names_of_classes(1000, None, data) is None
    assert fitted.note == (
        "val has 2 classes and the network 1000: labels and names are not the network's, so accuracy is "
        "left out (map them with --label-map FILE)"
    )
    assert fitted.data.identities.tolist() == data.identities.tolist()
    assert fitted.data.images([1]).equal(data.images([1]))
    assert fitted.data.subset([1]).labels is None


@pytest.mark.parametrize(
    ("names", "folders", "labels"),
    [
        (("ant", "bee", "cat", "dog"), ("bee", "dog"), [1, 3]),  # some of them
        (("dog", "cat"), ("cat", "dog"), [1, 0]),  # all, in another order
        (("crane", "bee", "crane"), ("bee", "crane"), None),  # which of both?
        (("ant", "bee"), ("n01", "n02"), [0, 1]),  # other names for as many
        (("ant", "bee", "cat"), ("ant", "bumblebee", "cat"), [0, 1, 2]),  # one spelled otherwise
        (("ant", "bee", "cat"), ("aunt", "bat", "bee"), None),  # sorted to another place
    ],
)
def test_folders_with_the_names_of_classes_are_those(
    tmp_path: Path, names: tuple[str, ...], folders: tuple[str, ...], labels: list[int] | None
) -> None:
    assert labels_of(fit_labels(folder(tmp_path / "val", *folders), len(names), names).data) == labels


def test_labels_without_names_fit_where_they_are_classes(tmp_path: Path) -> None:
    data = arrays(tmp_path, [0, 3, 9])
    assert fit_labels(data, 10).data is data
    fitted = fit_labels(data, 9)
    assert fitted.data.labels is None
    assert fitted.note.startswith("test.npz has labels up to 9 and the network 9 classes: labels and names")
    fitted = fit_labels(arrays(tmp_path, [0, 5], class_names=np.array(["a", "b"])), 10)
    assert fitted.data.labels is None and "has labels up to 5 and 2 class names" in fitted.note


def test_unlabelled_data_needs_no_note(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "one.png")
    fitted = fit_labels(load_data(tmp_path, PLAIN), 1000)
    assert fitted.data.labels is None and fitted.note == ""


@pytest.mark.parametrize("by", ["folder name", "label number"])
def test_a_label_map_says_which_class_each_label_is(tmp_path: Path, by: str) -> None:
    data = folder(tmp_path / "val", "dog", "cat")
    chosen = {"dog": 207, "cat": 281} if by == "folder name" else {"1": 207, "0": 281}
    assert labels_of(fit_labels(data, 1000, None, chosen).data) == [281, 207]
    assert labels_of(fit_labels(arrays(tmp_path, [1, 0, 1]), 1000, None, {"0": 5, "1": 6}).data) == [6, 5, 6]
    with pytest.raises(DataError, match="^the label map has no entry for 'dog' of val; give it one$"):
        fit_labels(data, 1000, None, {"cat": 281})


def test_a_label_map_of_all_classes_names_them(tmp_path: Path) -> None:
    data = folder(tmp_path / "val", "dog", "cat")
    assert names_of_classes(2, None, data, {"dog": 0, "cat": 1}) == ("dog", "cat")
    assert names_of_classes(2, None, data, {"dog": 0, "cat": 0}) is None


def test_class_names_are_read_from_lines_or_json(tmp_path: Path) -> None:
    lines, listed = tmp_path / "names.txt", tmp_path / "names.json"
    lines.write_text("tench, Tinca tinca\n goldfish \n\n")
    listed.write_text(json.dumps(["tench, Tinca tinca", "goldfish"]))
    expected = ("tench, Tinca tinca", "goldfish")
    assert read_class_names(lines, 2) == read_class_names(listed, 2) == expected
    assert read_class_names(["a", "b"], 2) == ("a", "b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nb\nc\n", "has 3 names and the network 2 classes; give one name per class, in the order of its"),
        ("a\n\nb\n", "has an entry that is not a name; give one name per class, or a JSON list of them"),
        ('["a", 1]', "has an entry that is not a name"),
        ('["a", ', "is not JSON ("),
    ],
)
def test_wrong_class_names_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "names").write_text(text)
    with pytest.raises(DataError) as error:
        read_class_names(tmp_path / "names", 2)
    assert str(error.value).startswith(f"--class-names {tmp_path / 'names'} {message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", 'is not a map; write a JSON object such as {"cats": 281, "dogs": 207}'),
        ("{}", "is not a map"),
        ('{"cat": 10}', "maps 'cat' to 10; give a class of the network, an integer from 0 to 9"),
        ('{"cat": -1}', "maps 'cat' to -1"),
        ('{"cat": true}', "maps 'cat' to True"),
        ('{"cat": "tabby"}', "maps 'cat' to 'tabby'"),
        ("cat: 3", "is not JSON ("),
    ],
)
def test_a_wrong_label_map_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "map").write_text(text)
    with pytest.raises(DataError) as error:
        read_label_map(tmp_path / "map", 10)
    assert str(error.value).startswith(f"--label-map {tmp_path / 'map'} {message}")


def test_a_mark_at_the_beginning_of_a_file_is_no_part_of_a_name(tmp_path: Path) -> None:
    """Windows begins UTF-8 files with one."""
    path = tmp_path / "names.txt"
    path.write_text("cat\ndog\n", encoding="utf-8-sig")
    assert read_class_names(path) == ("cat", "dog")
    path.write_text('{"cat": 1}', encoding="utf-8-sig")
    assert read_label_map(path) == {"cat": 1}


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^cannot read --label-map .*: No such file or directory; check the"):
        read_label_map(tmp_path / "nowhere.json", 10)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"^cannot read --class-names .*: not UTF-8 text; check the path"):
        read_class_names(tmp_path / "binary", 10)


class _Named(Dataset[object]):
    classes = ("cat", "dog")

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> object:
        return np.zeros((4, 4, 3), np.uint8), index


def test_a_dataset_with_classes_names_them() -> None:
    data = load_data(_Named(), PLAIN)
    assert data.class_names == ("cat", "dog")
    assert fit_labels(data, 10).data.labels is None
    assert labels_of(fit_labels(data, 3, ("dog", "bee", "cat")).data) == [2, 0]


@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="needs timm")
def test_timm_knows_the_classes_of_imagenet() -> None:
    loaded = load_model("timm:tf_efficientnet_lite0")
    assert loaded.class_names is not None and len(loaded.class_names) == 1000
    assert loaded.class_names[0].startswith("tench") and loaded.class_names[701].startswith("parachute")
