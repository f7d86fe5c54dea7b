"""From an option of a stage to something that answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gati.errors import DataError
from gati.plan.pipeline import CacheLibrary, PlainModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gati.runtime.engine import Engine

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
    from gati.runtime.load import load, load_base

    if isinstance(source, PlainModel):
        return _open_plain(source, images, device, threads)
    if source.composition is None:
        return load_base(source.directory, device=device, threads=threads)
    return load(source.directory, composition=source.composition, device=device, threads=threads)


def _open_plain(
    source: PlainModel, images: NDArray[np.uint8] | None, device: str, threads: int | None
) -> Engine:
    import torch

    from gati.model.load import load_model
    from gati.model.segments import trace
    from gati.runtime.engine import Engine
    from gati.runtime.load import parse_device

    target = parse_device(device)
    if images is None or len(images) < 2:
        raise DataError(f"model {source.model} needs two images to know the size of its input; give some")
    if threads is not None:
        torch.set_num_threads(threads)
    loaded = load_model(source.model, source.checkpoint)
    example = loaded.preprocessing(images[:2]).to(target)
    return Engine(
        trace(loaded.module.to(target), example, []),
        version=f"base@{loaded.checkpoint_sha256[:12]}",
        class_names=loaded.class_names,
        preprocessing=loaded.preprocessing,
    )
