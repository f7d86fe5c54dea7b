"""Continuation models on disk: weights as safetensors, and a JSON document that says what they are for.

A model of kind `minilm` has a copy of its encoder in a folder of its own. The document is written last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from gati.documents import DocumentKind
from gati.errors import EvictError
from gati.evict.predict.checksums import check_content, checksum
from gati.evict.predict.continuation import ContinuationModel, ContinuationSettings
from gati.evict.trace.dialogues import Prompts
from gati.files import atomic_write_bytes

if TYPE_CHECKING:
    from gati.evict.predict.encoded import EncodedContinuation

_CURE = "run gati evict train --dialogues again"
_KIND = DocumentKind(2, EvictError, _CURE)  # format 1 had other hashes, and counted each feature once
_DOCUMENT, _WEIGHTS, _ENCODER = "continuation.json", "continuation.safetensors", "encoder"


class ContinuationPredictor(Protocol):
    """The interface of both kinds of models that `load_continuation` returns."""

    quick: bool

    def predict(self, prompts: Sequence[Prompts]) -> NDArray[np.float64]:
        """The probabilities that another prompt follows, [prompts]. Raises EvictError."""

    def digest(self) -> str:
        """A hash that identifies the trained model."""


def save_continuation(model: ContinuationModel, folder: Path, trained_on: dict[str, Any]) -> None:
    """Write a model and what it was trained on. Raises StorageError."""
    values = {"kind": "hash", "bias": model.bias, **asdict(model.settings), "trained_on": trained_on}
    _write(folder, [(_WEIGHTS, save({"weights": model.weights}))], values)


def save_encoded(model: EncodedContinuation, folder: Path, trained_on: dict[str, Any]) -> None:
    """Write a model with its encoder, and what it was trained on. Raises StorageError."""
    from gati.evict.predict.encoded import FILES

    weights = {name: value.numpy() for name, value in model.head.state_dict().items()}
    encoder = ((f"{_ENCODER}/{name}", (model.encoder.folder / name).read_bytes()) for name in FILES)
    files = chain(encoder, [(_WEIGHTS, save(weights))])
    _write(folder, files, {"kind": "minilm", "trained_on": trained_on})


def load_continuation(folder: str | Path) -> ContinuationPredictor:
    """Read a model. Raises EvictError if it is missing, damaged, or of another format."""
    folder = Path(folder)
    path = folder / _DOCUMENT
    if not path.is_file():
        raise EvictError(f"{folder} has no {_DOCUMENT}: {_CURE}")
    document = _KIND.read(path)
    if document["format"] < _KIND.format:
        raise EvictError(f"{folder} was written by an older Gati, which encoded prompts differently: {_CURE}")
    with _KIND.reading(str(folder)):
        content, sums = (folder / _WEIGHTS).read_bytes(), document.get("sha256", {})
        check_content(_WEIGHTS, content, sums)
        try:
            weights = load(content)
        except SafetensorError as error:
            raise ValueError(str(error)) from error
        if document["kind"] == "minilm":
            return _encoded(folder, weights, sums)
        if document["kind"] != "hash":
            raise ValueError(f"kind {document['kind']!r} is unknown; known are hash and minilm")
        return _hashed(document, weights["weights"])


def _write(folder: Path, files: Iterable[tuple[str, bytes]], values: Mapping[str, Any]) -> None:
    """Write files and then the document, with their checksums. Raises StorageError."""
    sums: dict[str, str] = {}
    for name, content in files:
        atomic_write_bytes(folder / name, content)
        sums[name] = checksum(content)
    _KIND.write(folder / _DOCUMENT, {**values, "sha256": sums})


def _hashed(document: dict[str, Any], weights: NDArray[np.float32]) -> ContinuationModel:
    settings = ContinuationSettings(
        **{name: type(value)(document[name]) for name, value in asdict(ContinuationSettings()).items()}
    )
    if weights.shape != (settings.features,) or weights.dtype != np.float32:
        raise ValueError(f"weights {weights.shape} of {weights.dtype} for {settings.features} features")
    if not np.isfinite(weights).all():
        raise ValueError("weights are not finite")
    return ContinuationModel(weights, float(document["bias"]), settings)


def _encoded(folder: Path, weights: dict[str, NDArray[Any]], sums: Mapping[str, str]) -> EncodedContinuation:
    import torch

    from gati.evict.predict.encoded import FILES, EncodedContinuation, PromptEncoder, new_head

    encoder = PromptEncoder(folder / _ENCODER)
    for name in FILES:
        check_content(f"{_ENCODER}/{name}", (folder / _ENCODER / name).read_bytes(), sums)
    head = new_head(encoder.width)
    try:
        head.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    except RuntimeError as error:
        raise ValueError(
            f"the weights belong to another network: {' '.join(str(error).split())[:200]}"
        ) from error
    return EncodedContinuation(encoder, head)
