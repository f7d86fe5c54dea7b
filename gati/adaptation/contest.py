"""Choosing the caches to serve, from the serving ones, their retrained copies, and new ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gati.caches import LearnedCache
from gati.composition.composition import Composition, Exit
from gati.composition.contests import path_within
from gati.composition.instance import Chosen, Instance, make_instance
from gati.composition.load import Served
from gati.composition.replay import ExitCost, Replay, ReplayExit, exit_costs, replay
from gati.composition.risk import smoothed_loss
from gati.composition.search import search_frontier
from gati.engine.exits import EngineExit
from gati.types import Placement, TrialId

RISKS = (0.05, 0.15, 0.3, 0.5, 0.75, 1.0, 1.5)  # per setting, as shares of the tolerated disagreement
SHARES = (0.25, 0.5, 0.75)  # even stricter settings, as shares of the hits of the strictest of these
_AIMED_AT = 0.5  # risk of the setting to take if only one can be deployed


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a request: the whole network, and the way to each block."""

    base_ms: float
    reach_ms: Mapping[str, float]
    block_index: Mapping[str, int]


@dataclass(frozen=True)
class Contender:
    """A cache that could be deployed; score float32 [n] and class int64 [n], of held-out rows only.

    `penalty_ms` is what a miss costs: the lookup itself if it is inline. Scores on the rows to choose on come
    from selectors that have not seen the input.
    """

    trial_id: TrialId
    block: str
    cache: LearnedCache
    placement: Placement
    lookup_ms: float
    penalty_ms: float
    score: NDArray[np.float32]
    predicted: NDArray[np.int64]


def costs_of(served: Served) -> Costs:
    """The composition's costs of its own exits, interpolated for other blocks by the library's profile."""
    chosen, profile = served.composition, served.library.manifest.profile
    elsewhere = {block.name: block.reach_ms for block in profile.blocks}
    there, here = [0.0], [0.0]
    for leaving, cost in zip(chosen.exits, exit_costs(chosen.exits), strict=True):
        there.append(elsewhere[leaving.block])
        here.append(min(max(cost.reach_ms, here[-1]), chosen.expected.base_latency_ms))
    there.append(max(profile.base_ms, there[-1]))
    here.append(chosen.expected.base_latency_ms)
    reach = {name: float(np.interp(reach_ms, there, here)) for name, reach_ms in elsewhere.items()}
    return Costs(
        chosen.expected.base_latency_ms, reach, {block.name: block.index for block in profile.blocks}
    )


