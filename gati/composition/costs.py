"""Costs of the network and the lookups on a backend other than the one that `explore` measured.

They are measured once and stored in the library for this processor, number of threads and software, see
`gati.composition.cost_files`. Lookups of the same architecture and shape of hidden output cost the same, so a
few dozen measurements cover all trials.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from gati.composition.cost_files import (
    BackendCosts,
    costs_under,
    keep_costs,
    kept_costs,
    kept_paths,
    older_path,
)
from gati.composition.pieces import Pieces
from gati.costs.hardware import is_from_here, processor_name
from gati.errors import LibraryError
from gati.exploration.library import Library, Manifest
from gati.types import Conditions, Trial
from gati.variants import ITSELF

if TYPE_CHECKING:
    from collections.abc import Callable

    from gati.caches import LearnedCache
    from gati.composition.engines import EngineAnswers
    from gati.costs.graph import GraphCosts
    from gati.engine.backends import Backend
    from gati.model.segments import TracedModel

FEW_INPUTS = 8  # to calibrate a graph that is only timed; value ranges hardly affect its time


class CostedLibrary(Library):
    """A library with the latencies of another backend instead of those that `explore` measured."""

    def __init__(
        self, library: Library, costs: BackendCosts, pieces: Pieces | None = None, *, asks: bool = True
    ) -> None:
        super().__init__(library.directory)
        self._library, self._costs, self._pieces, self._asks = library, costs, pieces, asks

    @cached_property
    def manifest(self) -> Manifest:
        """As `Library.manifest`, with the profile of the other backend."""
        return replace(self._library.manifest, profile=self._costs.profile)

    @cached_property
    def trials(self) -> tuple[Trial, ...]:
        """As `Library.trials`, with the costs of lookups on the other backend."""
        shapes = {block.index: block.output_shape for block in self._costs.profile.blocks}
        return tuple(
            replace(
                trial,
                lookup_ms=self._costs.lookup_ms.get(_key(shapes[trial.block_index], trial.variant)),
                overlapped_lookup_ms=None,
                overlapped_penalty_ms=None,
            )
            for trial in self._library.trials
        )

    @cached_property
    def answers(self) -> EngineAnswers | None:
        """The engine's own answers, if its precision makes them differ from the tables; else None.

        Raises as `EngineAnswers`.
        """
        from gati.composition.engines import EngineAnswers
        from gati.engine.backends import get_backend

        name = self.manifest.profile.backend
        if not self._asks or get_backend(name).in_float32():
            return None
        return EngineAnswers(self, name, self._pieces or Pieces(self))

    def check_unchanged(self) -> None:
        """As `Library.check_unchanged`."""
        self._library.check_unchanged()

    def at_best(self) -> CostedLibrary:
        """The same library, under the assumption that the engine answers as in the tables of outcomes."""
        return CostedLibrary(self._library, self._costs, self._pieces, asks=False)


def disturbance(library: Library) -> str:
    """Return a warning if other work on the machine disturbed the latencies, else an empty string."""
    profile = library.manifest.profile
    if not profile.disturbance:
        return ""
    kept = kept_paths(library, profile.backend, profile.conditions)
    again = f"delete {kept[0]}, then compose" if kept else "explore again with another --out"
    return f"chosen by latencies that may be wrong: {profile.disturbance}; to measure again, {again}"


def other_processor(library: Library) -> str:
    """Return a warning if the latencies were measured on another processor, else an empty string."""
    profile = library.manifest.profile
    if is_from_here(profile):
        return ""
    here = processor_name(profile.device) or f"a machine without {profile.device}"
    return (
        f"chosen by latencies that were measured on another processor, {profile.processor}, not on {here}: "
        "explore again here, or, if the model can be loaded, give another --backend, whose latencies are "
        "measured here"
    )


def as_composed(library: Library, backend: str, measured_on: Conditions | None = None) -> Library:
    """Return the library with the latencies that a composition for `backend` was made with.

    `measured_on` is the composition's own; if that is not known, or they are gone, others of that backend are
    taken. Raises LibraryError if there are none.
    """
    own = library.manifest.profile
    if backend == own.backend and measured_on in (None, own.conditions):
        return library
    costs = costs_under(library, backend, measured_on)
    if costs is not None:
        return CostedLibrary(library, costs)
    if backend == own.backend:
        return library
    raise LibraryError(f"{older_path(library, backend)} is missing; run gati compose again")


def on_backend(
    library: Library,
    backend: str,
    *,
    progress: Callable[[int, int], None] | None = None,
    pieces: Pieces | None = None,
    explored: bool = True,
) -> Library:
    """Return the library with the latencies of `backend`, which are measured unless they are stored.

    With `explored`, those that `explore` measured count, whatever the number of threads is now.

    Stored ones must be of this processor, number of threads and software, or of a GPU that is not in this
    machine. Several calls can share `pieces`. Raises BackendError for a backend that is unknown or not
    installed, or that fails, and as `load_model`.
    """
    if explored and backend == library.manifest.profile.backend:
        return library
    from gati.engine.checks import prepared_on

    costs = kept_costs(library, backend)
    if costs is None:
        with prepared_on(backend):
            costs = measure(library, backend, progress, pieces)
        keep_costs(library, costs)
    return CostedLibrary(library, costs, pieces)


def measure(
    library: Library, backend: str, progress: Callable[[int, int], None] | None, pieces: Pieces | None = None
) -> BackendCosts:
    """Measure base model, blocks, the decision and every cache architecture on `backend`; no cost is zero."""
    from gati.composition.engines import graph_backend
    from gati.costs.graph import measure_graph
    from gati.costs.least import at_least
    from gati.costs.lengths import mean_costs
    from gati.costs.segments import measure_segments
    from gati.engine.backends import SegmentBackend, get_backend
    from gati.exploration.network import traced_network
    from gati.model.lengths import at_lengths

    profile, kind = library.manifest.profile, library.manifest.outputs_kind
    found = get_backend(backend)  # fails before a model is loaded
    pieces = pieces or Pieces(library)
    offers_itself = found.same_network_as is not None
    if isinstance(found, SegmentBackend):
        traced, caches = traced_network(library, found.devices), _one_of_each(library, pieces, offers_itself)

        def measured(each: TracedModel) -> GraphCosts:
            return measure_segments(each, profile, backend, caches, progress)
    else:
        executes = graph_backend(library, backend, pieces, calibrate_on=FEW_INPUTS)
        traced, caches = to_measure(library, pieces, offers_itself)
        network = _of_same_network(library, found, traced)

        def measured(each: TracedModel) -> GraphCosts:
            convert = pieces.convert if each is traced else None
            return measure_graph(
                each, profile, executes, kind, caches, progress,
                convert=convert, cuts=pieces.cuts, network=network,
            )  # fmt: skip

    # in reduced precision the answers depend on the length, so only one length is executed
    lengths = at_lengths(traced) if found.in_float32() else ((1.0, traced),)
    parts = [(share, at_least(measured(each), profile, each, caches)) for share, each in lengths]
    costs = mean_costs(parts, traced)
    return BackendCosts(costs.profile, costs.if_ms, costs.lookup_ms)


def _of_same_network(library: Library, backend: Backend, traced: TracedModel) -> GraphCosts | None:
    """What was measured here on the backend that runs the same network, if it runs the same length only."""
    from gati.costs.graph import GraphCosts
    from gati.model.lengths import at_lengths

    if backend.same_network_as is None or len(at_lengths(traced)) > 1:
        return None
    known = kept_costs(library, backend.same_network_as)
    if known is None or known.profile.disturbance:  # its note asks to measure again
        return None
    return GraphCosts(known.profile, known.if_ms, {})


def to_measure(
    library: Library, pieces: Pieces, offers_itself: bool
) -> tuple[TracedModel, dict[str, tuple[str, LearnedCache]]]:
    """Return the network, cut at all places to measure, and the caches to measure, each with its block.

    The network itself is among them only where its lookup is in another precision (`offers_itself`).
    """
    from gati.costs.graph import places_to_measure

    traced, caches = pieces.traced, _one_of_each(library, pieces, offers_itself)
    pieces.cuts.update(places_to_measure(library.manifest.profile, caches))
    return traced, caches


def _one_of_each(
    library: Library, pieces: Pieces, offers_itself: bool
) -> dict[str, tuple[str, LearnedCache]]:
    """One cache for each architecture and shape of hidden output, with its block."""
    shapes = {block.index: block.output_shape for block in library.manifest.blocks}
    trials_by_key: dict[str, list[Trial]] = {}
    for trial in library.trials:
        if trial.status == "trained" and (offers_itself or trial.variant != ITSELF):
            trials_by_key.setdefault(_key(shapes[trial.block_index], trial.variant), []).append(trial)
    middle = {key: trials[len(trials) // 2] for key, trials in trials_by_key.items()}
    return {key: (trial.block, pieces.cache(trial.trial_id)) for key, trial in middle.items()}


def _key(hidden_shape: tuple[int, ...], variant: str) -> str:
    return f"{'x'.join(map(str, hidden_shape))} {variant}"
