"""The frontier, and the inverse question: how much agreement within a latency."""

from __future__ import annotations

import json

import pytest

from gati.composition.binomial import agreement_lower_bound
from gati.composition.composition import Composition
from gati.composition.pareto import compose_within_latency, pareto
from gati.composition.plans import Settings
from gati.errors import CompositionError
from tests.composition.libraries import make_library


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return make_library(tmp_path_factory.mktemp("pareto") / "library", blocks=6, quality=5.0)


@pytest.mark.slow
def test_the_frontier_trades_agreement_for_latency_and_is_stored(library):
    points = pareto(library.directory)
    assert len(points) >= 10
    latencies = [point.mean_latency_ms for point in points]
    assert latencies == sorted(latencies, reverse=True)
    agreements = [point.agreement for point in points]
    assert agreements == sorted(agreements, reverse=True)
    assert all(0.0 < point.certified_agreement < 1.0 for point in points)
    assert all(len(point.blocks) == len(point.trials) == len(point.thresholds) for point in points)
    stored = json.loads((library.directory / "pareto.json").read_text())
    assert [point["mean_latency_ms"] for point in stored["points"]] == latencies


@pytest.mark.slow
def test_within_a_latency_the_most_careful_composition_is_written_with_what_is_certified(library):
    base_ms = library.manifest.profile.base_ms
    slow = compose_within_latency(library.directory, 0.9 * base_ms, Settings(name="slow"))
    fast = compose_within_latency(library.directory, 0.6 * base_ms, Settings(name="fast"))
    assert slow.expected.mean_latency_ms <= 0.9 * base_ms
    assert fast.expected.mean_latency_ms <= 0.6 * base_ms
    assert slow.expected.agreement >= fast.expected.agreement
    assert fast.certificate.certified
    assert fast.accuracy_target <= fast.certificate.proven_agreement
    assert Composition.load(library.composition_path("fast")) == fast


def test_a_latency_that_nothing_reaches_is_refused_with_the_fastest_there_is(library):
    with pytest.raises(CompositionError, match="no composition has a mean latency of 0.001 ms: the fastest"):
        compose_within_latency(library.directory, 0.001)


def test_without_outcomes_there_is_no_frontier(tmp_path):
    library = make_library(tmp_path / "library", outcomes=False)
    with pytest.raises(CompositionError, match="the frontier needs the per-input outcomes"):
        pareto(library.directory)


@pytest.mark.slow
def test_per_class_is_certified_in_every_class_within_a_latency_and_on_the_frontier(library):
    base_ms = library.manifest.profile.base_ms
    overall = compose_within_latency(library.directory, 0.7 * base_ms, Settings(name="overall"))
    every = compose_within_latency(library.directory, 0.7 * base_ms, Settings(name="every", per_class=True))
    assert (overall.per_class, every.per_class) == (False, True)
    assert every.accuracy_target < overall.accuracy_target
    assert len(every.certificate.by_class) == 10
    assert every.certified
    for each in every.certificate.by_class:
        assert agreement_lower_bound(each.losses, each.inputs, 0.05) >= every.accuracy_target
    points = pareto(library.directory), pareto(library.directory, Settings(per_class=True))
    assert len(points[0]) == len(points[1])
    for both, worst in zip(*points, strict=True):
        assert worst.per_class and not both.per_class
        assert worst.certified_agreement < both.certified_agreement


def test_what_certifies_whatever_it_finds_needs_a_confidence(library):
    for ask in (pareto, lambda *given: compose_within_latency(given[0], 1.0, given[1])):
        with pytest.raises(CompositionError, match="certify their results, which needs a confidence"):
            ask(library.directory, Settings(confidence=None))
    with pytest.raises(CompositionError, match="certifying every class needs a confidence"):
        pareto(library.directory, Settings(confidence=None, per_class=True))
