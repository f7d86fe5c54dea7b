"""Why each exit is there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gati.composition import contests
from gati.composition.compose import Settings, compose, compose_library
from gati.composition.costs import CostedLibrary
from gati.composition.explain import explain
from gati.errors import CompositionError
from gati.types import TrialId
from gati.units import percent
from tests.composition.libraries import make_library
from tests.composition.test_coarse_engines import Coarse
from tests.composition.test_costs import costs_of, keep

pytestmark = pytest.mark.usefixtures("unbounded")


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


@pytest.mark.slow
def test_every_exit_of_an_exact_composition_saves_time(tmp_path):
    library = make_library(tmp_path / "library", quality=6.0)
    composition = compose(library.directory, accuracy=0.95, confidence=None)
    for explanation in explain(composition, library):
        assert explanation.without_mean_latency_ms > composition.expected.mean_latency_ms


@pytest.mark.slow
def test_an_exit_of_another_library_is_refused(tmp_path):
    library = make_library(tmp_path / "library", quality=6.0)
    composition = compose(library.directory, accuracy=0.95, confidence=None)
    foreign = replace(composition, exits=(replace(composition.exits[0], trial_id=TrialId("elsewhere")),))
    with pytest.raises(CompositionError, match="uses trial 'elsewhere', which this library lacks"):
        explain(foreign, library)


@pytest.mark.slow
def test_of_an_engine_of_reduced_precision_like_is_compared_with_like(tmp_path, monkeypatch):
    monkeypatch.setattr(contests, "TRIFLE", 0.002)  # else one exit would do
    library = make_library(tmp_path / "library", quality=6.0, inputs=2000, certify=2000, seed=3)
    costs = costs_of(library, "openvino-int8", 4.0)
    keep(library, costs)
    reduced = CostedLibrary(library, costs)
    reduced.__dict__["answers"] = Coarse(library, each=40)  # loses 2.5 % by itself
    composition = compose_library(reduced, Settings(accuracy=0.93, slowdown=None))
    assert composition.backend == "openvino-int8" and len(composition.exits) > 1
    for explanation in explain(composition, library):
        assert explanation.as_float32
        assert explanation.with_agreement > composition.expected.agreement + 0.002
        told = (
            f"{percent(explanation.without_agreement, 2)} instead of {percent(explanation.with_agreement, 2)}"
        )
        assert told in explanation.sentence
        assert explanation.sentence.endswith("without the answers that openvino-int8 changes by itself")
        assert explanation.without_mean_latency_ms != explanation.with_mean_latency_ms


@pytest.mark.slow
def test_in_float32_nothing_is_left_out(tmp_path):
    library = make_library(tmp_path / "library", quality=6.0)
    composition = compose(library.directory, accuracy=0.95)
    for explanation in explain(composition, library):
        assert not explanation.as_float32
        assert explanation.with_agreement == pytest.approx(composition.expected.agreement)
        assert explanation.with_mean_latency_ms == pytest.approx(composition.expected.mean_latency_ms)
