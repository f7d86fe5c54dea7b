"""Warning of neighbours that are nearly the same: of frames, and not of pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gati.exploration.alike import warning_of_neighbours
from gati.model.data import load_data
from gati.model.preprocess import Preprocessing
from tests.exploration.networks import digits

GREY = Preprocessing((0.0,), (1.0,), channels=1)


def warning(folder: Path, images: np.ndarray, labels: np.ndarray | None = None) -> str:
    np.savez(folder / "val.npz", images=images, **({} if labels is None else {"labels": labels}))
    return warning_of_neighbours(load_data(folder / "val.npz", GREY))


def film(frames: int, step: float) -> np.ndarray:
    """A bright spot that wanders over a fixed noisy background, uint8 [frames, 24, 24, 1]."""
    random = np.random.default_rng(0)
    ground = random.integers(0, 128, (24, 24))
    y, x = np.mgrid[:24, :24]
    place = 12 + 8 * np.stack([np.sin(step * np.arange(frames)), np.cos(0.7 * step * np.arange(frames))])
    spots = [100 * np.exp(-((y - a) ** 2 + (x - b) ** 2) / 20) for a, b in place.T]
    noise = random.normal(0, 1, (frames, 24, 24))
    return np.clip(ground + np.array(spots) + noise, 0, 255).astype(np.uint8)[..., None]


def test_frames_of_a_film_are_told(tmp_path: Path) -> None:
    said = warning(tmp_path, film(400, 0.05))
    assert said.startswith("neighbours in val.npz are nearly the same") and "\n" not in said


def test_frames_far_apart_are_not(tmp_path: Path) -> None:
    assert warning(tmp_path, film(400, 2.0)) == ""


@pytest.mark.parametrize("order", ["as they come", "by class", "each four times"])
def test_pictures_are_not(tmp_path: Path, order: str) -> None:
    images, labels = digits()
    rows = np.arange(len(images)) if order == "as they come" else np.argsort(labels, kind="stable")
    rows = np.repeat(rows, 4 if order == "each four times" else 1)
    assert warning(tmp_path, images[rows], labels[rows]) == ""
    if order == "as they come":
        assert warning(tmp_path, images[rows]) == ""


def test_few_or_equal_inputs_say_nothing(tmp_path: Path) -> None:
    assert warning(tmp_path, film(20, 0.05)) == ""
    assert warning(tmp_path, np.zeros((100, 8, 8, 1), np.uint8)) == ""
