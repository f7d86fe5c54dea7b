"""Every form of data, and one line for everything that can be wrong with it."""

import io
import os
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, StackDataset, TensorDataset

from gati.errors import DataError
from gati.model.data import load_data, load_images
from gati.model.identity import identities_of
from gati.model.inputs import TensorInputs
from gati.model.labels import fit_labels
from gati.model.preprocess import Preprocessing
from gati.model.sound import LogMel
from tests.model.user_code import Flipped
from tests.permissions import close

PLAIN = Preprocessing()
HERE = "tests.model.user_code"
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (6, 5, 4, 3), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2], dtype=np.uint8)


def npz(folder: Path, **arrays: np.ndarray) -> Path:
    np.savez(folder / "val.npz", **arrays)
    return folder / "val.npz"


def error_of(source: object, preprocessing: Preprocessing = PLAIN) -> str:
    with pytest.raises(DataError) as error:
        load_data(source, preprocessing)
    assert "\n" not in str(error.value)
    return str(error.value)


def write_folder(root: Path, size: tuple[int, int] = (4, 5)) -> Path:
    for number, name in enumerate(["dog", "cat"]):
        (root / name).mkdir(parents=True)
        for index in range(3):
            Image.new("RGB", size, (number * 100, index, 7)).save(root / name / f"{index}.png")
    return root


@pytest.mark.parametrize("name", ["val", "val.npz", "texts.csv", "own.py:dataset"])
def test_inputs_in_a_folder_that_is_closed_to_this_user_are_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "home" / name
    close(monkeypatch, tmp_path / "home")
    assert error_of(inside) == f"data: cannot read {inside} (Permission denied); check its permissions"


@pytest.mark.parametrize("end", ["", ".npz", ".csv", ".py:dataset"])
def test_nothing_has_a_name_that_is_too_long(end: str) -> None:
    assert "check its permissions" not in error_of("long" * 100 + end)


def test_a_picture_that_may_not_be_read_is_not_said_to_be_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, **_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Image, "open", refused)
    with pytest.raises(DataError) as error:
        load_images([tmp_path / "cat.png"], PLAIN)
    assert str(error.value) == (
        f"cannot read image {tmp_path / 'cat.png'}: Permission denied; check its permissions"
    )


def test_an_npz_gives_preprocessed_batches_in_the_order_asked(tmp_path: Path) -> None:
    preprocessing = Preprocessing((0.5, 0.4, 0.3), (0.1, 0.2, 0.3))
    data = load_data(npz(tmp_path, images=IMAGES, labels=LABELS), preprocessing)
    batch = data.images([4, 1])
    expected = (
        IMAGES[[4, 1]].transpose(0, 3, 1, 2) / 255 - np.reshape((0.5, 0.4, 0.3), (3, 1, 1))
    ) / np.reshape((0.1, 0.2, 0.3), (3, 1, 1))
    assert batch.dtype == torch.float32 and batch.is_contiguous()
    np.testing.assert_allclose(batch.numpy(), expected, atol=2e-6)
    assert len(data) == 6 and data.name == "val.npz" and data.is_images
    assert data.labels is not None and data.labels.dtype == np.int64
    assert torch.equal(data.images(slice(1, 3)), data.images([1, 2]))


def test_what_is_no_array_in_an_npz_is_passed_over(tmp_path: Path) -> None:
    path = npz(tmp_path, images=IMAGES)
    for name in ("readme.txt", "labels"):
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(name, "no array")
        data = load_data(path, PLAIN)
        assert len(data) == 6 and data.labels is None
    path = npz(tmp_path, inputs=np.ones((3, 2)))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("readme.txt", "no array")
    assert len(load_data(path, PLAIN)) == 3
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images", "no array")
    assert error_of(path).startswith(f"data: {path} has no inputs (arrays: images); save `images`")


def test_an_array_that_is_called_an_archive_is_one_line(tmp_path: Path) -> None:
    with (tmp_path / "val.npz").open("wb") as file:
        np.save(file, IMAGES)
    assert error_of(tmp_path / "val.npz").startswith(f"data: {tmp_path / 'val.npz'} is not a readable .npz (")


