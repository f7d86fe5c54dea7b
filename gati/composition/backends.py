"""Choosing the backends for which a composition is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gati.composition.composition import REDUCED
from gati.composition.costs import CostedLibrary, on_backend
from gati.composition.networks import network_times
from gati.composition.pieces import Pieces
from gati.composition.plans import Settings
from gati.errors import BackendError, DataError, ModelError
from gati.exploration.library import Library

Progress = Callable[[int, int], None]
WORTH_TRYING = 0.95  # a reduced precision must take less than this share of the fastest float32 network


def choose_backend(
    library: Library, settings: Settings, progress: Progress | None = None, pieces: Pieces | None = None
) -> Library:
    """Return the library with the latencies of the wanted backend; "auto" is the fastest in float32.

    The fastest backend is the one that runs the base model in the least time, since exits save about the same
    share on each. If nothing was measured before and the model cannot be loaded, the backend stays the one
    that `explore` measured. Raises BackendError for a backend that is unknown or not installed, and, for one
    requested by name, as `load_model`.
    """
    measured, name = library.manifest.profile, settings.backend
    pieces = pieces or Pieces(library)
    if name not in (measured.backend, "auto"):
        return on_backend(library, name, progress=progress, pieces=pieces)
    try:
        base_ms = network_times(library, _others(library, settings, pieces), pieces)
        names = {measured.backend: measured.base_ms} | {n: base_ms[n] for n in base_ms if _float32(n)}
        fastest = min(names, key=names.__getitem__)
        return on_backend(library, fastest, progress=progress, pieces=pieces)
    except (BackendError, ModelError):
        return library


def reduced_precisions(
    library: Library, chosen: Library, settings: Settings, progress: Progress | None, pieces: Pieces
) -> list[CostedLibrary]:
    """Return the library on each backend of reduced precision that "auto" should try.

    These are the backends on which the whole network is clearly faster than on the `chosen` one, and than in
    any finer precision, and the one that differs from `chosen` only in its lookups.
    """
    found: list[CostedLibrary] = []
    try:
        base_ms = network_times(library, _others(library, settings, pieces), pieces)
        known = chosen.manifest.profile
        limit_ms = WORTH_TRYING * base_ms.get(known.backend, known.base_ms)
        names = _not_behind_finer_ones({n: base_ms[n] for n in base_ms if not _float32(n)}, limit_ms)
        for name in (*_coarser_lookups(settings, known.backend, pieces), *names):
            choice = on_backend(library, name, progress=progress, pieces=pieces)
            if isinstance(choice, CostedLibrary) and choice.answers is not None:
                found.append(choice)
    except (BackendError, DataError, ModelError):
        return []
    return found


def _not_behind_finer_ones(base_ms: Mapping[str, float], limit_ms: float) -> list[str]:
    """Those below the limit: measuring one in full takes minutes, and a coarser one loses more answers."""
    found: list[str] = []
    for suffix in REDUCED:  # from fine to coarse
        fast = [name for name in base_ms if name.endswith(suffix) and base_ms[name] < limit_ms]
        limit_ms = min([limit_ms, *(base_ms[name] for name in fast)])
        found += fast
    return found


def _others(library: Library, settings: Settings, pieces: Pieces) -> list[str]:
    """The backends that "auto" compares with the one that `explore` measured; none for published objectives.

    Reduced precision is left out if the held-out inputs, which check its answers, are missing.
    """
    from gati.engine.backends import BACKENDS

    if settings.backend != "auto" or settings.objective != "exact":
        return []
    checkable = _checkable(pieces)
    kind_of_device = library.manifest.profile.device.partition(":")[0]
    return [
        name
        for name, kind in BACKENDS.items()
        if kind_of_device in kind.automatic
        and kind.same_network_as is None
        and kind.installed()
        and (checkable or _float32(name))
    ]


def _coarser_lookups(settings: Settings, chosen: str, pieces: Pieces) -> list[str]:
    """Backends that run the same network as `chosen`, but lookups in reduced precision."""
    from gati.engine.backends import BACKENDS

    if settings.backend != "auto" or settings.objective != "exact" or not _checkable(pieces):
        return []
    return [name for name, kind in BACKENDS.items() if kind.same_network_as == chosen and kind.installed()]


def _checkable(pieces: Pieces) -> bool:
    """Whether the held-out inputs still exist, so that an engine can answer them."""
    try:
        return bool(pieces.held_out)
    except DataError:
        return False


def _float32(backend: str) -> bool:
    from gati.engine.backends import BACKENDS

    return BACKENDS[backend].in_float32()
