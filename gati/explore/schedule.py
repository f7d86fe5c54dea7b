"""What to train, and for how long: pure decisions, so that a reader can check them.

Training goes in two rounds. In the *screening* round every variant that could pay is trained shortly and
measured on held-out inputs. The *main* round trains anew, for long, the best variants at the blocks that
still have something to win. This spends the time where the composer will look (successive halving: Jamieson
and Talwalkar 2016).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gati.types import BlockProfile, Trial, TrialId

_LEAST_MAIN_STEPS = 420  # fewer teach a predictor little, however small the data
_DEEP = 4  # layers with weights
_LEAST_POTENTIAL = 0.3  # of the best block's

__all__ = ["Plan", "plan_training", "potential", "select_for_main_round", "too_slow"]


@dataclass(frozen=True)
class Plan:
    """Sizes of both rounds, in batches."""

    batch_size: int
    screening_steps: int
    main_steps: int
    main_blocks: int  # at most this many


def plan_training(training_inputs: int, *, epochs: float, batch_size: int = 128) -> Plan:
    """Turn `epochs` over the training inputs into steps of both rounds.

    Small sets are walked more often: a predictor needs a few hundred steps whatever the size of the data.
    """
    batch_size = max(8, min(batch_size, training_inputs // 8))
    steps_per_epoch = max(1, training_inputs // batch_size)
    main = max(round(epochs * steps_per_epoch), _LEAST_MAIN_STEPS)
    return Plan(
        batch_size,
        screening_steps=max(_LEAST_MAIN_STEPS // 7, round(main / 40)),
        main_steps=main,
        main_blocks=8,
    )


def too_slow(lookup_ms: float, block: BlockProfile, base_ms: float) -> str:
    """Why a lookup at this block cannot pay, or "" if it may.

    A hit saves what is left of the network; a lookup slower than that never does.
    """
    left_ms = base_ms - block.reach_ms
    if lookup_ms < left_ms:
        return ""
    return f"a lookup takes {lookup_ms:.3g} ms, the rest of the network {left_ms:.3g} ms"


def potential(hit_rate: float, trial: Trial, blocks: int, base_ms: float) -> float:
    """Share of a request that a cache with this hit rate saves on average, alone.

    The lookup's share of the base model's time is rounded up to whole tenths: measured times differ from
    run to run, and the same seed should choose the same trials again.
    """
    lookup_share = math.ceil(10 * (trial.lookup_ms or 0.0) / base_ms) / 10
    return hit_rate * max(0.0, 1 - (trial.block_index + 1) / blocks - lookup_share)


def select_for_main_round(
    screened: Sequence[Trial],
    hit_rates: Mapping[TrialId, float],
    weight_layers: Mapping[str, int],
    blocks: int,
    base_ms: float,
    limit: int,
) -> list[TrialId]:
    """The trials worth long training, in forward order.

    Of the blocks with something to save, `limit` are taken at even distances: neighbours are worth nearly the
    same, and the composer wants a choice along the network. At each of them train the best of the shallow
    variants and every deep one: deep predictors start slowly and end ahead, so a short screening would
    misjudge them. `weight_layers` counts layers with weights by variant.
    """
    worth = {
        trial.trial_id: potential(hit_rates[trial.trial_id], trial, blocks, base_ms) for trial in screened
    }
    best: dict[int, float] = {}
    for trial in screened:
        best[trial.block_index] = max(best.get(trial.block_index, 0.0), worth[trial.trial_id])
    floor = _LEAST_POTENTIAL * max(best.values(), default=0.0)
    eligible = sorted(index for index, value in best.items() if value >= floor)
    chosen: list[TrialId] = []
    for index in _evenly(eligible, limit):
        here = [trial for trial in screened if trial.block_index == index]
        deep = [trial for trial in here if weight_layers[trial.variant] >= _DEEP]
        shallow = [trial for trial in here if weight_layers[trial.variant] < _DEEP]
        if shallow:
            deep.append(max(shallow, key=lambda trial: (worth[trial.trial_id], -trial.parameters)))
        chosen += [trial.trial_id for trial in deep]
    return chosen


def _evenly(indices: Sequence[int], limit: int) -> list[int]:
    if len(indices) <= limit:
        return list(indices)
    step = (len(indices) - 1) / (limit - 1)
    return [indices[round(position * step)] for position in range(limit)]
