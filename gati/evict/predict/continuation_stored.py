"""Continuation models on disk: weights as safetensors, and a JSON document that says what they are for."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from gati.documents import DocumentKind
from gati.errors import EvictError
from gati.evict.predict.continuation import ContinuationModel, ContinuationSettings
from gati.files import atomic_write_bytes

_CURE = "run gati evict train --dialogues again"
_KIND = DocumentKind(2, EvictError, _CURE)  # 1: features of other hashes, each counted once
_DOCUMENT, _WEIGHTS = "continuation.json", "continuation.safetensors"


def save_continuation(model: ContinuationModel, folder: Path, trained_on: dict[str, Any]) -> None:
    """Write a model and what it was trained on. Raises StorageError."""
    atomic_write_bytes(folder / _WEIGHTS, save({"weights": model.weights}))
    values = {"kind": "hash", "bias": model.bias, **asdict(model.settings), "trained_on": trained_on}
    _KIND.write(folder / _DOCUMENT, values)


def load_continuation(folder: str | Path) -> ContinuationModel:
    """Read a model. Raises EvictError for one that is missing, damaged or newer."""
    folder = Path(folder)
    path = folder / _DOCUMENT
    if not path.is_file():
        raise EvictError(f"{folder} has no {_DOCUMENT}: {_CURE}")
    document = _KIND.read(path)
    if document["format"] < _KIND.format:
        raise EvictError(f"{folder} is of an older Gati, which read prompts in another way: {_CURE}")
    with _KIND.reading(str(folder)):
        if document["kind"] != "hash":
            raise ValueError(f"kind {document['kind']!r} is unknown, there is hash")
        settings = ContinuationSettings(
            **{name: type(value)(document[name]) for name, value in asdict(ContinuationSettings()).items()}
        )
        try:
            weights = load((folder / _WEIGHTS).read_bytes())["weights"]
        except SafetensorError as error:
            raise ValueError(str(error)) from error
        if weights.shape != (settings.features,) or weights.dtype != np.float32:
            raise ValueError(f"weights {weights.shape} of {weights.dtype} for {settings.features} features")
        if not np.isfinite(weights).all():
            raise ValueError("weights are not finite")
        return ContinuationModel(weights, float(document["bias"]), settings)
