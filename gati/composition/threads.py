"""How many threads run the network: a small one is often faster on a few of many cores than on all.

The plain network is timed with 1, 2, 4 and so on up to all cores, in turns, on each float32 engine that may
be chosen. Everything else is then measured with the number that is fastest for it, so the network that Gati
is compared with has no better one. The times are stored next to the costs, see `gati.composition.cost_files`.
The composition records the number, and `gati.load` uses it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gati.composition.backends import backends_to_time
from gati.composition.composition import Composition
from gati.composition.cost_files import costs_path
from gati.composition.costs import to_measure
from gati.composition.networks import plain_graph
from gati.composition.pieces import Pieces
from gati.composition.plans import Settings
from gati.cores import core_count, threads_are_given
from gati.costs.hardware import conditions_here, processor_name
from gati.documents import DocumentKind, values_of
from gati.errors import BackendError, LibraryError
from gati.exploration.library import Library
from gati.types import Conditions

if TYPE_CHECKING:
    from gati.engine.backends import Graph

_log = logging.getLogger(__name__)
_THREADS = DocumentKind(1, LibraryError, "delete it, gati compose measures again")
_AS_FAST = 1.02  # within this factor of the least time, which is noise, fewer threads are as good


@dataclass(frozen=True)
class _Timed:
    """Milliseconds of the plain network by backend and number of threads."""

    base_ms: dict[str, dict[str, float]] = field(default_factory=dict)


def using_threads(count: int | None) -> AbstractContextManager[None]:
    """As `on_threads` of the engine; None means `on_granted_threads`."""
    from gati.engine.threads import on_granted_threads, on_threads

    return on_granted_threads() if count is None else on_threads(count)


def as_measured(measured_on: Conditions | None, device: str) -> int | None:
    """The number of threads that latencies were measured with, if it may be reached here.

    None if that is not known or was on another processor, if fewer cores are usable, on a GPU, and if
    OMP_NUM_THREADS names a number for the whole process.
    """
    if measured_on is None or not device.startswith("cpu") or threads_are_given():
        return None
    if measured_on.processor != processor_name(device):
        return None
    return measured_on.threads if 0 < measured_on.threads <= core_count() else None


def as_recorded(library: Library, measured_on: Conditions | None = None) -> int | None:
    """As `as_measured`, for a composition of this library; without one, what `explore` measured with.

    A processor that was not recorded, by an older Gati, counts as this one.
    """
    profile = library.manifest.profile
    known = measured_on or profile.conditions
    if not known.processor:
        known = replace(known, processor=processor_name(profile.device))
    return as_measured(known, profile.device)


def lacking_cores(composition: Composition, device: str, part: int | None = None) -> str:
    """A warning if overlapped lookups get fewer cores here than they were measured with, else empty.

    Also if they leave the network none of a process's `part` of the cores. A single core serves both.
    """
    from gati.engine.cores import most_lookup_cores

    wanted = composition.lookup_cores
    if not device.startswith("cpu") or wanted == 1:
        return ""
    what = (
        f"overlapped lookups of composition '{composition.name}' were measured on {wanted} cores of their own"
    )
    if wanted > (most := most_lookup_cores()):
        return (
            f"{what}, but have {most} here: its latencies will differ from those expected; make more cores "
            "usable, or compose with placement inline"
        )
    if part is not None and wanted >= part:
        return (
            f"{what} and take as many here, though this process should use {part} in all: give the model "
            "more threads, or compose with placement inline"
        )
    return ""


def wanted_threads(library: Library, settings: Settings, pieces: Pieces) -> int | None:
    """Return the number of threads to measure with; None for the current one. Raises as `fastest_number`.

    Unless another number is asked for, it is that of `explore`, so that its latencies can be compared with
    those that are measured now. The published objectives measure nothing on the backend of `explore`.
    """
    if settings.threads == "auto":
        return fastest_number(library, backends_to_time(library, settings), pieces)
    measures = settings.backend not in ("auto", library.manifest.profile.backend)
    if settings.threads is None and (settings.objective == "exact" or measures):
        return as_recorded(library)
    return settings.threads


def fastest_number(library: Library, backends: Sequence[str], pieces: Pieces) -> int:
    """Return the number of threads with which the plain network takes the least time on any of `backends`.

    Of numbers that take about the same time it is the lowest. On a GPU it is that of `granted_threads`:
    threads of the CPU do not run the network. Raises BackendError if no backend runs the network, and as
    `load_model`.
    """
    from gati.engine.threads import granted_threads

    if library.manifest.profile.device != "cpu":
        return granted_threads()
    path = costs_path(library, "threads", replace(conditions_here("cpu"), threads=0))
    timed = before = _read(path)
    notes: list[str] = []
    numbers = [str(count) for count in numbers_to_try(core_count())]
    for name in backends:
        if not timed.base_ms.get(name, {}).keys() >= set(numbers):  # or only on other cores
            try:
                found = _times(library, name, pieces, notes)
            except BackendError as error:
                _log.info("backend %s is not timed: %s", name, error)
                continue
            timed = _Timed({**timed.base_ms, name: {str(count): found[count] for count in found}})
    if notes:
        _log.warning("the number of threads may be wrong, and will be timed again: %s", notes[0])
    elif timed != before:
        _THREADS.write(path, {**values_of(conditions_here("cpu")), **values_of(timed)})
    known = (timed.base_ms.get(name, {}) for name in backends)
    every = [{count: each[count] for count in numbers} for each in known if each.keys() >= set(numbers)]
    if not every:
        raise BackendError(
            f"no number of threads can be chosen on {', '.join(backends)}; give a number instead of auto"
        )
    fastest = min(every, key=lambda by_count: min(by_count.values()))
    return fewest_as_fast({int(count): base_ms for count, base_ms in fastest.items()})


def fewest_as_fast(base_ms: dict[int, float]) -> int:
    """Return the lowest number of threads whose time is about the least."""
    limit_ms = _AS_FAST * min(base_ms.values())
    return min(count for count, taken_ms in base_ms.items() if taken_ms <= limit_ms)


def numbers_to_try(cores: int) -> list[int]:
    """Return 1, 2, 4 and so on below the number of cores, and that number."""
    return [*(1 << power for power in range((cores - 1).bit_length())), cores]


def _times(library: Library, backend: str, pieces: Pieces, notes: list[str]) -> dict[int, float]:
    """Milliseconds of the plain network on a backend, by number of threads; `notes` as for `by_turns_ms`."""
    from gati.costs.graph import by_turns_ms

    numbers, graphs = numbers_to_try(core_count()), []
    to_measure(library, pieces, offers_itself=True)  # cut now as it will be for all graphs, to share pieces
    make = _maker(library, backend, pieces)
    for count in numbers:
        with using_threads(count):
            graphs.append(make(count))
    with using_threads(numbers[-1]):  # restored in the end: an eager network changes it with each call
        times_ms = by_turns_ms(graphs, pieces.traced.example(), notes)
    return dict(zip(numbers, times_ms, strict=True))


def _maker(library: Library, backend: str, pieces: Pieces) -> Callable[[int], Graph]:
    """A function that makes the plain network for a number of threads, inside `using_threads`."""
    from gati.composition.engines import graph_kind
    from gati.engine.backends import get_backend
    from gati.engine.backends.torch import EagerNetwork

    get_backend(backend)  # fails for one that is unknown or not installed
    if graph_kind(backend) is not None:
        return lambda count: plain_graph(library, backend, pieces)
    if backend == "torch":
        return lambda count: EagerNetwork(pieces.traced, count)
    raise BackendError(f"the number of threads is not chosen for backend '{backend}'; give a number")


def _read(path: Path) -> _Timed:
    return _THREADS.record(_Timed, _THREADS.read(path), str(path)) if path.is_file() else _Timed()
