"""Settings between those of a path, so that a walk ends closer to the target.

They have the same exits, with thresholds in between. If the engine itself answers, each setting takes seconds
to minutes, so a path has few settings, and the walk often ends far from what could be certified. Settings
between two neighbours with the same exits are cheap:

- `EngineAnswers` runs only the inputs that leave at different exits in the two neighbours. When thresholds
  fall, an input leaves at the same exit or an earlier one, so all other inputs keep the common answer.
- A walk may skip settings that are certain to pass. With one exit, an input that a setting in between answers
  wrongly is answered wrongly by one of the neighbours; with several exits, it may also leave at an exit
  between those of the neighbours. If the test passes even with all of these inputs counted as wrong, so does
  each setting in between, and the walk ends as if it had counted them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gati.composition.exact import SEARCH, ExactChoice
from gati.composition.instance import Chosen, Instance
from gati.composition.replay import Replay

MOST = 8  # settings between two neighbours


def refined(instance: Instance, path: Sequence[ExactChoice]) -> tuple[list[ExactChoice], tuple[int, ...]]:
    """The path with settings in between, each faster than the previous one, and the positions of its own."""
    fine: list[ExactChoice] = []
    own: list[int] = []
    for choice in path:
        if fine:
            fine += _between(instance, fine[-1], choice)
        own.append(len(fine))
        fine.append(choice)
    return fine, tuple(own)


def wrong_in_between(strict: Replay, loose: Replay) -> NDArray[np.bool_]:
    """Whether a setting between two neighbours might answer each input [n] wrongly."""
    passed_over = strict.left_at - loose.left_at > 1
    wrong: NDArray[np.bool_] = strict.wrong | loose.wrong | passed_over
    return wrong


def _between(instance: Instance, strict: ExactChoice, loose: ExactChoice) -> list[ExactChoice]:
    pairs = list(zip(strict.chosen, loose.chosen, strict=False))
    alike = len(strict.chosen) == len(loose.chosen) and all(a[0] == b[0] and a[1] <= b[1] for a, b in pairs)
    if not pairs or not alike:
        return []
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
