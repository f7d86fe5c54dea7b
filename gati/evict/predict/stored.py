"""Trained models on disk: LightGBM's own text and a JSON document, written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from gati.errors import EvictError
from gati.evict.predict.hazard import HazardModel, lightgbm_module
from gati.evict.predict.history import FEATURES
from gati.files import atomic_write_bytes

__all__ = ["load_model", "model_files", "save_model"]

_FORMAT = 1
_MANIFEST, _BOOSTER = "predictor.json", "hazards.txt"


def save_model(model: HazardModel, folder: Path, trained_on: dict[str, Any]) -> None:
    """Write a model and what it was trained on. Raises StorageError."""
    for name, content in model_files(model, trained_on).items():
        atomic_write_bytes(folder / name, content)


def model_files(model: HazardModel, trained_on: dict[str, Any]) -> dict[str, bytes]:
    """The files of a model by name, the manifest last."""
    document = {
        "format": _FORMAT,
        "features": list(FEATURES),
        "edges_s": model.edges.tolist(),
        "trained_on": trained_on,
    }
    return {
        _BOOSTER: model.booster.model_to_string().encode(),
        _MANIFEST: (json.dumps(document, indent=2) + "\n").encode(),
    }


def load_model(folder: Path) -> HazardModel:
    """Read a model. Raises EvictError for one that is damaged, newer, or of other features."""
    path = folder / _MANIFEST
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] > _FORMAT:
            raise EvictError(
                f"{path} has format {document['format']}, this Gati reads up to {_FORMAT}: install a newer "
                "Gati, or train again with gati evict train"
            )
        if document["features"] != list(FEATURES):
            other = sorted(set(document["features"]) ^ set(FEATURES)) or ["their order"]
            raise EvictError(f"{path} was trained on other features ({other[0]}): run gati evict train again")
        edges = np.array(document["edges_s"], dtype=np.float64)
        text = (folder / _BOOSTER).read_text(encoding="utf-8")
        booster = lightgbm_module().Booster(model_str=text)
        if booster.num_feature() != len(FEATURES) + 1 or len(edges) < 2 or not (np.diff(edges) > 0.0).all():
            raise ValueError("booster and edges do not fit")
    except FileNotFoundError as error:
        raise EvictError(f"{folder} has no {Path(error.filename).name}: run gati evict train again") from None
    except EvictError:
        raise
    except Exception as error:  # LightGBM has no error of its own that could be named here
        raise EvictError(
            f"{folder} holds no usable predictor ({error}): run gati evict train again"
        ) from error
    return HazardModel(edges, booster)
