"""Less training of what a test does not ask about."""

from __future__ import annotations

from functools import partial

import pytest

from gati.caches import fit_selector_networks
from gati.exploration import candidates, stages

__all__ = ["few_steps", "quick_selectors"]


def quick_selectors(patch: pytest.MonkeyPatch) -> None:
    """Networks that score answers learn for fewer steps: they take as long as the caches of a test do."""
    patch.setattr("gati.exploration.measure.fit_selector_networks", partial(fit_selector_networks, steps=10))


def few_steps(patch: pytest.MonkeyPatch) -> None:
    """All variants that are named are trained, for at least 40 steps; selectors are quick, too."""
    patch.setattr(candidates, "too_slow", lambda *_: "")
    patch.setattr(stages, "LEAST_EXIT_STEPS", 40)
    patch.setattr(stages, "LEAST_STUDENT_STEPS", 40)
    quick_selectors(patch)
