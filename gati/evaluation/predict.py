"""Classify image files, recordings or texts with a cache library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from gati.composition.load import load
from gati.engine.engine import Engine
from gati.engine.exits import Prediction
from gati.model.data import load_images
from gati.model.recordings import load_recordings

_BATCH = 32


def predict(
    directory: str | Path,
    images: Sequence[str | Path],
    *,
    composition: str = "default",
    device: str | None = None,
) -> list[Prediction]:
    """Classify image files with the base model's preprocessing; one prediction per image, in order.

    For an audio model `images` are recordings; for a text model they are the texts themselves.

    Raises:
        DataError: a file is missing, damaged, too large or of the wrong shape.
        LibraryError, CompositionError, BackendError: as for `load`.
    """
    with load(directory, composition=composition, device=device) as engine:
        batches = _batches(engine, images)
        return [prediction for batch in batches for prediction in engine(batch)]


def _batches(engine: Engine, images: Sequence[str | Path]) -> Iterator[Tensor]:
    for start in range(0, max(len(images), 1), _BATCH):
        batch = images[start : start + _BATCH]
        if batch and engine.preprocessing.text is not None:
            yield engine.preprocessing.from_texts([str(text) for text in batch], "predict")
        elif batch and engine.preprocessing.sound is not None:
            yield load_recordings([Path(path) for path in batch], engine.preprocessing)
        else:
            yield load_images(batch, engine.preprocessing)
