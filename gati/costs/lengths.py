"""Costs of a network for sequences: the mean over the lengths of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from gati.costs.graph import GraphCosts
from gati.costs.profile import InTurns, measure_in_turns, measure_profile
from gati.model.lengths import at_lengths
from gati.model.segments import TracedModel
from gati.types import Profile


def profile_at_lengths(traced: TracedModel) -> Profile:
    """Return the mean profile over inputs, from the lengths that take a significant part of the time."""
    return mean_profile([(share, measure_profile(each)) for share, each in at_lengths(traced)], traced)


def mean_profile(parts: Sequence[tuple[float, Profile]], traced: TracedModel) -> Profile:
    """Return the mean of one network's profiles, weighted by share; output shapes are those of `traced`."""
    first = parts[0][1]
    blocks = tuple(
        replace(
            block,
            output_shape=traced.hidden_shapes[block.name],
            latency_ms=sum(share * each.blocks[place].latency_ms for share, each in parts),
            reach_ms=sum(share * each.blocks[place].reach_ms for share, each in parts),
        )
        for place, block in enumerate(first.blocks)
    )
    notes = [each.disturbance for _, each in parts if each.disturbance]
    return replace(
        first,
        base_ms=sum(share * each.base_ms for share, each in parts),
        blocks=blocks,
        disturbance=notes[0] if notes else "",
    )


def mean_costs(parts: Sequence[tuple[float, GraphCosts]], traced: TracedModel) -> GraphCosts:
    """Return the mean of one network's costs, weighted by share."""
    profile = mean_profile([(share, costs.profile) for share, costs in parts], traced)
    if_ms = sum(share * costs.if_ms for share, costs in parts)
    names = parts[0][1].lookup_ms
    lookup_ms = {name: sum(share * costs.lookup_ms[name] for share, costs in parts) for name in names}
    return GraphCosts(profile, if_ms, lookup_ms)


def lookup_at_lengths(
    traced: TracedModel,
    cache: nn.Module,
    hidden: Callable[[TracedModel], Tensor],
    base_ms: float,
    notes: list[str] | None = None,
) -> float:
    """Return the mean milliseconds of a lookup over inputs, as `of_base`.

    `hidden` returns what `cache` reads, [1, ...], of the network at one length. `notes` is as for
    `measure_in_turns`.
    """
    parts = []
    for share, each in at_lengths(traced):
        run = partial(_whole, each)
        parts.append((share, measure_in_turns(cache, hidden(each), run, notes=notes)))
    return of_base(base_ms, parts)


def _whole(traced: TracedModel) -> Tensor:
    """Run the whole network once."""
    found: Tensor = traced.base(traced.example())
    return found


def of_base(base_ms: float, parts: Sequence[tuple[float, InTurns]]) -> float:
    """Return the mean milliseconds of a lookup, from its share of the base model's time, which is `base_ms`.

    `parts` are its measurements, each with its share of the inputs. Other work on the machine slows the base
    model and a lookup that takes turns with it alike, so their ratio stays.
    """
    lookup_ms = sum(share * turns.lookup_ms for share, turns in parts)
    return base_ms * lookup_ms / sum(share * turns.base_ms for share, turns in parts)
