"""How pictures are prepared for a network of `transformers`: by the image processor next to its weights.

The processor is `transformers`' own, because its file leaves out what are defaults of its class, and each
class reads its sizes in its own way. Mean and deviation are what it makes of a black and a white picture. Of
the ways to resize and crop that its settings may mean, the one is taken that gives the same pixels.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from gati.errors import GatiError, ModelError, one_line
from gati.model.preprocess import Preprocessing

if TYPE_CHECKING:
    from PIL.Image import Image

_PICTURES = "pixel_values"  # the main input of networks that take pictures
_INTERPOLATIONS = {0: "nearest", 1: "bicubic", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers; 1 is Lanczos
_ADVICE = "give --mean, --std and --resize if the network was trained on others"
_TRIED = ((420, 300), (300, 420), (97, 64))  # width and height of the pictures that are compared
_CLOSE = 2.0  # of 255: mean difference that is due to rounding
_LEVIT = 256 / 224  # by how much the processor of LeViT enlarges the size of its settings


class FromProcessor(NamedTuple):
    """The preprocessing of a network's image processor; `note` says what it is, or why there is none.

    `is_unknown`: there is a processor, but Gati has no equal of it.
    """

    preprocessing: Preprocessing | None
    note: str
    is_unknown: bool = False


def prepared_by_processor(network: nn.Module) -> FromProcessor | None:
    """The preprocessing of the image processor that is stored with a network of `transformers`.

    None for other networks, and for those that take no pictures. Nothing is downloaded.
    """
    transformers: Any = sys.modules.get("transformers")
    place = getattr(getattr(network, "config", None), "_name_or_path", "")
    if transformers is None or not place or getattr(network, "main_input_name", "") != _PICTURES:
        return None
    where = f"the image processor of {place}"
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(
            place, local_files_only=True, trust_remote_code=False
        )
    except OSError:
        return FromProcessor(
            None, f"{where} is not on this machine: pictures are only divided by 255; {_ADVICE}"
        )
    except Exception as error:  # it may need another package, or be damaged
        return FromProcessor(None, f"{where} cannot be used ({one_line(error)})", is_unknown=True)
    try:
        found = _equal_to(processor, getattr(network.config, "num_channels", 3))
    except Exception as error:  # it may take or return anything
        return FromProcessor(None, f"{where} cannot be tried ({one_line(error)})", is_unknown=True)
    if found is None:
        return FromProcessor(
            None, f"{where} prepares pictures in a way that Gati does not have", is_unknown=True
        )
    return FromProcessor(found, f"pictures are prepared as by {where}: {_described(found)}")


def _equal_to(processor: Any, channels: int) -> Preprocessing | None:
    """A preprocessing that gives the same pixels as `processor` for a few pictures; None if none does."""
    mode = "L" if channels == 1 else "RGB"
    pictures = [_picture(*size).convert(mode) for size in _TRIED]
    wanted = [_processed(processor, each) for each in pictures]
    plain_ones = (_plain(level).convert(mode) for level in (0, 255))
    black, white = (_processed(processor, each).flatten(2).mean((0, 2)) for each in plain_ones)
    if len(black) != channels:
        return None
    std = 1.0 / (white - black)
    plain = Preprocessing(
        mean=tuple(round(float(each), 6) + 0.0 for each in -black * std),
        std=tuple(round(float(each), 6) for each in std),
        channels=len(std),
    )
    settings = json.loads(processor.to_json_string())
    tried = [
        (_difference(each, pictures, wanted), order, each)
        for order, each in enumerate(_possible(settings, plain, tuple(wanted[0].shape[2:])))
    ]
    difference, _, closest = min(tried)
    return _cut_alike(closest, processor, mode) if difference <= _CLOSE else None


def _cut_alike(found: Preprocessing, processor: Any, mode: str) -> Preprocessing:
    """`found` with the way to cut the centre out that gives the same pixels as `processor`."""
    if found.crop is None:
        return found
    shorter = found.resize or found.crop
    longer = shorter + (found.crop + 3 - shorter) % 4  # only margins of 3, 7, 11 and so on are cut otherwise
    picture = _picture(longer, shorter).convert(mode)
    wanted = [_processed(processor, picture)]
    ways = (found, replace(found, crop_rounds_down=True))
    return min(ways, key=lambda each: _difference(each, [picture], wanted))


def _processed(processor: Any, image: Image) -> Tensor:
    """What the processor makes of a picture, [1, C, H, W]. Raises `ModelError` for another shape."""
    found = processor(images=[image], return_tensors="pt")[_PICTURES]
    if not isinstance(found, Tensor) or found.ndim != 4:
        raise ModelError("it does not return one tensor [1, channels, height, width] for a picture")
    return found.float()


def _possible(
    settings: Mapping[str, Any], plain: Preprocessing, result: tuple[int, ...]
) -> Iterator[Preprocessing]:
    """What the settings of a processor may mean that makes pictures of `result` (height, width)."""
    height, width = result
    size = settings.get("size") or {}
    shorter = size.get("shortest_edge")
    own = replace(plain, interpolation=_INTERPOLATIONS.get(settings.get("resample", 2), "bilinear"))
    crops = (None, height) if height == width else (None,)
    for crop in crops:
        yield replace(own, crop=crop)
        yield replace(own, crop=crop, size=(height, width))
        if size.get("height") and size.get("width"):
            yield replace(own, crop=crop, size=(size["height"], size["width"]))
        if shorter:
            for side in (shorter, shorter / (settings.get("crop_pct") or 1.0), _LEVIT * shorter):
                yield replace(own, crop=crop, resize=int(side))


def _difference(preprocessing: Preprocessing, pictures: list[Image], wanted: list[Tensor]) -> float:
    """The largest mean difference to what is `wanted`, in levels of 0 to 255, or the first above `_CLOSE`."""
    largest = 0.0
    for picture, expected in zip(pictures, wanted, strict=True):
        try:
            found = preprocessing.from_pil([picture])
        except GatiError:
            return float("inf")
        if found.shape != expected.shape:
            return float("inf")
        levels = (found - expected).abs().mean((0, 2, 3)).numpy() * np.array(preprocessing.std) * 255.0
        largest = max(largest, float(levels.max()))
        if largest > _CLOSE:
            break
    return largest


def _picture(width: int, height: int) -> Image:
    """A smooth picture whose channels differ."""
    from PIL import Image

    rows, columns = np.linspace(0, 1, height)[:, None], np.linspace(0, 1, width)[None]
    channels = (rows + 0 * columns, columns + 0 * rows, (1 - rows) * columns)
    return Image.fromarray((np.stack(channels, axis=2) * 255).round().astype(np.uint8))


def _plain(level: int) -> Image:
    from PIL import Image

    return Image.fromarray(np.full((300, 300, 3), level, dtype=np.uint8))


def _described(preprocessing: Preprocessing) -> str:
    parts = []
    if preprocessing.size is not None:
        parts.append("stretched to {}x{} pixels".format(*preprocessing.size))
    if preprocessing.resize is not None:
        parts.append(f"the shorter side to {preprocessing.resize} pixels")
    if preprocessing.crop is not None:
        parts.append(f"the centre {preprocessing.crop}x{preprocessing.crop}")
    means, deviations = (
        ", ".join(f"{value:g}" for value in values) for values in (preprocessing.mean, preprocessing.std)
    )
    return "; ".join([*parts, f"mean {means}; deviation {deviations}"])
