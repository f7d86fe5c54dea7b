"""Lower bounds on the cost of network and lookups, regardless of what was measured.

On a busy machine the difference of two medians can have any value, even 0. An exit that seems to cost nothing
would be chosen at every block, and its expected gain would not materialise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gati.costs.graph import GraphCosts
from gati.model.segments import TracedModel
from gati.types import Profile

# A lookup has a few large layers, a network many small ones, so a lookup's share of the time may be smaller
# than its share of the FLOPs. The smallest measured was 0.7 times that share.
_SHARE_OF_ARITHMETIC = 0.5
_CALL_MS = 0.005  # for the decision and a few layers of any size; the smallest measured was 0.02
# Another backend distributes its time differently over the network. The smallest measured was 0.6 of the
# known share.
_SHARE_OF_WAY = 0.5


class Arithmetic:
    """FLOPs of lookups as a share of the base model's."""

    def __init__(self, traced: TracedModel) -> None:
        self._traced = traced

    @cached_property
    def base(self) -> int:
        """FLOPs of the base model for one input, at least 1."""
        return max(_operations(self._traced.base, self._traced.example()), 1)

    def share(self, lookup: nn.Module, block: str) -> float:
        """Return a lookup's FLOPs after `block` as a share of the base model's, for one input."""
        shape, device = self._traced.hidden_shapes[block], self._traced.device
        return _operations(lookup, torch.zeros(1, *shape, device=device)) / self.base

    def least_ms(self, lookup: nn.Module, hidden: Tensor, base_ms: float) -> float:
        """Return the least milliseconds of a lookup of `hidden` [1, ...] if the base model takes `base_ms`.

        A lookup's share of the time is at least half its share of the FLOPs, plus a constant for the call.
        """
        return _CALL_MS + _SHARE_OF_ARITHMETIC * _operations(lookup, hidden) / self.base * base_ms


def at_least(
    costs: GraphCosts, known: Profile, traced: TracedModel, caches: Mapping[str, tuple[str, nn.Module]]
) -> GraphCosts:
    """Return `costs` raised to their lower bounds; `known` and `caches` are those used to measure them.

    That of a lookup is `Arithmetic.least_ms`. The time to a block is at least half its share in `known`, and
    at least the time to the previous block.
    """
    arithmetic = Arithmetic(traced)
    base_ms = costs.profile.base_ms
    lookup_ms = dict(costs.lookup_ms)
    for key, (block, cache) in caches.items():
        hidden = torch.zeros(1, *traced.hidden_shapes[block], device=traced.device)
        least_ms = arithmetic.least_ms(cache.to(traced.device).eval(), hidden, base_ms)
        lookup_ms[key] = max(lookup_ms[key], least_ms)
    way_ms = {each.index: _SHARE_OF_WAY * base_ms * each.reach_ms / known.base_ms for each in known.blocks}
    blocks = costs.profile.blocks
    reach_ms = list(accumulate((max(each.reach_ms, way_ms[each.index]) for each in blocks), max))
    own_ms = [there - before for before, there in pairwise([0.0, *reach_ms])]
    bounded = tuple(
        replace(each, latency_ms=own, reach_ms=there)
        for each, own, there in zip(blocks, own_ms, reach_ms, strict=True)
    )
    return GraphCosts(replace(costs.profile, blocks=bounded), costs.if_ms, lookup_ms)


@torch.no_grad()
def _operations(network: Callable[[Tensor], object], x: Tensor) -> int:
    """Return the FLOPs of one call."""
    with FlopCounterMode(display=False) as counter:
        network(x.clone())
    return int(counter.get_total_flops())
