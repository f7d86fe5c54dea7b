"""The network, caches and inputs of a library, shared by the backends that `compose` tries."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from gati.exploration.library import Library
from gati.types import TrialId

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gati.caches import LearnedCache
    from gati.engine.graph.convert import Converter
    from gati.model.segments import TracedModel
    from gati.model.sequence import Data


class Pieces:
    """A library's network, caches and held-out inputs, loaded on first use and converted once.

    Every graph is cut after the blocks in `cuts`, to which callers may add, so that graphs share pieces.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._caches: dict[TrialId, LearnedCache] = {}
        self.cuts: set[str] = set()

    @cached_property
    def traced(self) -> TracedModel:
        """The network, ready to be cut, on the CPU. Raises as `traced_network`."""
        from gati.exploration.network import traced_network

        return traced_network(self._library)

    @cached_property
    def held_out(self) -> tuple[Data, NDArray[np.uint8]]:
        """The held-out inputs and their split. Raises as `gati.exploration.splits.held_out`."""
        from gati.exploration.splits import held_out

        return held_out(self._library)

    @cached_property
    def convert(self) -> Converter:
        """The converter, which keeps what it has converted."""
        from gati.engine.graph.convert import Converter

        return Converter()

    def cache(self, trial_id: TrialId) -> LearnedCache:
        """The cache of a trial. Raises as `load_cache`."""
        from gati.caches import load_cache

        if trial_id not in self._caches:
            self._caches[trial_id] = load_cache(self._library.cache_path(trial_id))
        return self._caches[trial_id]
