"""Scene memory: recognises a scene that a camera saw before, so that an earlier version can serve at once.

A signature describes the brightness of each part of the picture, per channel, and its variation. It is coarse
enough to ignore passing objects, and fine enough to tell day from night and one place from another.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gati.errors import AdaptError

Signature = NDArray[np.float32]

_FIELDS = 4  # per side


def scene_signature(features: Tensor) -> Signature:
    """A vector for the scene that inputs or hidden outputs [n, ...] come from.

    The median over the inputs of each channel's average over 4 x 4 fields, then each channel's median
    deviation from it: float32 [17 * C] for maps. Half of the inputs may show something else.
    """
    if len(features) == 0:
        raise AdaptError("a scene needs at least one input")
    maps = features.detach().float().cpu()
    if maps.ndim == 4:
        maps = torch.nn.functional.adaptive_avg_pool2d(maps, _FIELDS)
    values = maps.flatten(2) if maps.ndim > 2 else maps.unsqueeze(2)  # (n, C, fields)
    middle = values.median(0).values
    spread = (values - middle).abs().median(0).values.mean(1)
    return torch.cat((middle.flatten(), spread)).numpy()


def scene_distance(one: Signature, other: Signature) -> float:
    """Root mean squared difference, in units of the features; infinite if the shapes differ."""
    return float(np.sqrt(np.mean((one - other) ** 2))) if one.shape == other.shape else float("inf")


def nearest_scene(signatures: Sequence[Signature], current: Signature, tolerance: float) -> int | None:
    """The index of the signature nearest to `current`; None if none is within `tolerance`."""
    distances = [scene_distance(each, current) for each in signatures]
    if not distances:
        return None
    nearest = int(np.argmin(distances))
    return nearest if distances[nearest] <= tolerance else None
