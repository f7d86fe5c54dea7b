"""Lower bounds on the cost of network and lookups, whatever was measured.

On a busy machine the difference of two medians may come out as anything, 0 included. An exit that costs
nothing would be chosen wherever it is offered, and its gain expected in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gati.costs.graph import GraphCosts
from gati.model.segments import TracedModel
from gati.types import Profile

# A lookup has a few large layers where a network has many small ones, so it may take a smaller share of the
# time than of the arithmetic: from 0.7 of it on, as measured layer by layer.
_SHARE_OF_ARITHMETIC = 0.5
_CALL_MS = 0.005  # the decision and a handful of layers, however small: measured from 0.02 on
# Another engine distributes its time differently over the network: from 0.6 of the known share, as measured.
_SHARE_OF_WAY = 0.5


class Arithmetic:
    """How much lookups compute, as a share of what the base network does."""

    def __init__(self, traced: TracedModel) -> None:
        self._traced = traced
        self.base = max(_operations(traced.base, traced.example()[:1]), 1)  # of the network, for one input

    def share(self, lookup: nn.Module, block: str) -> float:
        """Of a predictor or cache after that block, for one input."""
        shape, device = self._traced.hidden_shapes[block], self._traced.device
        return _operations(lookup, torch.zeros(1, *shape, device=device)) / self.base


def at_least(
    costs: GraphCosts, known: Profile, traced: TracedModel, caches: Mapping[str, tuple[str, nn.Module]]
) -> GraphCosts:
    """Return `costs` with nothing below what it must be; `known` and `caches` as they were measured with.

    A lookup takes half the share of time that it has of the arithmetic, and a moment for the call. The way
    to a block takes half the share that it has in `known`, and no less than that to the block before.
    """
    arithmetic = Arithmetic(traced)
    base_ms = costs.profile.base_ms
    lookup_ms = dict(costs.lookup_ms)
    for key, (block, cache) in caches.items():
        share = arithmetic.share(cache.to(traced.device).eval(), block)
        lookup_ms[key] = max(lookup_ms[key], _CALL_MS + _SHARE_OF_ARITHMETIC * share * base_ms)
    least_ms = {each.index: _SHARE_OF_WAY * base_ms * each.reach_ms / known.base_ms for each in known.blocks}
    blocks = costs.profile.blocks
    reach_ms = list(accumulate((max(each.reach_ms, least_ms[each.index]) for each in blocks), max))
    own_ms = [there - before for before, there in pairwise([0.0, *reach_ms])]
    bounded = tuple(
        replace(each, latency_ms=own, reach_ms=there)
        for each, own, there in zip(blocks, own_ms, reach_ms, strict=True)
    )
    return GraphCosts(replace(costs.profile, blocks=bounded), costs.if_ms, lookup_ms)


@torch.no_grad()
def _operations(network: Callable[[Tensor], object], x: Tensor) -> int:
    """Multiplications and additions of one call."""
    with FlopCounterMode(display=False) as counter:
        network(x.clone())
    return int(counter.get_total_flops())
