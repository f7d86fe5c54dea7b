"""Long images cost what their crop costs, and look as if they had been resized whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.errors import DataError
from gati.model.preprocess import Preprocessing
from gati.model.sound import LogMel


def whole(preprocessing: Preprocessing, images: np.ndarray[Any, np.dtype[np.uint8]]) -> torch.Tensor:
    """As documented: the whole image resized, then the centre cut out."""
    assert preprocessing.resize is not None and preprocessing.crop is not None
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    height, width = pixels.shape[2:]
    shorter, resize, crop = min(height, width), preprocessing.resize, preprocessing.crop
    size = (height * resize // shorter, width * resize // shorter)
    smooth = preprocessing.interpolation != "nearest"
    big = functional.interpolate(pixels, size, mode=preprocessing.interpolation, antialias=smooth)
    top, left = round((size[0] - crop) / 2), round((size[1] - crop) / 2)
    return big[:, :, top : top + crop, left : left + crop]


@settings(max_examples=120, deadline=None)
@given(
    shorter=st.integers(1, 12),
    times=st.integers(1, 40),
    more=st.integers(0, 11),
    resize=st.integers(4, 24),
    crop_of=st.floats(0.3, 1.0),
    upright=st.booleans(),
    interpolation=st.sampled_from(["bilinear", "bicubic"]),
    seed=st.integers(0, 10),
)
def test_a_long_image_looks_as_if_it_had_been_resized_whole(
    shorter: int,
    times: int,
    more: int,
    resize: int,
    crop_of: float,
    upright: bool,
    interpolation: str,
    seed: int,
) -> None:
    longer = shorter * times + min(more, shorter - 1)
    shape = (1, longer, shorter, 1) if upright else (1, shorter, longer, 1)
    images = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    crop = max(1, int(resize * crop_of))
    preprocessing = Preprocessing(
        mean=(0.0,), std=(1.0,), channels=1, resize=resize, crop=crop, interpolation=interpolation
    )
    found, expected = preprocessing.fitted(images), whole(preprocessing, images)
    if longer * resize % shorter == 0 or longer <= 8 * shorter:
        assert torch.equal(found, expected)
    else:  # resizing whole rounds the length, which moves what is left of the middle by a part of a pixel
        assert found.shape == expected.shape


@pytest.mark.parametrize("side", [1, 3])
def test_what_a_crop_costs_does_not_grow_with_the_image(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """3,200 pixels in a row were made 256 x 819,200 ones to cut 224 x 224 of them."""
    made: list[int] = []
    original = functional.interpolate

    def counted(pixels: torch.Tensor, size: tuple[int, int], **how: Any) -> torch.Tensor:
        made.append(size[0] * size[1])
        return original(pixels, size, **how)

    monkeypatch.setattr(functional, "interpolate", counted)
    preprocessing = Preprocessing(resize=256, crop=224)
    for shape in ((1, side, 3200, 3), (1, 200_000, side, 3)):
        made.clear()
        assert preprocessing(np.zeros(shape, np.uint8)).shape == (1, 3, 224, 224)
        assert sum(made) <= 10 * 256 * 256


def test_without_a_crop_what_would_fill_the_memory_is_refused() -> None:
    narrow = np.zeros((1, 1, 3200, 3), np.uint8)
    with pytest.raises(DataError, match="1x3200 pixels would be resized to 256x819200; give images"):
        Preprocessing(resize=256)(narrow)
    assert Preprocessing(resize=8)(narrow).shape == (1, 3, 8, 25_600)
    large = np.zeros((1, 2100, 2100, 3), np.uint8)  # made smaller, however large it is
    assert Preprocessing(resize=2099).fitted(large).shape == (1, 3, 2099, 2099)


@pytest.mark.parametrize("images", [[np.zeros((4, 4, 3), np.uint8)], torch.zeros(1, 4, 4, 3), "images/0.png"])
def test_what_is_no_array_of_images_is_one_line(images: Any) -> None:
    with pytest.raises(DataError) as refused:
        Preprocessing()(images)
    assert str(refused.value) == (
        f"images are of type {type(images).__name__}; give a NumPy array uint8 [N, H, W, C]"
    )


@pytest.mark.filterwarnings("error")
def test_arrays_that_may_not_be_written_to_are_read() -> None:
    """As those that NumPy makes of Pillow's images, or of bytes."""
    images = np.frombuffer(bytes(range(48)), np.uint8).reshape(1, 4, 4, 3)
    assert torch.equal(Preprocessing()(images), Preprocessing()(images.copy()))
    wave = np.frombuffer(np.linspace(-1, 1, 400, dtype=np.float32).tobytes(), np.float32)
    sound = LogMel(sample_rate=1000, seconds=0.5)
    assert torch.equal(sound.fitted(wave), sound.fitted(wave.copy()))


def test_how_a_centre_is_rounded_is_stored_and_older_libraries_are_read_as_they_were_explored() -> None:
    plain = Preprocessing(resize=8, crop=4)
    assert "crop_rounds_down" not in plain.to_json()
    assert Preprocessing.from_json(plain.to_json()) == plain
    down = Preprocessing(resize=8, crop=4, crop_rounds_down=True)
    assert Preprocessing.from_json(down.to_json()) == down


@pytest.mark.parametrize("length", range(4, 12))
def test_the_centre_is_where_torchvision_has_it_unless_it_is_rounded_down(length: int) -> None:
    columns = np.tile(np.arange(length, dtype=np.uint8), (1, 4, 1))[..., None]
    grey: dict[str, Any] = {"mean": (0.0,), "std": (1.0,), "channels": 1, "crop": 4}
    first = int(Preprocessing(**grey).fitted(columns)[0, 0, 0, 0])
    assert first == round((length - 4) / 2.0)  # torchvision.transforms.functional.center_crop
    assert int(Preprocessing(**grey, crop_rounds_down=True).fitted(columns)[0, 0, 0, 0]) == (length - 4) // 2
