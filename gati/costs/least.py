"""Lower bounds on the cost of network and lookups, regardless of what was measured.

On a busy machine the difference of two medians can have any value, even 0. An exit that seems to cost nothing
would be chosen at every block, and its expected gain would not materialise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gati.costs.graph import GraphCosts
from gati.model.segments import TracedModel
from gati.types import Profile

# A lookup has a few large layers, a network many small ones, so a lookup's share of the time may be smaller
# than its share of the FLOPs. The smallest measured was 0.7 times that share on compiled backends; in torch,
# where a small network's layers mostly cost their calls, 0.03 times: so explore has no such bound.
_SHARE_OF_ARITHMETIC = 0.5
_CALL_MS = 0.005  # for the decision and a few layers of any size; the smallest measured was 0.02
# Another backend distributes its time differently over the network. The smallest measured was 0.6 of the
# known share.
_SHARE_OF_WAY = 0.5

_Shape = Sequence[int]


class Arithmetic:
    """FLOPs of lookups as a share of the base model's."""

    def __init__(self, traced: TracedModel) -> None:
        self._traced = traced
        self.base = max(_operations(traced.base, traced.example()), 1)  # FLOPs for one input

    def share(self, lookup: nn.Module, block: str) -> float:
        """Return a lookup's FLOPs after `block` as a share of the base model's, for one input."""
        shape, device = self._traced.hidden_shapes[block], self._traced.device
        return _operations(lookup, torch.zeros(1, *shape, device=device)) / self.base


def at_least(
    costs: GraphCosts, known: Profile, traced: TracedModel, caches: Mapping[str, tuple[str, nn.Module]]
) -> GraphCosts:
    """Return `costs` raised to their lower bounds; `known` and `caches` are those used to measure them.

    A lookup's share of the time is at least half its share of the FLOPs, plus a constant for the call.
    The time to a block is at least half its share in `known`, and at least the time to the previous block.
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
    """Return the FLOPs of one call."""
    with FlopCounterMode(display=False, custom_mapping=_MORE_OPERATORS) as counter:
        network(x.clone())
    return int(counter.get_total_flops())


def _of_lstm(x: _Shape, weight: _Shape, recurrent: _Shape, *_: object, **__: object) -> int:
    """FLOPs of one layer and direction of an LSTM, from the shapes of its input and its weights."""
    return 2 * prod(x[:-1]) * (prod(weight) + prod(recurrent))


_MORE_OPERATORS = {torch.ops.aten.mkldnn_rnn_layer: _of_lstm}  # those that torch's counter does not know
