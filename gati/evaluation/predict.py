"""Classify image files, recordings or texts with a cache library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from gati.composition.load import load
from gati.engine.engine import Engine
from gati.engine.exits import Prediction
from gati.errors import DataError
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
    preprocessing = engine.preprocessing
    if preprocessing.tensors is not None and preprocessing.text is None:
        raise DataError(
            "predict takes images, recordings or texts, and this network takes "
            f"{preprocessing.tensors.described()}: call an engine from Python, or gati serve"
        )
    for start in range(0, max(len(images), 1), _BATCH):
        batch = images[start : start + _BATCH]
        if batch and preprocessing.text is not None:
            yield preprocessing.from_texts([str(text) for text in batch], "predict")
        elif batch and preprocessing.sound is not None:
            yield load_recordings([Path(path) for path in batch], preprocessing)
        else:
            yield load_images(batch, preprocessing)