@pytest.mark.parametrize("place", [".", "cat", "cat/wild"])
def test_a_folder_that_may_not_be_read_is_one_line(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a class folder passed over, the others would be numbered as before, and its inputs be missing."""
    closed = write_folder(tmp_path / "val") / place
    closed.mkdir(exist_ok=True)

    def refusing(listing: Callable[[str | Path], Any]) -> Callable[[str | Path], Any]:
        def of(path: str | Path) -> Any:
            if Path(path) == closed:
                raise PermissionError(13, "Permission denied", str(path))
            return listing(path)

        return of

    monkeypatch.setattr(os, "listdir", refusing(os.listdir))
    monkeypatch.setattr(os, "scandir", refusing(os.scandir))
    message = f"data: cannot read {closed} (Permission denied); check its permissions"
    assert error_of(tmp_path / "val") == message
    assert (
        error_of(tmp_path / "val", Preprocessing((0.0,), (1.0,), channels=1, sound=LogMel(8000, 1.0)))
        == message
    )


def test_grey_images_need_no_channel_axis_and_labels_are_optional(tmp_path: Path) -> None:
    data = load_data(npz(tmp_path, images=IMAGES[..., 0]), Preprocessing((0.0,), (1.0,), channels=1))
    assert data.images([0]).shape == (1, 1, 5, 4)
    assert data.labels is None


def test_a_subset_is_a_view_in_its_own_order(tmp_path: Path) -> None:
    data = load_data(npz(tmp_path, images=IMAGES, labels=LABELS), PLAIN)
    part = data.subset([5, 0, 2]).subset([2, 0])
    assert torch.equal(part.images([0, 1]), data.images([2, 5]))
    assert part.labels is not None and part.labels.tolist() == [2, 2] and len(part) == 2
    assert part.fingerprint not in (data.fingerprint, data.subset([2, 0]).fingerprint)
    with pytest.raises(DataError, match=r"^index 6 is outside val.npz \(0 to 5\)$"):
        data.subset([6])


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    first = load_data(npz(tmp_path, images=IMAGES), PLAIN).fingerprint
    assert load_data(npz(tmp_path, images=IMAGES), PLAIN).fingerprint == first
    assert load_data(npz(tmp_path, images=IMAGES[::-1]), PLAIN).fingerprint != first


def test_an_input_is_the_same_under_any_name_label_and_form(tmp_path: Path) -> None:
    array = load_data(npz(tmp_path, images=IMAGES, labels=LABELS), PLAIN)
    for index, image in enumerate(IMAGES):
        folder = tmp_path / "val" / f"class{index % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        suffix = ("png", "bmp")[index // 3]  # both without loss
        Image.fromarray(image).save(folder / f"copy {index}.{suffix}")
    files = load_data(tmp_path / "val", PLAIN)
    assert array.identities.dtype == np.uint64
    assert len(set(array.identities.tolist())) == 6
    assert sorted(files.identities.tolist()) == sorted(array.identities.tolist())
    unlabelled = load_data(npz(tmp_path, images=IMAGES[[3, 1, 1]]), PLAIN)
    assert unlabelled.identities.tolist() == array.identities[[3, 1, 1]].tolist()
    assert array.subset([4, 2]).identities.tolist() == array.identities[[4, 2]].tolist()


def test_inputs_of_other_pixels_shape_or_type_are_others(tmp_path: Path) -> None:
    grey = Preprocessing((0.0,), (1.0,), channels=1)
    black = np.zeros((2, 4, 6, 1), np.uint8)
    wide = load_data(npz(tmp_path, images=black), grey).identities
    assert wide[0] == wide[1]
    assert load_data(npz(tmp_path, images=black.reshape(2, 6, 4, 1)), grey).identities[0] != wide[0]
    black[1, 0, 0] = 1
    assert load_data(npz(tmp_path, images=black), grey).identities[1] != wide[0]


class _Labelled(Dataset):
    """Pictures whose labels are numbers from 0, next to an attribute of the dataset."""

    def __init__(self, **attributes: object) -> None:
        self.readings = 0
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        self.readings += 1
        return np.full((4, 4, 3), index, np.uint8), index % 2


@pytest.mark.parametrize(
    "attributes",
    [
        {"targets": [1, 2] * 20},  # from 1
        {"labels": ["cat", "dog"] * 20},
        {"targets": [0.0, 1.0] * 20},
        {"targets": np.zeros((40, 2), np.int64)},
        {"targets": 40},
        {"targets": [[0], [1, 0]] * 20},
        {"targets": [0, 1]},
        {"targets": {"name": "cat"}},
    ],
    ids=lambda attributes: repr(attributes)[:30],
)
def test_labels_are_those_of_the_items_whatever_the_dataset_keeps_beside_them(
    attributes: dict[str, object],
) -> None:
    labels = load_data(_Labelled(**attributes), PLAIN).labels
    assert labels is not None and labels.tolist() == [0, 1] * 20


@pytest.mark.parametrize("targets", [[0, 1] * 20, torch.arange(40) % 2], ids=["list", "tensor"])
def test_labels_that_a_dataset_keeps_spare_reading_all_items(targets: object) -> None:
    dataset = _Labelled(targets=targets, labels=["cat", "dog"] * 20)
    data = load_data(dataset, PLAIN)
    before = dataset.readings
    assert data.labels is not None and data.labels.tolist() == [0, 1] * 20
    assert dataset.readings == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("gradient", [False, True])
def test_tensors_of_any_precision_are_read_with_or_without_a_gradient(
    dtype: torch.dtype, gradient: bool
) -> None:
    values = torch.rand(20, 3, 4, 4).to(dtype).requires_grad_(gradient)
    items = [(values[index], index % 2) for index in range(20)]
    data = load_data(_Items(items), PLAIN)
    assert torch.equal(data.images([3, 5]), values.detach().float()[[3, 5]])
    assert data.fingerprint and len(set(data.identities.tolist())) == 20
    named = load_data(_Items([({"inputs": item}, label) for item, label in items]), PLAIN)
    assert torch.equal(named.images([3, 5]), values.detach().float()[[3, 5]])


class _Items(Dataset):
    def __init__(self, items: list[object]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> object:
        return self.items[index]


class _Reused(Dataset):
    """Items that share one piece of memory."""

    def __init__(self, items: np.ndarray, *, named: bool = False) -> None:
        self.items, self.memory, self.named = items, np.zeros_like(items[0]), named

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> object:
        self.memory[:] = self.items[index]
        return {"input_ids": self.memory} if self.named else self.memory


@pytest.mark.parametrize("named", [False, True])
def test_a_dataset_may_use_the_memory_of_an_item_again(named: bool) -> None:
    """Each item was that of the last one."""
    ids = np.arange(100).reshape(20, 5)
    np.testing.assert_array_equal(load_data(_Reused(ids, named=named), PLAIN).images(range(20)), ids)
    grey = np.arange(20, dtype=np.uint8)[:, None, None].repeat(4, 1).repeat(4, 2)
    data = load_data(_Reused(grey), Preprocessing((0.0,), (1.0,), channels=1))
    assert (data.images(range(20))[:, 0, 0, 0] * 255).round().tolist() == list(range(20))


def test_items_of_several_types_are_read_as_the_type_of_all() -> None:
    """As `np.stack` does."""
    items = [{"input_ids": np.array([number, 300 - number], np.int16)} for number in range(19)]
    items.append({"input_ids": np.array([2**40, 1])})
    read = load_data(_Items(items), PLAIN).images(range(20))
    np.testing.assert_array_equal(read, np.stack([item["input_ids"] for item in items]))
    with pytest.raises(
        DataError, match=r"items differ \(ValueError: shapes \[2\] and \[3\]\); return arrays of"
    ):
        load_data(_Items([*items, {"input_ids": np.arange(3)}]), PLAIN)


def test_an_item_may_be_alone_in_a_tuple_and_a_label_in_an_array() -> None:
    """As in a `TensorDataset` without labels, and in MedMNIST."""
    values = torch.rand(20, 3, 4, 4)
    data = load_data(TensorDataset(values), PLAIN)
    assert torch.equal(data.images(range(20)), values) and data.labels is None
    data = load_data(_Items([(item, np.array([number % 2])) for number, item in enumerate(values)]), PLAIN)
    assert data.labels is not None and data.labels.tolist() == [0, 1] * 10


def test_a_dataset_that_does_not_know_its_length_is_one_line() -> None:
    class Lazy(_Items):
        def __len__(self) -> int:
            raise NotImplementedError("not downloaded")

    with pytest.raises(DataError) as refused:
        load_data(Lazy([]), PLAIN)
    assert str(refused.value) == (
        "data: Lazy: its length is not known (NotImplementedError: not downloaded); give a dataset whose "
        "__len__ returns the number of its items"
    )


@pytest.mark.parametrize("name", ["labels", "label"])
def test_a_label_in_a_dict_is_no_input(name: str) -> None:
    """Networks of `transformers` take it, and caches would learn from the answer itself."""
    items = [{"input_ids": torch.arange(index, index + 4), name: index % 2} for index in range(20)]
    for rows in (items, [(item, item[name]) for item in items]):
        data = load_data(_Items(list(rows)), PLAIN)
        assert data.tensors is not None and [part.name for part in data.tensors.parts] == ["input_ids"]
        assert data.labels is not None and data.labels.tolist() == [0, 1] * 10
    with pytest.raises(DataError, match="has no arrays; give those that the network takes, by name"):
        load_data(_Items([{name: 1}] * 20), PLAIN)


def test_a_library_that_was_made_with_labels_as_inputs_still_gets_them() -> None:
    """They were inputs to older versions, which a network of `transformers` does not mind."""
    items = [{"input_ids": torch.arange(index, index + 4), "labels": index % 2} for index in range(20)]
    arrays = {"input_ids": np.zeros((20, 4), np.int64), "labels": np.zeros(20, np.int64)}
    older = replace(PLAIN, tensors=TensorInputs.of(arrays, "--data"))
    data = load_data(_Items(list(items)), older)
    assert data.tensors == older.tensors and data.labels is None


def test_datasets_of_bytes_images_and_tensors_have_identities() -> None:
    tensors = load_data(f"{HERE}:float_tensors", Preprocessing((0.5,) * 3, (0.1,) * 3))
    assert len(set(tensors.identities.tolist())) == len(tensors) == 6
    data = load_data(f"{HERE}:Bytes", PLAIN)
    same = np.array([image for image in data.images(range(5)).permute(0, 2, 3, 1).numpy() * 255])
    assert data.identities.tolist() == identities_of(np.round(same).astype(np.uint8)).tolist()


def test_a_part_is_identified_without_reading_the_rest(tmp_path: Path) -> None:
    data = load_data(write_folder(tmp_path / "val"), PLAIN)
    whole = load_data(tmp_path / "val", PLAIN).identities
    (tmp_path / "val" / "cat" / "1.png").write_bytes(b"no pixels")
    assert data.subset([5, 0, 2]).subset([0, 1]).identities.tolist() == whole[[5, 0]].tolist()


def test_a_damaged_file_has_no_identity(tmp_path: Path) -> None:
    data = load_data(write_folder(tmp_path / "val"), PLAIN)
    (tmp_path / "val" / "cat" / "1.png").write_bytes(b"no pixels")
    with pytest.raises(DataError, match=r"1.png is not an image of a supported format"):
        _ = data.identities


def test_damaged_files_are_told_all_at_once(tmp_path: Path) -> None:
    data = load_data(write_folder(tmp_path / "val"), PLAIN)
    wrong = [tmp_path / "val" / "cat" / f"{number}.png" for number in range(3)]
    for path in wrong:
        path.write_bytes(b"no pixels")
    with pytest.raises(DataError) as error:
        _ = data.identities
    assert str(error.value).startswith(f"{wrong[0]} is not an image of a supported format (")
    assert str(error.value).endswith(f"; so with {wrong[1]}, {wrong[2]}")


def test_files_that_may_be_inputs_but_are_not_read_are_counted(tmp_path: Path) -> None:
    """A certificate speaks of inputs like those that were read."""
    folder = write_folder(tmp_path / "val")
    assert load_data(folder, PLAIN).note == ""
    (folder / "readme.txt").touch()
    (folder / "cat" / "3.tif").touch()
    data = load_data(folder, PLAIN)
    assert len(data) == 6
    assert data.subset([1]).note == (
        "files left out of val: 1, such as 3.tif, which is in a format not read here"
    )
    shutil.copy(folder / "cat" / "0.png", folder / "4.png")
    note = load_data(folder, PLAIN).note
    assert note == "files left out of val: 2, such as 4.png, which is not in a class folder"
    fitted = fit_labels(load_data(folder, PLAIN), 1000)
    assert fitted.note.startswith(f"{note}; val has 2 classes and the network 1000")


def test_a_folder_has_sorted_classes_and_the_same_pixels_as_arrays(tmp_path: Path) -> None:
    data = load_data(write_folder(tmp_path / "val"), PLAIN)
    assert data.class_names == ("cat", "dog")
    assert data.labels is not None and data.labels.tolist() == [0, 0, 0, 1, 1, 1]
    expected = PLAIN(np.full((1, 5, 4, 3), (100, 2, 7), dtype=np.uint8))
    assert torch.equal(data.images([2]), expected)
    assert len(data.fingerprint) == 64


def test_pictures_that_are_kept_are_decoded_once_and_no_more_than_there_is_room_for(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "val")
    data, fresh = (load_data(folder, PLAIN) for _ in range(2))
    data.subset([0, 1, 2, 3]).keep(2 * 5 * 4 * 3)
    expected = fresh.images(range(6))
    assert torch.equal(data.images(range(6)), expected)
    for name in ("cat/0.png", "cat/1.png"):
        (folder / name).write_bytes(b"no pixels")
    assert torch.equal(data.images([1, 3, 0]), expected[[1, 3, 0]])
    (folder / "cat" / "2.png").write_bytes(b"no pixels")
    with pytest.raises(DataError, match=r"2.png"):
        data.images([0, 2])


@pytest.mark.parametrize("kind", [bytes, Image.Image, torch.Tensor], ids=lambda kind: kind.__name__)
def test_items_of_a_dataset_that_are_kept_are_not_asked_for_again(kind: type) -> None:
    """As a callable may decode or fetch them; the buffer that it returns may be its own."""

    class Fetched(Dataset[Any]):
        def __init__(self) -> None:
            self.readings, self.buffer = 0, torch.zeros(3, 4, 4)

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            self.readings += 1
            image = np.full((4, 4, 3), index, dtype=np.uint8)
            if kind is torch.Tensor:
                return self.buffer.fill_(index)
            return Image.fromarray(image) if kind is Image.Image else image

    dataset = Fetched()
    data = load_data(dataset, PLAIN)
    expected = data.images(range(6))
    data.subset([0, 1]).keep(4 * (4 * 4 * 3 * (4 if kind is torch.Tensor else 1)))
    assert torch.equal(data.images(range(6)), expected)
    before = dataset.readings
    assert torch.equal(data.images([3, 0, 2]), expected[[3, 0, 2]]) and dataset.readings == before
    assert torch.equal(data.images([5, 0]), expected[[5, 0]]) and dataset.readings == before + 1


def test_a_rotation_in_exif_is_applied_by_no_verb(tmp_path: Path) -> None:
    """What `serve` and `stream` show the network must be what was certified."""
    from gati.video.folder import Folder
    from services.scheduler.budget import ByteBudget
    from services.scheduler.images import decode_image

    pixels = RNG.integers(0, 256, (5, 4, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turn by a quarter
    path = tmp_path / "turned.png"
    Image.fromarray(pixels).save(path, exif=exif)
    with Image.open(path) as saved:
        assert saved.getexif()[0x0112] == 6
    expected = PLAIN(pixels[None])
    assert torch.equal(load_data(tmp_path, PLAIN).images([0]), expected)
    assert torch.equal(load_images([path], PLAIN), expected)
    (picture,) = Folder(tmp_path)
    assert np.array_equal(picture.image(), pixels)
    with ByteBudget(1 << 20).open() as charge:
        sent = decode_image(path.read_bytes(), 3, 1 << 20, charge)
    assert sent.shape == [1, 5, 4, 3] and bytes(sent.data) == pixels.tobytes()


def test_links_to_pictures_and_folders_are_followed(tmp_path: Path) -> None:
    """As by torchvision's ImageFolder: what a linked folder holds was left out without a word."""
    folder, elsewhere = write_folder(tmp_path / "val"), write_folder(tmp_path / "elsewhere", (4, 5))
    (folder / "cat" / "more").symlink_to(elsewhere / "cat")
    (folder / "owl").symlink_to(elsewhere / "dog")
    (folder / "dog" / "linked.png").symlink_to(elsewhere / "dog" / "0.png")
    data = load_data(folder, PLAIN)
    assert data.class_names == ("cat", "dog", "owl")
    assert data.labels is not None and np.bincount(data.labels).tolist() == [6, 4, 3]
    assert len(data.identities) == 13


@pytest.mark.parametrize("place", ["cat/9.png", "cat/more", "owl"])
def test_a_link_that_leads_nowhere_is_one_line(place: str, tmp_path: Path) -> None:
    """With a class folder passed over, the others would be numbered as before, and its inputs be missing."""
    link = write_folder(tmp_path / "val") / place
    link.symlink_to(tmp_path / "not mounted")
    assert error_of(tmp_path / "val") == (
        f"data: cannot read {link} (No such file or directory); check where links lead"
    )


def test_a_link_to_a_folder_that_holds_it_is_one_line(tmp_path: Path) -> None:
    """What is there would be found again at each turn."""
    link = write_folder(tmp_path / "val") / "cat" / "all"
    link.symlink_to(tmp_path / "val")
    assert error_of(tmp_path / "val") == (
        f"data: cannot read {link} (Too many levels of symbolic links); check where links lead"
    )


def test_folders_outside_that_link_to_each_other_are_one_line(tmp_path: Path) -> None:
    """Followed up to the most links that a path may have, they had each picture many times."""
    folder, one, two = (write_folder(tmp_path / name) for name in ("val", "one", "two"))
    (folder / "cat" / "more").symlink_to(one / "cat")
    (one / "cat" / "two").symlink_to(two / "cat")
    (two / "cat" / "one").symlink_to(one / "cat")
    assert error_of(folder) == (
        f"data: cannot read {folder / 'cat' / 'more' / 'two' / 'one'} (Too many levels of symbolic links); "
        "check where links lead"
    )


def test_classes_that_link_to_each_other_are_one_line(tmp_path: Path) -> None:
    """There were so many ways through them that the search did not end."""
    names = ("a", "b", "c")
    for name in names:
        (tmp_path / name).mkdir()
        for other in (each for each in names if each != name):
            (tmp_path / name / other).symlink_to(tmp_path / other)
    assert "(Too many levels of symbolic links); check where links lead" in error_of(tmp_path)


def test_a_hidden_link_that_leads_nowhere_is_passed_over(tmp_path: Path) -> None:
    """Editors lock files with them."""
    folder = write_folder(tmp_path / "val")
    (folder / "cat" / ".#0.png").symlink_to("someone@here.1234")
    assert len(load_data(folder, PLAIN)) == 6


def test_pictures_next_to_a_folder_without_any_are_unlabelled(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "val") / "cat"
    (folder / "notes").mkdir()
    data = load_data(folder, PLAIN)
    assert len(data) == 3 and data.labels is None and data.class_names is None


def test_what_macos_adds_to_archives_is_no_picture_and_no_class(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "val")
    (folder / "__MACOSX" / "cat").mkdir(parents=True)
    for added in (folder / "__MACOSX" / "cat" / "._0.png", folder / "cat" / "._0.png"):
        added.write_bytes(b"Mac OS X")
    data = load_data(folder, PLAIN)
    assert len(data) == 6 and data.class_names == ("cat", "dog")


def test_names_of_classes_may_be_bytes(tmp_path: Path) -> None:
    path = npz(tmp_path, images=IMAGES, labels=LABELS, class_names=np.array([b"cat", b"dog", b"owl"]))
    assert load_data(path, PLAIN).class_names == ("cat", "dog", "owl")


def test_a_folder_of_plain_images_is_unlabelled(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "val") / "cat"
    assert load_data(folder, PLAIN).labels is None


def test_a_dataset_of_float_tensors_is_taken_as_it_is() -> None:
    data = load_data(f"{HERE}:float_tensors", Preprocessing((0.5,) * 3, (0.1,) * 3))
    assert not data.is_images
    assert data.labels is not None and data.labels.tolist() == [0, 1, 2, 0, 1, 2]
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(data.images([3]), torch.randn(6, 3, 4, 4, generator=generator)[[3]])
    assert data.subset([1]).fingerprint


def test_a_dataset_of_bytes_is_preprocessed() -> None:
    data = load_data(f"{HERE}:Bytes", PLAIN)
    assert data.is_images and data.labels is None and len(data) == 5
    assert torch.allclose(data.images([0, 4])[1], torch.full((3, 4, 4), 4 / 255))


@pytest.mark.parametrize("as_tensor", [False, True], ids=["images", "tensors"])
def test_a_dataset_with_random_transforms_is_refused(as_tensor: bool) -> None:
    """Else an input would not be found among its copies, nor in the record of an exploration."""
    message = "data: Flipped: item 0 differs each time it is read: turn off random transforms{}"
    own = "" if as_tensor else "; Gati makes views of its own"
    assert error_of(Flipped(as_tensor)) == message.format(own)


@pytest.mark.parametrize("missing", [np.nan, 1.0], ids=["nan", "numbers"])
def test_items_that_are_the_same_each_time_are_taken(missing: float) -> None:
    values = torch.full((20, 3, 4, 4), missing)
    assert len(load_data(TensorDataset(values, torch.arange(20)), PLAIN)) == 20
    assert len(load_data(StackDataset(x=torch.ones(20, 4), y=torch.zeros(20)), PLAIN)) == 20


def test_resize_and_crop_follow_the_shorter_side() -> None:
    tensor = Preprocessing(resize=8, crop=6)(np.zeros((2, 10, 20, 3), dtype=np.uint8))
    assert tensor.shape == (2, 3, 6, 6)
    assert Preprocessing(resize=5)(np.zeros((1, 10, 20, 3), dtype=np.uint8)).shape == (1, 3, 5, 10)


def test_resizing_rounds_as_pillow_does() -> None:
    image = RNG.integers(0, 256, (40, 40, 3), dtype=np.uint8)
    for name, method in (("bilinear", Image.Resampling.BILINEAR), ("bicubic", Image.Resampling.BICUBIC)):
        ours = Preprocessing(resize=16, interpolation=name)(image[None])[0].permute(1, 2, 0).numpy() * 255
        theirs = np.asarray(Image.fromarray(image).resize((16, 16), method))
        assert np.abs(ours - theirs).max() <= 1.01


def test_preprocessing_survives_json() -> None:
    preprocessing = Preprocessing((0.5,) * 3, (0.1,) * 3, 256, 224, "bicubic", 3, (30, 40))
    assert Preprocessing.from_json(preprocessing.to_json()) == preprocessing


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"labels": LABELS},
            "has no inputs (arrays: labels); save `images` uint8 [N, H, W, C], or `inputs` or arrays "
            "named as the network's arguments [N, ...]",
        ),
        (
            {"images": IMAGES[0, 0]},
            "have shape [4, 3]; give uint8 [N, H, W, C], or [N, H, W] for grey images",
        ),
        (
            {"images": IMAGES.astype(np.float32)},
            "have dtype float32; give uint8 values 0-255 in the shape [N, H, W, C], or call the array "
            "`inputs` if it is what the network takes, float [N, C, H, W]",
        ),
        (
            {"images": IMAGES[..., :1]},
            "have 1 channels (shape [6, 5, 4, 1]) and the network takes 3; convert them",
        ),
        (
            {"images": IMAGES.transpose(0, 3, 1, 2)},
            "have 4 channels (shape [6, 3, 5, 4]) and the network takes 3; transpose [N, C, H, "
            "W] to [N, H, W, C]",
        ),
        ({"images": IMAGES[:0]}, "is empty (images [0, 5, 4, 3]); give at least a few hundred images"),
        (
            {"images": IMAGES, "labels": LABELS[:5]},
            "has labels of shape [5] for 6 inputs; give one label per input",
        ),
        (
            {"images": IMAGES, "labels": LABELS.astype(np.float32)},
            "has labels of dtype float32; give integer class numbers from 0",
        ),
        (
            {"images": IMAGES, "labels": LABELS.astype(np.int64) - 1},
            "has label -1; give integer class numbers from 0",
        ),
        (
            {"images": np.array([{}, {}], dtype=object)},
            "holds Python objects, which would need unpickling; save numeric arrays",
        ),
        (
            {"images": IMAGES, "class_names": np.array("cat")},
            "has class_names of shape []; give one name per class",
        ),
    ],
)
def test_a_wrong_npz_is_one_line(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    found = error_of(npz(tmp_path, **arrays))
    assert found.startswith("data: ") and str(tmp_path) in found and found.endswith(message)


@pytest.mark.parametrize("content", [b"", b"not a zip", None])
def test_a_damaged_npz_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    path = npz(tmp_path, images=IMAGES)
    path.write_bytes(path.read_bytes()[:300] if content is None else content)
    assert error_of(path).startswith(f"data: {path} is not a readable .npz (")


def test_damaged_compressed_arrays_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "val.npz"
    np.savez_compressed(path, images=IMAGES)
    content = bytearray(path.read_bytes())
    name, extra = struct.unpack("<HH", content[26:30])
    content[30 + name + extra] = 0xFF  # where the compressed array begins; no block has this type
    path.write_bytes(content)
    assert error_of(path).startswith(f"data: {path} is not a readable .npz (error)")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.npz", "data: no file nowhere.npz; check the path"),
        ("nowhere.csv", "data: no file nowhere.csv; check the path"),
        (
            "nowhere",
            "data: nothing at nowhere; give an .npz file, a CSV or Parquet file of texts, a folder of images "
            "(in class folders or not) or of recordings, package.module:callable or file.py:callable",
        ),
        (str(Path(__file__)), f"data: cannot read {__file__} as data; give an .npz file"),
        (
            f"{HERE}:Stream",
            f"data: {HERE}:Stream is an iterable dataset; give one with __len__ and __getitem__",
        ),
        (f"{HERE}:Nothing", f"data: {HERE}:Nothing is empty; give at least a few hundred images"),
        (f"{HERE}:Texts", f"data: {HERE}:Texts: item 0 holds a str; return a tensor, an array, a dict of"),
        (
            f"{HERE}:Broken",
            f"data: {HERE}:Broken: reading item 0 failed (OSError: disk gone); fix that dataset",
        ),
        (
            f"{HERE}:Ending",
            f"data: {HERE}:Ending: reading item 0 failed (SystemExit: 0); fix that dataset",
        ),
        (f"{HERE}:raising", f"data: {HERE}:raising failed (ValueError: no weights); fix that callable"),
        (
            f"{HERE}:not_a_module",
            f"data: {HERE}:not_a_module returned a int; return a torch.utils.data.Dataset",
        ),
        (f"{HERE}:float_tensor", f"{HERE} has no 'float_tensor'; did you mean float_tensors"),
    ],
)
def test_a_wrong_source_is_one_line(source: str, message: str) -> None:
    assert error_of(source).startswith(message)


