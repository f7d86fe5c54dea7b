"""Which backend a composition is made for."""

from __future__ import annotations

from collections.abc import Callable

from gati.compose.costs import on_backend
from gati.compose.plans import Settings
from gati.errors import BackendError, ModelError
from gati.explore.library import Library

__all__ = ["choose_backend"]


def choose_backend(
    library: Library, settings: Settings, progress: Callable[[int, int], None] | None = None
) -> Library:
    """Return the library with the latencies of the wanted backend; "auto" is the fastest.

    The fastest runs the base model in the least time: exits shorten that on each alike. Where "auto" has not
    been measured before and the model is not at hand, the backend that `explore` measured stays. Raises
    BackendError for a backend that is unknown or not installed here, and, for one asked for by its name, as
    `load_model` does.
    """
    measured, name = library.manifest.profile, settings.backend
    published = settings.objective != "exact"  # made from the tables alone, model or not
    if name == measured.backend or (name == "auto" and published):
        return library
    from gati.runtime.backends import BACKENDS, GraphBackend

    if name != "auto":
        return on_backend(library, name, progress=progress)
    if measured.device != "cpu":
        return library
    others = [
        each for each, kind in BACKENDS.items() if issubclass(kind, GraphBackend) and kind.installed()
    ]
    try:
        choices = [on_backend(library, each, progress=progress) for each in others]
    except (BackendError, ModelError):
        return library
    return min([library, *choices], key=lambda choice: choice.manifest.profile.base_ms)
