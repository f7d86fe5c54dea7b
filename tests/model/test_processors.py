"""Pictures for networks of `transformers` are prepared as by the image processor next to the weights.

`transformers` is not needed here: a stand-in has processors that resize as its classes do.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gati.errors import DataError
from gati.model.data import load_images
from gati.model.load import LoadedModel, load_model
from gati.model.preprocess import Preprocessing

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALVES = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
NETWORK = """
from types import SimpleNamespace

from torch import nn


class OfTransformers(nn.Conv2d):
    main_input_name = "pixel_values"


def net():
    made = OfTransformers(3, 4, 1)
    made.config = SimpleNamespace(_name_or_path="/models/mine")
    return made
"""
Resizing = Callable[[Image.Image], Image.Image]


def stretched(width: int, height: int) -> Resizing:
    return lambda image: image.resize((width, height), Image.Resampling.BICUBIC)


def cut(shorter: int, side: int, rounded: Callable[[float], int] = round) -> Resizing:
    def resized(image: Image.Image) -> Image.Image:
        width, height = (shorter * length // min(image.size) for length in image.size)
        image = image.resize((width, height), Image.Resampling.BICUBIC)
        left, top = rounded((width - side) / 2), rounded((height - side) / 2)
        return image.crop((left, top, left + side, top + side))

    return resized


class Processor:
    """Resizes, divides by 255 and normalises; `settings` are what its file says."""

    def __init__(self, resizing: Resizing, values: dict[str, Any], **settings: Any) -> None:
        self.resizing, self.values, self.settings = resizing, values, {"resample": 3, **settings}

    def to_json_string(self) -> str:
        return json.dumps(self.settings)

    def __call__(self, images: list[Image.Image], return_tensors: str) -> dict[str, torch.Tensor]:
        pixels = np.stack([np.atleast_3d(np.asarray(self.resizing(image))) for image in images]) / 255.0
        values = (pixels - self.values["mean"]) / self.values["std"]
        return {"pixel_values": torch.from_numpy(values).permute(0, 3, 1, 2).float()}


def loaded_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processor: object, **options: Any
) -> LoadedModel:
    def from_pretrained(place: str, *, local_files_only: bool, trust_remote_code: bool | None = None) -> Any:
        assert place == "/models/mine" and local_files_only
        assert trust_remote_code is False, "if it is not said, transformers asks at the keyboard"
        if isinstance(processor, Exception):
            raise processor
        return processor

    stand_in = SimpleNamespace(AutoImageProcessor=SimpleNamespace(from_pretrained=from_pretrained))
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    (tmp_path / "own.py").write_text(NETWORK)
    return load_model(f"{tmp_path / 'own.py'}:net", **options)


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        pytest.param(
            Processor(stretched(224, 224), HALVES, size={"height": 224, "width": 224}),
            Preprocessing(**HALVES, size=(224, 224), interpolation="bicubic"),
            id="ViT: stretched to a square",
        ),
        pytest.param(
            Processor(cut(256, 224), IMAGENET, size={"shortest_edge": 256}, resample=2),
            Preprocessing(**IMAGENET, resize=256, crop=224),
            id="BiT: shorter side, then the centre",
        ),
        pytest.param(
            Processor(cut(256, 224, math.floor), IMAGENET, size={"shortest_edge": 256}, resample=2),
            Preprocessing(**IMAGENET, resize=256, crop=224, crop_rounds_down=True),
            id="BiT: with the centre of transformers itself",
        ),
        pytest.param(
            Processor(cut(224, 224, math.floor), HALVES, size={"shortest_edge": 224}),
            Preprocessing(**HALVES, resize=224, crop=224, interpolation="bicubic", crop_rounds_down=True),
            id="CLIP: the centre is as high as the picture",
        ),
        pytest.param(
            Processor(cut(256, 224), IMAGENET, size={"shortest_edge": 224}, crop_pct=0.875),
            Preprocessing(**IMAGENET, resize=256, crop=224, interpolation="bicubic"),
            id="ConvNeXt: the size is that of the centre",
        ),
        pytest.param(
            Processor(cut(256, 224), IMAGENET, size={"shortest_edge": 224}),
            Preprocessing(**IMAGENET, resize=256, crop=224, interpolation="bicubic"),
            id="LeViT: the same, with a factor of its class",
        ),
        pytest.param(
            Processor(stretched(384, 384), IMAGENET, size={"shortest_edge": 384}, crop_pct=0.875),
            Preprocessing(**IMAGENET, size=(384, 384), interpolation="bicubic"),
            id="ConvNeXt of 384 pixels: stretched",
        ),
        pytest.param(
            Processor(stretched(160, 96), HALVES, size={"height": 96, "width": 160}),
            Preprocessing(**HALVES, size=(96, 160), interpolation="bicubic"),
            id="no square",
        ),
    ],
)
def test_pictures_are_prepared_as_by_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processor: Processor, expected: Preprocessing
) -> None:
    loaded = loaded_with(tmp_path, monkeypatch, processor)
    assert loaded.preprocessing == expected
    assert loaded.note.startswith("pictures are prepared as by the image processor of /models/mine: ")
    assert loaded.preprocessing_from == "published"


@pytest.mark.parametrize("rounded", [round, math.floor])
@pytest.mark.parametrize("length", range(224, 232))
def test_the_centre_is_cut_out_where_the_processor_cuts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounded: Callable[[float], int], length: int
) -> None:
    """One pixel off where what is left over is 3, 7 and so on."""
    processor = Processor(cut(224, 224, rounded), HALVES, size={"shortest_edge": 224})
    loaded = loaded_with(tmp_path, monkeypatch, processor)
    noise = np.random.default_rng(0).integers(0, 256, (224, length, 3), dtype=np.uint8)
    for image in (Image.fromarray(noise), Image.fromarray(noise.swapaxes(0, 1))):
        wanted = processor(images=[image], return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(loaded.preprocessing.from_pil([image]), wanted)


def test_of_a_network_for_grey_pictures_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grey = NETWORK.replace("3, 4, 1", "1, 4, 1").replace('mine"', 'mine", num_channels=1')
    monkeypatch.setattr(sys.modules[__name__], "NETWORK", grey)
    processor = Processor(stretched(28, 28), {"mean": [0.0], "std": [0.5]}, size={"height": 28, "width": 28})
    loaded = loaded_with(tmp_path, monkeypatch, processor)
    expected = Preprocessing((0.0,), (0.5,), channels=1, size=(28, 28), interpolation="bicubic")
    assert loaded.preprocessing == expected
    assert loaded.note.endswith("stretched to 28x28 pixels; mean 0; deviation 0.5")


def test_options_that_say_all_replace_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that prepared pictures by them before goes on with the library that it made."""
    options: dict[str, Any] = {"mean": [0.5], "std": [0.25], "resize": 64}
    loaded = loaded_with(tmp_path, monkeypatch, Processor(cut(256, 224), IMAGENET), **options)
    assert loaded.preprocessing == Preprocessing((0.5,) * 3, (0.25,) * 3, resize=64, crop=64)
    assert (loaded.note, loaded.preprocessing_from) == ("", "told")


