"""Estimated latencies of lookups that were not measured, by their FLOPs relative to the base model's.

The estimate is deterministic, and in the units of the composition, whatever the backend.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from gati.caches import build_predictor, is_companion
from gati.composition.candidates import least_penalty_ms
from gati.composition.composition import Composition
from gati.composition.load import Served
from gati.composition.replay import exit_costs
from gati.costs.least import Arithmetic

_CALL_SHARE = 0.02  # fixed overhead of a lookup, as a share of the base model's time


class LookupCosts:
    """Milliseconds of lookups after blocks of the base model of `served`."""

    def __init__(self, served: Served) -> None:
        traced = served.engine.traced
        self._traced = traced
        self._base_ms = served.composition.expected.base_latency_ms
        self._arithmetic = Arithmetic(traced)

    def of(self, network: nn.Module, block: str) -> float:
        """Latency of a predictor or cache at that block, in ms."""
        return self._base_ms * (_CALL_SHARE + self._arithmetic.share(network, block))

    def of_variant(self, variant: str, block: str) -> float:
        """Latency of an untrained predictor of that variant, in ms."""
        shape, classes = self._traced.hidden_shapes[block], self._traced.classes
        with torch.random.fork_rng(devices=[]):
            return self.of(build_predictor(variant, shape, classes).eval(), block)

    def corrected(self, served: Served) -> Served:
        """A copy whose composition charges lookups, and the segments before them, at least the estimate.

        The time to reach a block is a share of the base model's, taken from the library's profile. Companions
        cost what was measured: the network itself in 8-bit integers has all its FLOPs, and half of its time.
        """
        profile = served.library.manifest.profile
        reach_ms = {each.name: self._base_ms * each.reach_ms / profile.base_ms for each in profile.blocks}
        chosen = served.composition.exits
        exits, added_ms, paid_ms = [], 0.0, 0.0  # by the misses before: by how much more, and in all
        for described, cost, leaving in zip(chosen, exit_costs(chosen), served.engine.exits, strict=True):
            lookup_ms = described.lookup_ms
            if not is_companion(described.variant):
                lookup_ms = max(lookup_ms, self.of(leaving.cache, leaving.block))
            more_ms = lookup_ms - described.lookup_ms
            exit_ms = max(
                described.exit_ms + added_ms + more_ms, reach_ms[leaving.block] + paid_ms + lookup_ms
            )
            more_ms = least_penalty_ms(more_ms, described.placement)
            penalty_ms = cost.penalty_ms + more_ms
            added_ms, paid_ms = added_ms + more_ms, paid_ms + penalty_ms
            exits.append(replace(described, lookup_ms=lookup_ms, penalty_ms=penalty_ms, exit_ms=exit_ms))
        composition: Composition = replace(served.composition, exits=tuple(exits))
        return replace(served, composition=composition)
