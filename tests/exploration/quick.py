"""Less training of what a test does not ask about."""

from __future__ import annotations

from functools import partial

import pytest

from gati.caches import fit_selector_networks

__all__ = ["quick_selectors"]


def quick_selectors(patch: pytest.MonkeyPatch) -> None:
    """Networks that score answers learn for fewer steps: they take as long as the caches of a test do."""
    patch.setattr("gati.exploration.measure.fit_selector_networks", partial(fit_selector_networks, steps=40))
