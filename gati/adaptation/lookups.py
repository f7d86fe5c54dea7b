"""Estimated costs of lookups that were not measured: by their arithmetic, against that of the base model.

An estimate, but the same one every time, and in the units of the composition, whatever the backend.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from gati.caches import build_predictor
from gati.composition.composition import Composition
from gati.composition.load import Served
from gati.costs.least import Arithmetic

_CALL_SHARE = 0.02  # of the base model's time: what a lookup costs besides its arithmetic


class LookupCosts:
    """Milliseconds of lookups after blocks of the base model of `served`."""

    def __init__(self, served: Served) -> None:
        traced = served.engine.traced
        self._traced = traced
        self._base_ms = served.composition.expected.base_latency_ms
        self._arithmetic = Arithmetic(traced)

    def of(self, network: nn.Module, block: str) -> float:
        """Of a predictor or cache at that block."""
        return self._base_ms * (_CALL_SHARE + self._arithmetic.share(network, block))

    def of_variant(self, variant: str, block: str) -> float:
        """Of a predictor of that kind, not trained yet."""
        shape, classes = self._traced.hidden_shapes[block], self._traced.classes
        with torch.random.fork_rng(devices=[]):
            return self.of(build_predictor(variant, shape, classes).eval(), block)

    def corrected(self, served: Served) -> Served:
        """The same with a composition in which lookups, and the way to them, cost at least as estimated.

        The way to a block is the share of the base model's time that the library's profile says.
        """
        profile = served.library.manifest.profile
        reach_ms = {each.name: self._base_ms * each.reach_ms / profile.base_ms for each in profile.blocks}
        exits, added_ms, paid_ms = [], 0.0, 0.0
        for described, leaving in zip(served.composition.exits, served.engine.exits, strict=True):
            lookup_ms = max(described.lookup_ms, self.of(leaving.cache, leaving.block))
            added_ms += lookup_ms - described.lookup_ms
            paid_ms += lookup_ms
            exit_ms = max(described.exit_ms + added_ms, reach_ms[leaving.block] + paid_ms)
            exits.append(replace(described, lookup_ms=lookup_ms, exit_ms=exit_ms))
        composition: Composition = replace(served.composition, exits=tuple(exits))
        return replace(served, composition=composition)