def replay_deployed(
    deployed: Sequence[EngineExit],
    contenders: Mapping[str, Contender],
    costs: Costs,
    base_class: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> Replay:
    """Replay the serving exits on those rows; `contenders` are the same caches by block, not retrained."""
    chosen = [(contenders[leaving.block], leaving.threshold) for leaving in deployed]
    return _replay(chosen, costs, base_class, rows)


@dataclass(frozen=True)
class Laid:
    """A setting: contenders with thresholds, and its replay on the rows it was laid on."""

    chosen: tuple[tuple[Contender, float], ...]
    replay: Replay


def lay(
    contenders: Sequence[Contender],
    costs: Costs,
    base_class: NDArray[np.int64],
    rows: NDArray[np.int64],
    *,
    accuracy: float,
    served: Composition,
) -> tuple[tuple[Laid, ...], int]:
    """Choose settings from strict to loose on those rows; also returns which to take if only one can be.

    As in `gati compose`, each is the fastest within its budget of risk. This proves nothing: the loosest
    settings are meant to be too loose, and later audits show how far to go. The list may be empty.
    """
    ordered = sorted(contenders, key=lambda each: costs.block_index[each.block])
    instance = _instance(ordered, costs, base_class, rows, served)
    budget = (1.0 - accuracy) * len(rows)
    if not instance.trials:
        return (), 0
    risky = replace(instance, loss=smoothed_loss(instance))
    path = [each.chosen for each in path_within(instance, budget, RISKS, frontier=search_frontier(risky))]
    if not path:
        return (), 0
    strict = _stricter(instance, path[0])
    aimed_at = _AIMED_AT * budget
    within = sum(risky.outcome(chosen).disagreements <= aimed_at for chosen in path)
    settings = []
    for chosen in (*strict, *path):
        setting = tuple((ordered[trial], instance.threshold(trial, cut)) for trial, cut in chosen)
        settings.append(Laid(setting, _replay(setting, costs, base_class, rows)))
    return tuple(settings), len(strict) + max(within, 1) - 1


def _stricter(instance: Instance, strictest: Chosen) -> list[Chosen]:
    """Settings to try before the strictest one of a path: the same exits with fewer hits each.

    With few inputs, often none is answered wrongly, and even the strictest setting has many hits.
    """
    found: list[Chosen] = []
    for share in SHARES:
        cuts = [(trial, _cut_within(instance, trial, int(share * cut))) for trial, cut in strictest]
        chosen = tuple((trial, cut) for trial, cut in cuts if cut)
        if chosen and chosen not in (*found[-1:], strictest):
            found.append(chosen)
    return found


def _cut_within(instance: Instance, trial: int, cut: int) -> int:
    """The largest cut of a trial that takes at most `cut` inputs."""
    allowed = np.flatnonzero(instance.may_cut[trial, :cut])
    return int(allowed[-1]) + 1 if len(allowed) else 0


def _instance(
    ordered: Sequence[Contender],
    costs: Costs,
    base_class: NDArray[np.int64],
    rows: NDArray[np.int64],
    served: Composition,
) -> Instance:
    shape = (len(ordered), len(rows))
    score = np.array([each.score[rows] for each in ordered], dtype=np.float32).reshape(shape)
    wrong = np.array([each.predicted[rows] != base_class[rows] for each in ordered], dtype=bool)
    return make_instance(
        block=[costs.block_index[each.block] for each in ordered],
        score=score,
        wrong=wrong.reshape(shape),
        reach_ms=[costs.reach_ms[each.block] for each in ordered],
        lookup_ms=[each.lookup_ms for each in ordered],
        penalty_ms=[each.penalty_ms for each in ordered],
        memory_bytes=[each.cache.memory_bytes for each in ordered],
        base_ms=costs.base_ms,
        memory_limit_bytes=served.memory_limit_bytes,
        one_lookup_at_a_time=served.placement == "overlapped",
    )


def _replay(
    chosen: Sequence[tuple[Contender, float]],
    costs: Costs,
    base_class: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> Replay:
    exits = [
        ReplayExit(
            each.score[rows],
            each.predicted[rows],
            threshold,
            ExitCost(costs.reach_ms[each.block], each.lookup_ms, each.penalty_ms),
        )
        for each, threshold in chosen
    ]
    return replay(exits, base_class[rows], costs.base_ms)


def exits_of(laid: Laid, costs: Costs) -> tuple[Exit, ...]:
    """A setting as exits of a composition."""
    replayed, count = laid.replay, len(laid.replay.wrong)
    return tuple(
        Exit(
            trial_id=each.trial_id,
            block=each.block,
            block_index=costs.block_index[each.block],
            variant=each.cache.variant,
            selector=each.cache.selector_name,
            threshold=threshold,
            placement=each.placement,
            expected_hit_rate=hits / count,
            expected_agreement=agreeing / hits if hits else 1.0,
            lookup_ms=each.lookup_ms,
            memory_bytes=each.cache.memory_bytes,
            exit_ms=exit_ms,
            penalty_ms=each.penalty_ms,
        )
        for (each, threshold), hits, agreeing, exit_ms in zip(
            laid.chosen, replayed.hits, replayed.agreeing, replayed.exit_ms, strict=True
        )
    )
