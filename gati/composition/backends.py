"""Choosing the backends for which a composition is made."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gati.composition.composition import REDUCED
from gati.composition.costs import CostedLibrary, on_backend
from gati.composition.networks import network_times
from gati.composition.pieces import Pieces
from gati.composition.plans import Settings
from gati.costs.hardware import is_from_here, processor_name
from gati.errors import BackendError, DataError, ModelError
from gati.exploration.library import Library

if TYPE_CHECKING:
    from gati.engine.backends import Backend

_log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
WORTH_TRYING = 0.95  # a reduced precision must take less than this share of the fastest float32 network


def choose_backend(
    library: Library, settings: Settings, progress: Progress | None = None, pieces: Pieces | None = None
) -> Library:
    """Return the library with the latencies of the wanted backend; "auto" is the fastest in float32.

    The fastest backend is the one that runs the base model in the least time, since exits save about the same
    share on each; one that fails is left out. What `explore` measured on another processor, or with another
    number of threads, is measured again here; it is used only where the model cannot be loaded. Raises
    BackendError for a backend that is unknown or not installed, and, for one requested by name, if it fails,
    and as `load_model`.
    """
    measured, name = library.manifest.profile, settings.backend
    pieces = pieces or Pieces(library)
    explored = _explored_counts(library, settings)
    if name != "auto":
        try:
            return on_backend(library, name, progress=progress, pieces=pieces, explored=explored)
        except (BackendError, ModelError) as error:
            if name != measured.backend or settings.threads is not None:
                raise
            _log.warning("the latencies are those that explore measured elsewhere: %s", error)
            return library
    try:
        base_ms = network_times(library, _others(library, settings, pieces), pieces)
    except (BackendError, ModelError) as error:
        _log.warning("no backend is tried but %s, on which explore measured: %s", measured.backend, error)
        return library
    # a latency from elsewhere cannot be compared, so that backend comes last unless it is measured here
    names = {measured.backend: measured.base_ms if explored else math.inf}
    names |= {name: base_ms[name] for name in base_ms if _float32(name)}
    for fastest in sorted(names, key=names.__getitem__):
        try:
            return on_backend(library, fastest, progress=progress, pieces=pieces, explored=explored)
        except (BackendError, ModelError) as error:
            _log.warning("backend %s is not tried: %s", fastest, error)
    return library


def backends_to_time(library: Library, settings: Settings) -> list[str]:
    """Return the float32 backends among which the plain network of the settings is chosen."""
    from gati.engine.backends import BACKENDS, get_backend

    if settings.backend != "auto":
        return [get_backend(settings.backend).same_network_as or settings.backend]
    own = library.manifest.profile.backend
    others = [name for name, kind in BACKENDS.items() if _automatic(library, kind) and kind.in_float32()]
    return [own, *(name for name in others if name != own and tries_all(settings))]


def _explored_counts(library: Library, settings: Settings) -> bool:
    """Whether the latencies that `explore` measured are used, and not measured again.

    They are if they hold for this processor and number of threads. They are anyway for a GPU that is not
    here, for overlapped lookups, which `explore` alone measures, and, unless a number of threads is asked
    for, for the published objectives.
    """
    profile = library.manifest.profile
    if not processor_name(profile.device):
        return True
    overlapped = settings.placement == "overlapped"
    if settings.threads is None and (settings.objective != "exact" or overlapped):
        return True
    if settings.threads is None and profile.device != "cpu":  # threads of the CPU do not run the network
        return is_from_here(profile)
    import torch

    return profile.threads == torch.get_num_threads() and (overlapped or is_from_here(profile))


def reduced_precisions(
    library: Library, chosen: Library, settings: Settings, progress: Progress | None, pieces: Pieces
) -> list[CostedLibrary]:
    """Return the library on each backend of reduced precision that "auto" should try.

    These are the backends on which the whole network is clearly faster than on the `chosen` one, and than in
    any finer precision, and the one that differs from `chosen` only in its lookups. If the held-out inputs,
    which check their answers, are missing, there are none, and a warning is logged.
    """
    found: list[CostedLibrary] = []
    if not _tries_reduced_precisions(library, settings):
        return found
    try:
        _ = pieces.held_out
        base_ms = network_times(library, _others(library, settings, pieces), pieces)
        known = chosen.manifest.profile
        limit_ms = WORTH_TRYING * base_ms.get(known.backend, known.base_ms)
        names = _not_behind_finer_ones({n: base_ms[n] for n in base_ms if not _float32(n)}, limit_ms)
    except (BackendError, DataError, ModelError) as error:
        _log.warning("reduced precision is not tried: %s", error)
        return []
    for name in (*_coarser_lookups(known.backend), *names):
        try:
            choice = on_backend(library, name, progress=progress, pieces=pieces)
            if isinstance(choice, CostedLibrary) and choice.answers is not None:
                found.append(choice)
        except (BackendError, DataError, ModelError) as error:
            _log.warning("backend %s is not tried: %s", name, error)
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

    own = [] if _explored_counts(library, settings) else [library.manifest.profile.backend]
    if not tries_all(settings):
        return own
    checkable = _checkable(pieces)
    return [
        *own,
        *(
            name
            for name, kind in BACKENDS.items()
            if _automatic(library, kind) and kind.same_network_as is None and (checkable or _float32(name))
        ),
    ]


def tries_all(settings: Settings) -> bool:
    """Whether backends are compared; `explore` alone measures overlapped lookups, on its own backend."""
    return settings.backend == "auto" and settings.objective == "exact" and settings.placement != "overlapped"


def _automatic(library: Library, kind: type[Backend]) -> bool:
    """Whether "auto" tries backends of that kind on the library's device."""
    return library.manifest.profile.device.partition(":")[0] in kind.automatic and kind.installed()


def _tries_reduced_precisions(library: Library, settings: Settings) -> bool:
    from gati.engine.backends import BACKENDS

    kinds = (kind for name, kind in BACKENDS.items() if not _float32(name))
    return tries_all(settings) and any(_automatic(library, kind) for kind in kinds)


def _coarser_lookups(chosen: str) -> list[str]:
    """Backends that run the same network as `chosen`, but lookups in reduced precision."""
    from gati.engine.backends import BACKENDS

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
