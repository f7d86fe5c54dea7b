"""Trained models on disk: LightGBM's text format, and a JSON document with its checksum, written last."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gati.documents import DocumentKind
from gati.errors import EvictError
from gati.evict.predict.checksums import check_content, checksum
from gati.evict.predict.hazard import HazardModel, lightgbm_module
from gati.evict.predict.history import FEATURES
from gati.files import atomic_write_bytes

_CURE = "run gati evict train again"
_KIND = DocumentKind(1, EvictError, _CURE)
_MANIFEST, _BOOSTER = "predictor.json", "hazards.txt"


@dataclass(frozen=True, kw_only=True)
class _Manifest:
    """The input of the boosted trees: features, and bounds of age bins in seconds; checksums of files."""

    features: tuple[str, ...]
    edges_s: tuple[float, ...]
    trained_on: dict[str, Any] = field(default_factory=dict)
    sha256: dict[str, str] = field(default_factory=dict)


def save_model(model: HazardModel, folder: Path, trained_on: dict[str, Any]) -> None:
    """Write a model and what it was trained on. Raises StorageError."""
    for name, content in model_files(model, trained_on).items():
        atomic_write_bytes(folder / name, content)


def model_files(model: HazardModel, trained_on: dict[str, Any]) -> dict[str, bytes]:
    """The files of a model by name, the manifest last."""
    booster = model.booster.model_to_string().encode()
    manifest = _Manifest(
        features=FEATURES,
        edges_s=tuple(model.edges.tolist()),
        trained_on=trained_on,
        sha256={_BOOSTER: checksum(booster)},
    )
    return {_BOOSTER: booster, _MANIFEST: _KIND.text_of(vars(manifest)).encode()}


def load_model(folder: Path) -> HazardModel:
    """Read a model. Raises EvictError if it is missing, damaged, newer, or uses other features."""
    path = folder / _MANIFEST
    for name in (_MANIFEST, _BOOSTER):
        if not (folder / name).is_file():
            raise EvictError(f"{folder} has no {name}: {_CURE}")
    manifest = _KIND.record(_Manifest, _KIND.read(path), str(path))
    if manifest.features != FEATURES:
        other = sorted(set(manifest.features) ^ set(FEATURES)) or ["their order"]
        raise EvictError(f"{path} was trained on other features ({other[0]}): {_CURE}")
    edges = np.array(manifest.edges_s)
    try:
        content = (folder / _BOOSTER).read_bytes()
        check_content(_BOOSTER, content, manifest.sha256)
        booster = lightgbm_module().Booster(model_str=content.decode())
        if booster.num_feature() != len(FEATURES) + 1 or len(edges) < 2 or not (np.diff(edges) > 0.0).all():
            raise ValueError("booster and edges do not match")
    except EvictError:
        raise
    except Exception as error:  # LightGBM raises various exceptions
        raise EvictError(f"{folder} has no usable predictor ({error}): {_CURE}") from error
    return HazardModel(edges, booster)
