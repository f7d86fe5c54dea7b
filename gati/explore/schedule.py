"""What to train, and for how long: pure decisions, so that a reader can check them.

Training goes in two rounds. In the *screening* round every variant that could pay is trained shortly and
measured on held-out inputs. The *main* round trains anew, for long, the best variant of each block that
still has something to win. This spends the time where the composer will look (successive halving: Jamieson
and Talwalkar 2016).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gati.types import BlockProfile, Trial, TrialId

__all__ = ["Plan", "plan_training", "potential", "select_for_main_round", "too_slow"]


@dataclass(frozen=True)
class Plan:
    """Sizes of both rounds, in batches."""

    batch_size: int
    screening_steps: int
    main_steps: int
    main_trials: int  # at most this many


def plan_training(training_inputs: int, *, epochs: float, batch_size: int = 128) -> Plan:
    """Turn `epochs` over the training inputs into steps of both rounds.

    Small sets are walked more often: a predictor needs some 1,500 steps whatever the size of the data.
    """
    batch_size = max(8, min(batch_size, training_inputs // 8))
    steps_per_epoch = max(1, training_inputs // batch_size)
    main = max(round(epochs * steps_per_epoch), 400)
    return Plan(batch_size, screening_steps=max(60, round(main / 25)), main_steps=main, main_trials=14)


def too_slow(lookup_ms: float, block: BlockProfile, base_ms: float) -> str:
    """Why a lookup at this block cannot pay, or "" if it may.

    A hit saves what is left of the network; a lookup slower than that never does.
    """
    left_ms = base_ms - block.reach_ms
    if lookup_ms < left_ms:
        return ""
    return f"a lookup takes {lookup_ms:.3g} ms, the rest of the network {left_ms:.3g} ms"


def potential(hit_rate: float, block_index: int, blocks: int) -> float:
    """Share of the network's blocks that a cache with this hit rate saves on average, alone."""
    return hit_rate * (1 - (block_index + 1) / blocks)


def select_for_main_round(
    screened: Sequence[Trial], hit_rates: Mapping[TrialId, float], blocks: int, limit: int
) -> list[TrialId]:
    """The trials worth long training: the best of each block, then the blocks with most to save.

    Decided by hit rates and depth, never by measured times, so that a seed gives the same choice twice.
    """
    best: dict[int, Trial] = {}
    for trial in screened:
        champion = best.get(trial.block_index)
        key = (hit_rates[trial.trial_id], -trial.parameters)
        if champion is None or key > (hit_rates[champion.trial_id], -champion.parameters):
            best[trial.block_index] = trial
    ranked = sorted(
        best.values(),
        key=lambda trial: (
            -potential(hit_rates[trial.trial_id], trial.block_index, blocks),
            trial.block_index,
        ),
    )
    kept = sorted(ranked[:limit], key=lambda trial: trial.block_index)
    return [trial.trial_id for trial in kept]
