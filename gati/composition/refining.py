"""Settings between those of a path, so that a walk ends closer to the target.

If the engine itself answers, each setting takes seconds to minutes, so a path has few settings, and the walk
often ends far from what could be certified. Between two neighbours with the same exits come settings with
thresholds in between. Where the exits change, the stricter neighbour's are first loosened: if the new ones
lose more than the select split shows, the walk otherwise ends at the strictest thresholds of the old ones.

Settings between two with the same exits are cheap:

- `EngineAnswers` runs only the inputs that leave at different exits in the two neighbours. When thresholds
  fall, an input leaves at the same exit or an earlier one, so all other inputs keep the common answer.
- A walk may skip settings that are certain to pass. With one exit, an input that a setting in between answers
  wrongly is answered wrongly by one of the neighbours; with several exits, it may also leave at an exit
  between those of the neighbours. If the test passes even with all of these inputs counted as wrong, so does
  each setting in between, and the walk ends as if it had counted them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gati.composition.exact import SEARCH, ExactChoice
from gati.composition.instance import Chosen, Instance
from gati.composition.replay import Replay
from gati.composition.risk import smoothed_loss
from gati.composition.search import improve_own

MOST = 8  # settings between two neighbours
LOOSENED = 0.5  # share of the added risk up to which old exits are loosened before new ones are tested


def refined(instance: Instance, path: Sequence[ExactChoice]) -> tuple[list[ExactChoice], tuple[int, ...]]:
    """The path with settings in between, each faster than the previous one.

    Returns also the positions of its main settings: between two of them only thresholds differ, or nothing
    is between them.
    """
    if not path:
        return [], ()
    risky = replace(instance, loss=smoothed_loss(instance)) if instance.trials else instance
    main = [path[0]]
    for choice in path[1:]:
        main += [*_loosened(instance, risky, main[-1], choice), choice]
    fine: list[ExactChoice] = []
    positions: list[int] = []
    for choice in main:
        if fine:
            fine += _between(instance, fine[-1], choice)
        positions.append(len(fine))
        fine.append(choice)
    return fine, tuple(positions)


def wrong_in_between(strict: Replay, loose: Replay) -> NDArray[np.bool_]:
    """Whether a setting between two neighbours might answer each input [n] wrongly."""
    passed_over = strict.left_at - loose.left_at > 1
    wrong: NDArray[np.bool_] = strict.wrong | loose.wrong | passed_over
    return wrong


def _exits(choice: ExactChoice) -> list[int]:
    return [trial for trial, _ in choice.chosen]


def _nested(strict: Chosen, loose: Chosen) -> bool:
    """Whether both have the same exits, and no threshold of `loose` is higher."""
    return len(strict) == len(loose) and all(
        a[0] == b[0] and a[1] <= b[1] for a, b in zip(strict, loose, strict=True)
    )


def _loosened(
    instance: Instance, risky: Instance, strict: ExactChoice, loose: ExactChoice
) -> list[ExactChoice]:
    """The exits of `strict`, loosened as far as pays at a part of the risk that `loose` adds; one or none."""
    if not strict.chosen or _exits(strict) == _exits(loose):
        return []
    at_strict, at_loose = (risky.outcome(each.chosen).disagreements for each in (strict, loose))
    budget = at_strict + LOOSENED * max(0.0, at_loose - at_strict)
    chosen = improve_own(risky, strict.chosen, budget, only_loosen=True)
    outcome = instance.outcome(chosen)
    faster = loose.outcome.mean_latency_ms < outcome.mean_latency_ms < strict.outcome.mean_latency_ms
    return [ExactChoice(chosen, outcome, 0.0, SEARCH)] if faster and _nested(strict.chosen, chosen) else []


def _between(instance: Instance, strict: ExactChoice, loose: ExactChoice) -> list[ExactChoice]:
    if not strict.chosen or not _nested(strict.chosen, loose.chosen):
        return []
    pairs = list(zip(strict.chosen, loose.chosen, strict=True))
    steps = min(MOST + 1, max(b[1] - a[1] for a, b in pairs))
    found: list[ExactChoice] = []
    fastest_ms = strict.outcome.mean_latency_ms
    for step in range(1, steps):
        chosen = _interpolated(instance, pairs, step / steps)
        outcome = instance.outcome(chosen)
        if loose.outcome.mean_latency_ms < outcome.mean_latency_ms < fastest_ms:
            found.append(ExactChoice(chosen, outcome, 0.0, SEARCH))
            fastest_ms = outcome.mean_latency_ms
    return found


def _interpolated(
    instance: Instance, pairs: Sequence[tuple[tuple[int, int], tuple[int, int]]], share: float
) -> Chosen:
    chosen = []
    for (trial, strict), (_, loose) in pairs:
        cut = strict + round(share * (loose - strict))
        while cut > strict and not instance.may_cut[trial, cut - 1]:  # not between equal scores
            cut -= 1
        chosen.append((trial, cut))
    return tuple(chosen)
