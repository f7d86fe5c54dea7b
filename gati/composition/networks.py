"""Latency of the plain network on each backend: a short comparison finds those worth measuring in full.

The backends take turns, a few requests at a time, so that a slow phase of the machine affects all of them and
each has its weights in the processor's caches. The result is stored as `profiles/networks.json`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from gati.composition.costs import FEW_INPUTS, kept_profile, on_backend, to_measure
from gati.composition.pieces import Pieces
from gati.costs.hardware import processor_name
from gati.documents import DocumentKind
from gati.errors import BackendError, DataError, LibraryError, ModelError
from gati.exploration.library import Library

if TYPE_CHECKING:
    from gati.engine.backends import Graph

_log = logging.getLogger(__name__)

_NETWORKS = DocumentKind(1, LibraryError, "delete it, gati compose measures again")


def network_times(library: Library, backends: Iterable[str], pieces: Pieces) -> dict[str, float]:
    """Return the milliseconds that the base model takes for one request on each of `backends`.

    They are measured unless they are stored for this processor and number of threads. If the model cannot be
    loaded, or the inputs to calibrate a backend are missing, only stored ones are returned. Raises
    LibraryError for a damaged file.
    """
    import torch

    names, threads = set(backends), torch.get_num_threads()
    processor = processor_name(library.manifest.profile.device)
    notes: list[str] = []
    kept = _read(library, threads, processor)
    if not names <= kept.keys():
        profiles = {name: kept_profile(library, name) for name in names}
        kept = {name: profile.base_ms for name, profile in profiles.items() if profile is not None}
    if not names <= kept.keys():
        try:
            kept = _compare(library, names, pieces, notes)
        except (BackendError, DataError, ModelError) as error:
            _log.info("backends are not compared: %s", error)
        else:
            values = {"threads": threads, "processor": processor, "base_ms": kept, "disturbed": bool(notes)}
            _NETWORKS.write(_path(library), values)
    return {name: base_ms for name, base_ms in kept.items() if name in names}


def _compare(library: Library, names: Iterable[str], pieces: Pieces, notes: list[str]) -> dict[str, float]:
    """Measure the backends in turns; `notes` gets a line if other work disturbed the measurement."""
    from gati.composition.engines import graph_backend, graph_kind
    from gati.costs.graph import by_turns_ms

    graph_names = [name for name in sorted(names) if graph_kind(name) is not None]
    others = [name for name in sorted(names) if name not in graph_names]
    alone_ms: dict[str, float] = {}
    for name in others:
        try:
            alone_ms[name] = on_backend(library, name, pieces=pieces).manifest.profile.base_ms
        except BackendError as error:  # it does not run this network; the others may
            _log.info("backend %s is not compared: %s", name, error)
    if not graph_names:
        return alone_ms
    traced, _ = to_measure(library, pieces, offers_itself=True)
    graphs: list[Graph] = []
    for name in graph_names:
        backend = graph_backend(library, name, pieces, calibrate_on=FEW_INPUTS)
        (model,) = backend.assembled(
            traced, [[]], library.manifest.outputs_kind, convert=pieces.convert, cuts=pieces.cuts
        )
        graphs.append(backend.compile(model))
    times_ms = by_turns_ms(graphs, traced.example(), notes)
    return alone_ms | dict(zip(graph_names, times_ms, strict=True))


def _read(library: Library, threads: int, processor: str) -> dict[str, float]:
    """The times measured on this processor with this number of threads; empty if there are none."""
    path = _path(library)
    if not path.is_file():
        return {}
    raw = _NETWORKS.read(path)
    with _NETWORKS.reading(str(path)):
        times = {str(name): float(base_ms) for name, base_ms in raw["base_ms"].items()}
        known = raw.get("processor", processor)  # an older Gati did not store it
        return times if int(raw["threads"]) == threads and known == processor else {}


def _path(library: Library) -> Path:
    return library.directory / "profiles" / "networks.json"