def test_a_dataset_of_mixed_sizes_or_named_labels_is_one_line() -> None:
    data = load_data(f"{HERE}:Sizes", PLAIN)
    with pytest.raises(DataError, match=r"^images differ in size \(4x4 and 5x4 pixels\)"):
        data.images([0, 1])
    with pytest.raises(DataError, match=r"Sizes has labels that are not numbers \(ValueError: "):
        _ = data.labels


@pytest.mark.parametrize("label", [0.7, torch.tensor(1.5), torch.tensor([0, 1]), [1], float("nan"), np.inf])
def test_labels_that_are_no_class_numbers_are_one_line(label: Any) -> None:
    pairs = [(image, label) for image in IMAGES]
    with pytest.raises(DataError, match="has labels that are not numbers .* give integer class numbers"):
        _ = load_data(_Items(pairs), PLAIN).labels
    labels = load_data(_Items([(image, 2.0) for image in IMAGES]), PLAIN).labels
    assert labels is not None and labels.tolist() == [2] * 6


def test_an_empty_folder_is_one_line(tmp_path: Path) -> None:
    assert error_of(tmp_path) == (
        f"data: no images (.bmp, .gif, .jfif, .jpe, .jpeg, .jpg, .pgm, .png, .ppm, .webp) in {tmp_path}; "
        "give a folder of one folder per class"
    )


