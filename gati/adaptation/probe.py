"""The answer of every setting of a version to an input, from one run through the network.

One run in plain PyTorch makes the lookups of all settings; each setting exits at the first score that reaches
its threshold. The serving engine may round differently: if a score or class is too close to call, the worse
outcome counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gati.caches.tokens import of_any_length
from gati.composition.composition import COARSE_LOOKUPS
from gati.composition.load import Served
from gati.engine.exits import BASE, EngineExit, Prediction, doubtful_class, doubtful_score, tie_tolerance
from gati.guard.auditor import Probed
from gati.model.lengths import TracedSequences
from gati.types import TrialId
from gati.versions.setting import Setting


def can_probe(served: Served) -> bool:
    """Whether lookups of the serving engine equal those of plain PyTorch, up to rounding."""
    engine, traced = served.engine, served.engine.traced
    exact = engine.precision == "f32" and not served.composition.backend.endswith(COARSE_LOOKUPS)
    # a probe runs sequences at the longest length, the engine at the shortest one that fits
    several = isinstance(traced, TracedSequences)
    alike = not several or all(of_any_length(leaving.variant) for leaving in engine.exits)
    return exact and alike and not traced.changes_itself


class Probe:
    """Runs all `settings` of a version on an input. Thread-safe."""

    def __init__(self, served: Served, settings: Sequence[Setting]) -> None:
        traced = served.engine.traced
        self._settings = settings
        self._lookups: dict[str, dict[TrialId, EngineExit]] = {}
        for setting in settings:
            for described, leaving in zip(setting.composition.exits, setting.exits, strict=True):
                self._lookups.setdefault(leaving.block, {}).setdefault(described.trial_id, leaving)
        self._blocks = [block for block in traced.blocks if block in self._lookups]
        self._segments = traced.cut(self._blocks)[:-1] if self._blocks else ()
        self._traced = traced
        self._tolerance = tie_tolerance(traced.device, traced.dtype)

    def __call__(self, x: Tensor, base: Prediction) -> list[Probed]:
        """The answer of each setting to `x` [1, ...]; `base` is the reference's."""
        with torch.inference_mode():
            looked = self._looked_up(x)
            return [self._answer(setting, looked, base) for setting in self._settings]

    def _looked_up(self, x: Tensor) -> dict[TrialId, tuple[Tensor, Tensor]]:
        found: dict[TrialId, tuple[Tensor, Tensor]] = {}
        carried: tuple[Tensor, ...] = (x.clone().to(self._traced.device),)
        for block, segment in zip(self._blocks, self._segments, strict=True):
            carried = segment.run(*carried)
            for trial_id, leaving in self._lookups[block].items():
                likely, score = leaving.cache(carried[0])
                found[trial_id] = likely.cpu(), score.cpu()
        return found

    def _answer(
        self, setting: Setting, looked: dict[TrialId, tuple[Tensor, Tensor]], base: Prediction
    ) -> Probed:
        doubtful = False  # whether the engine may exit earlier, with another class
        for described, leaving in zip(setting.composition.exits, setting.exits, strict=True):
            likely, score = looked[described.trial_id]
            index = int(likely[0].argmax())
            agrees = index == base.class_index and not bool(doubtful_class(likely, self._tolerance))
            if bool(doubtful_score(score, leaving.threshold, self._tolerance)):
                doubtful |= not agrees
            elif float(score) >= leaving.threshold:
                return Probed(index, leaving.block, agrees and not doubtful)
        return Probed(base.class_index, BASE, not doubtful)
