"""Running a network with learned caches: engine, placement, measurement, evaluation."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "Engine": "engine",
    "Evaluation": "evaluate",
    "Prediction": "engine",
    "evaluate": "evaluate",
    "load": "load",
    "measure_lookup": "profile",
    "measure_overlap": "profile",
    "measure_profile": "profile",
    "predict": "predict",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a member on first use; torch stays out until then."""
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