def test_images_smaller_than_the_crop_are_one_line(tmp_path: Path) -> None:
    data = load_data(npz(tmp_path, images=IMAGES), Preprocessing(crop=8))
    with pytest.raises(DataError) as error:
        data.images([0])
    assert str(error.value) == (
        "images of 5x4 pixels are smaller than the network's crop of 8; give --resize 8 or larger images"
    )


def test_images_of_several_sizes_need_a_size(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    Image.new("RGB", (6, 6)).save(tmp_path / "b.png")
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    with pytest.raises(DataError) as error:
        load_images(paths, PLAIN)
    assert str(error.value) == (
        "images differ in size (4x4 and 6x6 pixels) and the network has no preset size; give --resize PIXELS"
    )
    assert load_images(paths, Preprocessing(resize=4, crop=4)).shape == (2, 3, 4, 4)


@pytest.mark.parametrize("suffix", ["png", "pgm"])
def test_grey_of_16_bits_keeps_its_upper_byte(tmp_path: Path, suffix: str) -> None:
    wide = RNG.integers(0, 65_536, (5, 4), dtype=np.uint16)
    Image.fromarray(wide).save(tmp_path / f"a.{suffix}")
    grey = load_images([tmp_path / f"a.{suffix}"], Preprocessing((0.0,), (1.0,), channels=1))
    assert torch.equal((grey[0, 0] * 255).round(), torch.from_numpy((wide >> 8).astype(np.float32)))
    colour = load_images([tmp_path / f"a.{suffix}"], PLAIN)
    assert torch.equal(colour[0], grey[0].expand(3, -1, -1))


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_of_which_pillow_warns_are_read_in_silence(tmp_path: Path, channels: int) -> None:
    """It warns each time, so thousands of lines would be all that a user sees of a command."""
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    picture = Image.fromarray(pixels).convert("P", palette=Image.Palette.ADAPTIVE)
    picture.save(tmp_path / "transparent.png", transparency=bytes(range(256)))
    broken_exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\xff\xff\xff\xff"
    Image.fromarray(pixels).save(tmp_path / "metadata.jpg", exif=broken_exif)
    preprocessing = Preprocessing((0.0,) * channels, (1.0,) * channels, channels=channels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = load_data(tmp_path, preprocessing)
        assert len(data.identities) == 2
        found = data.images([1])[0]
    plain = np.asarray(picture.convert("L" if channels == 1 else "RGB")).reshape(16, 16, channels)
    assert np.array_equal(found.permute(1, 2, 0).mul(255).round().byte().numpy(), plain)


def test_pixels_of_unknown_range_are_refused() -> None:
    with pytest.raises(DataError, match=r"^the image has floating-point pixels, .* convert it to 8 bits$"):
        PLAIN.pixels(Image.fromarray(np.zeros((4, 4), np.float32)))
    with pytest.raises(DataError, match=r"^the image has values beyond 0 to 65535: convert it to 8 bits$"):
        PLAIN.pixels(Image.fromarray(np.full((4, 4), 70_000, np.int32)))


def test_unreadable_images_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="^no images given; name at least one image file$"):
        load_images([], PLAIN)
    with pytest.raises(DataError, match="^no image at nowhere.png; check the path$"):
        load_images(["nowhere.png"], PLAIN)
    text = tmp_path / "text.png"
    text.write_text("no pixels")
    with pytest.raises(DataError) as error:
        load_images([text], PLAIN)
    assert (
        str(error.value)
        == f"{text} is not an image of a supported format (PNG, JPEG, BMP, GIF, WEBP, PPM); convert it"
    )
    buffer = io.BytesIO()
    Image.fromarray(RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(buffer, "PNG")
    text.write_bytes(buffer.getvalue()[:2000])
    with pytest.raises(DataError, match=rf"^image {text} is damaged \(OSError: .*\); copy it again$"):
        load_images([text], PLAIN)
    text.write_bytes(buffer.getvalue())
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3000)
    with pytest.raises(DataError) as error:
        load_images([text], PLAIN)
    assert str(error.value) == f"image {text} has more than 3000 pixels; give a smaller one"


@pytest.mark.parametrize("source", [IMAGES, [1, 2]], ids=["array", "list"])
def test_what_is_no_source_of_data_is_one_line(source: Any) -> None:
    found = error_of(source)
    assert found.startswith(
        f"data: cannot read a {type(source).__name__}; give a torch.utils.data.Dataset, or"
    )
