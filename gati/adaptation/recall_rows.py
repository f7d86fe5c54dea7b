"""The features of recent requests, and whether the remembered answers were wrong."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gati.adaptation.memory import FEATURES


class FeatureRows:
    """The last `limit` features, with labels and scenes; the order is lost."""

    def __init__(self, limit: int) -> None:
        self._features = np.empty((limit, FEATURES))
        self._labels = np.zeros(limit, dtype=np.bool_)
        self._scenes = np.zeros(limit, dtype=np.int64)
        self._taken = 0

    def __len__(self) -> int:
        return min(self._taken, len(self._features))

    def add(self, features: NDArray[np.float64], label: bool = False, scene: int = 0) -> None:
        """Add a row, in place of the oldest one if there is no room."""
        at = self._taken % len(self._features)
        self._features[at], self._labels[at], self._scenes[at] = features, label, scene
        self._taken += 1

    def all(self) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]]:
        """All rows: features [n, FEATURES], labels [n] and scenes [n]."""
        count = len(self)
        return self._features[:count].copy(), self._labels[:count].copy(), self._scenes[:count].copy()