def test_options_override_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = Processor(cut(256, 224), IMAGENET, size={"shortest_edge": 256})
    loaded = loaded_with(tmp_path, monkeypatch, processor, mean=[0.5], resize=300)
    assert loaded.preprocessing == Preprocessing(
        (0.5,) * 3, IMAGENET["std"], resize=300, crop=224, interpolation="bicubic"
    )
    assert (loaded.note, loaded.preprocessing_from) == ("", "told")


def _swapped(image: Image.Image) -> Image.Image:
    return Image.fromarray(np.asarray(stretched(224, 224)(image))[:, :, ::-1])


@pytest.mark.parametrize(
    ("processor", "why"),
    [
        (Processor(_swapped, HALVES, size={"height": 224, "width": 224}), " prepares pictures in a way that"),
        (Processor(cut(300, 224), HALVES, size={"shortest_edge": 224}), " prepares pictures in a way that"),
        (ImportError("it needs torchvision"), " cannot be used (ImportError: it needs torchvision)"),
        (object(), " cannot be tried ("),
    ],
    ids=["blue first", "unknown size", "unusable", "none"],
)
def test_pictures_are_refused_if_gati_cannot_prepare_them_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processor: object, why: str
) -> None:
    """A certificate about pictures that the network was not trained for is worth nothing."""
    Image.new("RGB", (300, 300)).save(tmp_path / "picture.png")
    loaded = loaded_with(tmp_path, monkeypatch, processor)
    assert loaded.note.startswith(f"the image processor of /models/mine{why}")
    with pytest.raises(DataError, match="how to prepare images is not known"):
        load_images([tmp_path / "picture.png"], loaded.preprocessing)
    told = loaded_with(tmp_path, monkeypatch, processor, mean=[0.5], std=[0.5], resize=224)
    assert load_images([tmp_path / "picture.png"], told.preprocessing).shape == (1, 3, 224, 224)


def test_without_a_processor_it_is_said_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loaded_with(tmp_path, monkeypatch, OSError("no preprocessor_config.json"))
    assert (loaded.preprocessing, loaded.preprocessing_from) == (Preprocessing(), "default")
    assert loaded.note == (
        "the image processor of /models/mine is not on this machine: pictures are only divided by 255; give "
        "--mean, --std and --resize if the network was trained on others"
    )


def test_networks_that_take_no_pictures_have_no_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "NETWORK", NETWORK.replace("pixel_values", "input_ids"))
    loaded = loaded_with(tmp_path, monkeypatch, Processor(cut(256, 224), IMAGENET))
    assert loaded.preprocessing == Preprocessing() and loaded.note == ""
