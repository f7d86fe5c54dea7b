"""Why each exit is there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gati.compose.compose import compose
from gati.compose.explain import explain
from gati.errors import CompositionError
from gati.types import TrialId
from tests.compose.libraries import make_library


@pytest.mark.parametrize("outcomes", [True, False])
def test_each_exit_is_explained_by_what_would_be_lost_without_it(tmp_path, outcomes):
    library = make_library(tmp_path / "library", outcomes=outcomes, quality=6.0)
    composition = compose(library.directory, accuracy=0.95, objective="full")
    explanations = explain(composition, library)
    assert [explanation.exit for explanation in explanations] == list(composition.exits)
    for explanation in explanations:
        assert explanation.rivals == 1
        assert "of requests leave after" in explanation.sentence
        assert "chosen from 2 variants there" in explanation.sentence


def test_every_exit_of_an_exact_composition_saves_time(tmp_path):
    library = make_library(tmp_path / "library", quality=6.0)
    composition = compose(library.directory, accuracy=0.95, confidence=None)
    for explanation in explain(composition, library):
        assert explanation.without_mean_latency_ms > composition.expected.mean_latency_ms


def test_an_exit_of_another_library_is_refused(tmp_path):
    library = make_library(tmp_path / "library", quality=6.0)
    composition = compose(library.directory, accuracy=0.95, confidence=None)
    foreign = replace(composition, exits=(replace(composition.exits[0], trial_id=TrialId("elsewhere")),))
    with pytest.raises(CompositionError, match="uses trial 'elsewhere', which this library lacks"):
        explain(foreign, library)
