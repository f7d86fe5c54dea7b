"""Engines for the options of stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gati.errors import DataError
from gati.pipelines.pipeline import CacheLibrary, PlainModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gati.engine.engine import Engine

__all__ = ["open_engine"]


def open_engine(
    source: CacheLibrary | PlainModel,
    images: NDArray[np.uint8] | None = None,
    *,
    device: str = "cpu",
    threads: int | None = None,
) -> Engine:
    """Load what serves an option. Options with equal sources can share one engine.

    A plain model is traced on `images`, two or more uint8 [N, H, W, C] of the size it will get; a cache
    library needs none.

    **Raises:** `LibraryError`, `CompositionError`, `BackendError`, `ModelError`, as `gati.load` does;
    `DataError` for a plain model without images.
    """
    from gati.composition.load import load, load_base, open_plain_model

    if isinstance(source, PlainModel):
        if images is None or len(images) < 2:
            raise DataError(f"model {source.model} needs two images to know the size of its input; give some")
        return open_plain_model(
            source.model, source.checkpoint, images=images, device=device, threads=threads
        ).base()
    if source.composition is None:
        return load_base(source.directory, device=device, threads=threads)
    return load(source.directory, composition=source.composition, device=device, threads=threads)
