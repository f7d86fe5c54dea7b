"""Latency of the plain network on each backend: a short comparison finds those worth measuring in full.

The backends take turns, a few requests at a time, so that a slow phase of the machine affects all of them and
each has its weights in the processor's caches. The result is stored as `networks.json` next to the costs, see
`gati.composition.cost_files`. A backend that cannot run the network is left out, and not tried again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gati.composition.cost_files import costs_path, is_valid_here, kept_costs, kept_paths
from gati.composition.costs import FEW_INPUTS, on_backend, to_measure
from gati.composition.pieces import Pieces
from gati.costs.hardware import conditions_here
from gati.documents import DocumentKind, values_of
from gati.errors import BackendError, DataError, LibraryError, ModelError
from gati.exploration.library import Library
from gati.types import Conditions

if TYPE_CHECKING:
    from gati.engine.backends import Graph

_log = logging.getLogger(__name__)

_NETWORKS = DocumentKind(1, LibraryError, "delete it, gati compose measures again")
_FILE = "networks"


@dataclass(kw_only=True)
class _Compared:
    """Milliseconds of the plain network by backend, and why others cannot run it."""

    base_ms: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    disturbed: bool = False

    def covers(self, names: set[str]) -> bool:
        return names <= self.base_ms.keys() | self.failed.keys()


def network_times(library: Library, backends: Iterable[str], pieces: Pieces) -> dict[str, float]:
    """Return the milliseconds that the base model takes for one request on each of `backends`.

    They are measured unless they are stored for this processor, number of threads and software. Backends that
    cannot run it are missing. If the model cannot be loaded, or the inputs to calibrate a backend are
    missing, only stored ones are returned. Raises LibraryError for a damaged file.
    """
    names, here = set(backends), conditions_here(library.manifest.profile.device)
    if not names:
        return {}
    kept = _read(library, here)
    if not kept.covers(names):
        costs = {name: kept_costs(library, name) for name in names}
        kept = _Compared(base_ms={name: each.profile.base_ms for name, each in costs.items() if each})
    if not kept.covers(names):
        path = costs_path(library, _FILE, here)
        try:
            kept = _compare(library, names, pieces, path)
        except (BackendError, DataError, ModelError) as error:
            _log.info("backends are not compared: %s", error)
        else:
            _NETWORKS.write(path, {**values_of(here), **values_of(kept)})
    for name in sorted(names & kept.failed.keys()):
        _log.info("backend %s is not compared: %s", name, kept.failed[name])
    return {name: base_ms for name, base_ms in kept.base_ms.items() if name in names}


def disturbed_comparison(library: Library) -> str:
    """Return a warning if other work on the machine disturbed the comparison, else an empty string."""
    here = conditions_here(library.manifest.profile.device)
    if not _read(library, here).disturbed:
        return ""
    path = kept_paths(library, _FILE, here)[0]
    return (
        "the backend may be the wrong one: other programs disturbed the comparison; to compare again, delete "
        f"{path}, then compose"
    )


def _compare(library: Library, names: Iterable[str], pieces: Pieces, path: Path) -> _Compared:
    """Measure the backends, those that compile graphs in turns; `path` is where the result will be."""
    from gati.composition.engines import graph_kind
    from gati.costs.graph import by_turns_ms

    found = _Compared()
    traced, _ = to_measure(library, pieces, offers_itself=True)
    graphs: dict[str, Graph] = {}
    for name in sorted(names):
        try:
            if graph_kind(name) is None:
                alone = on_backend(library, name, pieces=pieces, explored=False)
                found.base_ms[name] = alone.manifest.profile.base_ms
            else:
                graphs[name] = plain_graph(library, name, pieces)
        except ModelError as error:  # it cannot be converted; backends that convert nothing may run it
            found.failed[name] = str(error)
        except BackendError as error:
            _log.warning(
                "backend %s is not compared, now and from now on: %s; to try it again, delete %s, then "
                "compose",
                *(name, error, path),
            )
            found.failed[name] = str(error)
    notes: list[str] = []
    times_ms = by_turns_ms(list(graphs.values()), traced.example(), notes) if graphs else []
    found.base_ms |= dict(zip(graphs, times_ms, strict=True))
    found.disturbed = bool(notes)
    return found


def plain_graph(library: Library, name: str, pieces: Pieces) -> Graph:
    """Return the network without exits, compiled for torch's current number of threads.

    Raises BackendError if the backend cannot run it.
    """
    from gati.composition.engines import graph_backend
    from gati.engine.checks import prepared_on

    backend = graph_backend(library, name, pieces, calibrate_on=FEW_INPUTS)
    traced, kind = pieces.traced, library.manifest.outputs_kind
    with prepared_on(name):
        (model,) = backend.assembled(traced, [[]], kind, convert=pieces.convert, cuts=pieces.cuts)
        graph = backend.compile(model)
        graph.answer(traced.example())  # some fail only when they run
    return graph


def _read(library: Library, here: Conditions) -> _Compared:
    """What was measured under these conditions, also by an older Gati; nothing if nothing was."""
    for path in kept_paths(library, _FILE, here):
        if (found := _valid(path, library.manifest.profile.device)) is not None:
            return found
    return _Compared()


def _valid(path: Path, device: str) -> _Compared | None:
    raw = _NETWORKS.read(path)
    with _NETWORKS.reading(str(path)):
        found = _Compared(
            base_ms={str(name): float(base_ms) for name, base_ms in raw["base_ms"].items()},
            failed={str(name): str(reason) for name, reason in raw.get("failed", {}).items()},
            disturbed=bool(raw.get("disturbed", False)),
        )
        measured = Conditions(
            processor=str(raw.get("processor", "")),
            threads=int(raw["threads"]),
            software=str(raw.get("software", "")),
        )
    return found if is_valid_here(measured, device) else None
