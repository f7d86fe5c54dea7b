"""Stricter settings of a composition answer fewer inputs, all of them as the composition does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gati.composition.composition import Composition, Exit, Expected
from gati.composition.replay import ReplayExit, exit_costs, replay
from gati.composition.walk import certify
from gati.engine.exits import EngineExit
from gati.errors import LibraryError
from gati.exploration.library import CERTIFY, SELECT, BaseOutcomes, TrialOutcomes
from gati.model.identity import CopyCounts
from gati.types import TrialId
from gati.versions.setting import Setting
from gati.versions.stricter import SHARES, stricter_settings

BASE_MS = 4.0


class Outcomes:
    """A library that has held-out outcomes and nothing else."""

    has_outcomes = True

    def __init__(self, random: np.random.Generator, trials: int, inputs: int) -> None:
        self.base = BaseOutcomes(
            random.integers(0, 3, inputs), None, random.choice([SELECT, CERTIFY], inputs).astype(np.uint8)
        )
        self.base.split[0] = SELECT
        self.trials = {
            TrialId(f"trial-{at}"): TrialOutcomes(
                # few values, so that many inputs share one
                np.round(random.random(inputs), int(random.integers(1, 4))).astype(np.float32),
                random.integers(0, 3, inputs),
            )
            for at in range(trials)
        }

    def base_outcomes(self) -> BaseOutcomes:
        return self.base

    def outcomes(self, trial_id: TrialId) -> TrialOutcomes:
        if trial_id not in self.trials:
            raise LibraryError(f"no outcomes of {trial_id}")
        return self.trials[trial_id]

    def copies(self) -> Any:
        return CopyCounts.once(len(self.base.base_class))


def served_by(library: Outcomes, thresholds: list[float]) -> Any:
    described = tuple(
        Exit(TrialId(f"trial-{at}"), f"blocks.{at}", at, "pool-linear(64)", "maximum-probability", threshold,
             "inline", 0.4, 0.9, 0.1, 1000, 0.5 + 0.8 * at)
        for at, threshold in enumerate(thresholds)
    )  # fmt: skip
    composition = Composition(
        name="default", objective="exact", solver="highs", gap=0.0, alpha=None, accuracy_target=0.95,
        confidence=0.95, memory_limit_bytes=None, backend="torch", placement="inline", exits=described,
        expected=Expected(1.0, BASE_MS, 4.0, 0.8, 0.99, 2000), certificate=certify([(20, 1000)], 0.95, 0.05),
        checkpoint_sha256="0" * 64, created="2026-01-01T00:00:00Z", graph_sha256="1" * 64,
    )  # fmt: skip
    exits = tuple(EngineExit(each.block, nn.Identity(), each.threshold) for each in described)
    return SimpleNamespace(composition=composition, engine=SimpleNamespace(exits=exits), library=library)


def answered(setting: Setting, library: Outcomes) -> tuple[np.ndarray, np.ndarray, Any]:
    """For all inputs, whether they leave early and whether they are answered wrongly; and the replay."""
    described = setting.composition.exits
    exits = [
        ReplayExit(each.score, each.predicted, leaving.threshold, cost)
        for leaving, cost in zip(described, exit_costs(described), strict=True)
        for each in (library.outcomes(leaving.trial_id),)
    ]
    replayed = replay(exits, library.base.base_class, BASE_MS)
    return replayed.left_at < len(exits), replayed.wrong, replayed


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.floats(0.05, 0.95), min_size=1, max_size=4))
def test_settings_are_nested_on_all_inputs(seed: int, thresholds: list[float]) -> None:
    """Also on those that nothing was chosen on: then a certificate of the last one covers them all."""
    library = Outcomes(np.random.default_rng(seed), len(thresholds), inputs=60)
    served = served_by(library, thresholds)
    found = stricter_settings(served)
    if not found:
        return
    assert found[-1] == Setting(served.composition, served.engine.exits)
    for strict, loose in zip(found, found[1:], strict=False):
        early, wrong, replayed = answered(strict, library)
        early_too, wrong_too, replayed_too = answered(loose, library)
        assert not (early & ~early_too).any() and not (wrong & ~wrong_too).any()
        assert (replayed.answer == replayed_too.answer)[early].all()
        described = [(leaving.block, leaving.threshold) for leaving in strict.composition.exits]
        assert described == [(leaving.block, leaving.threshold) for leaving in strict.exits]
        assert described != [(leaving.block, leaving.threshold) for leaving in loose.exits]
        assert strict.composition.certificate == served.composition.certificate


def test_each_exit_is_raised_in_steps_and_then_left_out() -> None:
    library = Outcomes(np.random.default_rng(0), 2, inputs=4000)
    for outcomes in library.trials.values():
        outcomes.score[:] = np.random.default_rng(1).random(4000)
    found = stricter_settings(served_by(library, [0.9, 0.2]))
    assert [len(each.exits) for each in found] == [1] * 4 + [2] * 4
    assert {each.composition.graph_sha256 for each in found[:-1]} == {None}, "their networks are others"
    rows = library.base.split == SELECT
    hits = [answered(each, library)[0][rows].mean() for each in found]
    assert hits[3] == pytest.approx(hits[7] - (hits[7] - hits[3]))
    behind = [(each - hits[3]) / (hits[7] - hits[3]) for each in hits[4:7]]
    assert behind == pytest.approx(sorted(SHARES), abs=0.01)
    for each in found[:-1]:
        expected, replayed = each.composition.expected, answered(each, library)[2]
        assert expected.base_latency_ms == BASE_MS
        assert expected.hit_rate == pytest.approx(replayed.hit_rate, abs=0.05)
        assert expected.mean_latency_ms == pytest.approx(replayed.mean_latency_ms, rel=0.05)


def test_without_outcomes_the_composition_alone_can_serve() -> None:
    library = Outcomes(np.random.default_rng(0), 1, inputs=40)
    assert stricter_settings(served_by(library, [])) == ()
    gone = served_by(library, [0.5])
    library.trials.clear()
    assert stricter_settings(gone) == ()
    library.has_outcomes = False
    assert stricter_settings(gone) == ()
