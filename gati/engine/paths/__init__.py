"""The paths of a request through network and lookups: one graph, segments in turn, or overlapped lookups."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gati.engine.backends import GraphBackend, get_backend, segment_backend
from gati.engine.checks import check_placement, prepared_on
from gati.engine.exits import EngineExit
from gati.engine.paths.base import RequestPath
from gati.engine.paths.graph import GraphPath
from gati.engine.paths.overlapped import OverlappedPath
from gati.engine.paths.replayed import ReplayedPath
from gati.engine.paths.segments import SegmentsPath, finest_pieces, made_ready
from gati.model.segments import TracedModel
from gati.types import OutputsKind

__all__ = ["RequestPath", "path_for"]


def path_for(
    backend: str,
    traced: TracedModel,
    exits: Sequence[EngineExit],
    outputs_kind: OutputsKind,
    graphs: tuple[Path, Path] | None,
    threads: int,
    lookup_cores: int,
) -> RequestPath:
    """Return the path of requests on a backend; `exits` in forward order, the rest as for `Engine`.

    Raises BackendError for an unknown backend, an unsupported placement or a network that the backend cannot
    run, and LibraryError for a lookup that does not fit its block.
    """
    for leaving in exits:
        check_placement(leaving, backend)
    with prepared_on(backend):
        executes = get_backend(backend)
        if isinstance(executes, GraphBackend):
            return GraphPath(executes, traced, exits, outputs_kind, graphs, threads)
        executes = segment_backend(backend)
        ready = made_ready(executes, traced, exits, outputs_kind)
        overlapped = any(leaving.placement == "overlapped" for leaving in exits)
        pieces = finest_pieces(executes, traced, exits) if overlapped else ready.segments
        if single := ReplayedPath.single(executes, traced, pieces, exits, ready.stages):
            return ReplayedPath(ready, single, exits)
        if overlapped:
            return OverlappedPath(ready, traced.device, pieces, exits, lookup_cores)
        return SegmentsPath(ready)
