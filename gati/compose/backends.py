"""Which backends a composition may be made for."""

from __future__ import annotations

from collections.abc import Callable

from gati.compose.costs import CostedLibrary, on_backend
from gati.compose.plans import Settings
from gati.errors import BackendError, DataError, ModelError
from gati.explore.library import Library

__all__ = ["choose_backend", "reduced_precisions"]

Progress = Callable[[int, int], None]
WORTH_TRYING = 0.95  # of the fastest float32 network's time: a reduced precision's whole network


def choose_backend(library: Library, settings: Settings, progress: Progress | None = None) -> Library:
    """Return the library with the latencies of the wanted backend; "auto" is the fastest in float32.

    The fastest runs the base model in the least time: exits shorten that on each alike. Where "auto" has not
    been measured before and the model is not at hand, the backend that `explore` measured stays. Raises
    BackendError for a backend that is unknown or not installed here, and, for one asked for by its name, as
    `load_model` does.
    """
    measured, name = library.manifest.profile, settings.backend
    if name not in (measured.backend, "auto"):
        return on_backend(library, name, progress=progress)
    try:
        choices = [on_backend(library, each, progress=progress) for each in _others(library, settings, "f32")]
    except (BackendError, ModelError):
        return library
    return min([library, *choices], key=lambda choice: choice.manifest.profile.base_ms)


def reduced_precisions(
    library: Library, settings: Settings, base_ms: float, progress: Progress | None = None
) -> list[Library]:
    """Return the library on each backend of reduced precision that "auto" should try.

    Only those whose whole network takes clearly less than `base_ms`. None where their answers could not be
    checked, because the held-out inputs are no longer there.
    """
    try:
        choices = [
            on_backend(library, each, progress=progress)
            for kind in ("bf16", "int8")
            for each in _others(library, settings, kind)
        ]
        return [
            choice
            for choice in choices
            if choice.manifest.profile.base_ms < WORTH_TRYING * base_ms
            and isinstance(choice, CostedLibrary)
            and choice.answers is not None
        ]
    except (BackendError, DataError, ModelError):
        return []


def _others(library: Library, settings: Settings, precision: str) -> list[str]:
    """Backends beside the one that `explore` measured; published forms need no model and stay on that."""
    from gati.runtime.backends import BACKENDS

    asked = settings.backend == "auto" and settings.objective == "exact"
    if not asked:
        return []
    kind_of_device = library.manifest.profile.device.partition(":")[0]
    return [
        name
        for name, kind in BACKENDS.items()
        if kind.automatic
        and kind_of_device in kind.devices
        and kind.precision == precision
        and kind.installed()
    ]
