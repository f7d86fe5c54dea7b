"""The frontier, and the inverse question: how much agreement within a latency."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import gati
from gati.cli import render, run
from gati.composition import pareto as frontier
from gati.composition.binomial import agreement_lower_bound
from gati.composition.composition import Composition
from gati.composition.contests import REPAYS, Contest
from gati.composition.costs import CostedLibrary
from gati.composition.instance import Chosen, Instance, make_instance
from gati.composition.pareto import compose_within_latency, pareto, read_frontier
from gati.composition.plans import Settings
from gati.composition.search import search_frontier
from gati.errors import CompositionError
from gati.exploration.library import CERTIFY, SELECT, Library, TrialOutcomes
from gati.types import TrialId
from tests.composition.libraries import make_library, repaid
from tests.composition.test_coarse_engines import Coarse
from tests.composition.test_costs import costs_of


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return make_library(tmp_path_factory.mktemp("pareto") / "library", blocks=6, quality=5.0)


@pytest.fixture(scope="module")
def points(library):
    return pareto(library.directory)


@pytest.mark.slow
def test_the_frontier_trades_agreement_for_latency_and_is_stored(library, points):
    assert len(points) >= 10
    latencies = [point.mean_latency_ms for point in points]
    assert latencies == sorted(latencies, reverse=True)
    agreements = [point.agreement for point in points]
    assert agreements == sorted(agreements, reverse=True)
    assert all(0.0 < point.certified_agreement < 1.0 for point in points)
    assert all(len(point.blocks) == len(point.trials) == len(point.thresholds) for point in points)
    assert read_frontier(library.directory / "pareto.json") == points


def counted(library: Library, split: int, exits: Iterable[tuple[str, float]]) -> tuple[int, int]:
    """How many inputs of a split the exits answer otherwise than the base model, and of how many."""
    base = library.base_outcomes()
    rows = base.split == split
    inside, losses = rows.copy(), 0
    for trial, threshold in exits:
        found = library.outcomes(TrialId(trial))
        leaves = inside & (found.score >= np.float32(threshold))
        losses += int((found.predicted != base.base_class)[leaves].sum())
        inside &= ~leaves
    return losses, int(rows.sum())


@pytest.mark.slow
def test_the_limits_of_the_frontier_hold_together(library, points):
    """The operator sees all points before choosing one, so that their limits share delta."""
    for point in points:
        exits = zip(point.trials, point.thresholds, strict=True)
        limit = agreement_lower_bound(*counted(library, CERTIFY, exits), 0.05 / len(points))
        assert point.certified_agreement == pytest.approx(limit)


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
    exits = [(each.trial_id, each.threshold) for each in fast.exits]
    certify, select = (counted(library, split, exits) for split in (CERTIFY, SELECT))
    assert (fast.certificate.losses, fast.certificate.inputs) == certify != select


@pytest.mark.slow
def test_what_is_chosen_hangs_on_the_select_split_alone(library, points, tmp_path):
    """Limits of what was chosen on the certify split would be no limits."""
    other = Library.open(shutil.copytree(library.directory, tmp_path / "library"))
    certify = other.base_outcomes().split == CERTIFY
    for trial in other.trials:
        answers = other.outcomes(trial.trial_id)
        score = np.where(certify, -answers.score, answers.score)
        other.write_outcomes(trial.trial_id, TrialOutcomes(score, answers.predicted))
    chosen = [
        compose_within_latency(
            each.directory, 0.6 * library.manifest.profile.base_ms, Settings(name="within")
        ).exits
        for each in (library, other)
    ]
    assert chosen[0] == chosen[1] != ()
    found = pareto(other.directory)
    assert [(each.trials, each.thresholds) for each in found] == [
        (each.trials, each.thresholds) for each in points
    ]


def test_a_latency_that_nothing_reaches_is_refused_with_the_fastest_there_is(library):
    with pytest.raises(CompositionError, match="no composition has a mean latency of 0.001 ms: the fastest"):
        compose_within_latency(library.directory, 0.001)


def test_the_command_takes_the_agreement_at_which_placements_are_compared(library, monkeypatch):
    asked = []
    monkeypatch.setattr(gati, "pareto", lambda _, settings: asked.append(settings.accuracy))
    monkeypatch.setattr(render, "frontier", lambda *_: None)
    assert run(["compose", str(library.directory), "--pareto", "--accuracy", "0.97"]) == 0
    assert asked == [0.97]


def test_a_frontier_has_at_least_one_point(library):
    with pytest.raises(CompositionError, match="points is 0; give at least 1"):
        pareto(library.directory, points=0)


def test_without_outcomes_there_is_no_frontier(tmp_path):
    library = make_library(tmp_path / "library", outcomes=False)
    with pytest.raises(CompositionError, match="the frontier needs the per-input outcomes"):
        pareto(library.directory)


@pytest.mark.slow
def test_per_class_is_certified_in_every_class_within_a_latency_and_on_the_frontier(
    library, points, tmp_path
):
    base_ms = library.manifest.profile.base_ms
    overall = compose_within_latency(library.directory, 0.7 * base_ms, Settings(name="overall"))
    every = compose_within_latency(library.directory, 0.7 * base_ms, Settings(name="every", per_class=True))
    assert (overall.per_class, every.per_class) == (False, True)
    assert every.accuracy_target < overall.accuracy_target
    assert len(every.certificate.by_class) == 10
    assert every.certified
    for each in every.certificate.by_class:
        assert agreement_lower_bound(each.losses, each.inputs, 0.05) >= every.accuracy_target
    copied = shutil.copytree(library.directory, tmp_path / "library")
    of_every_class = pareto(copied, Settings(per_class=True))
    for both, worst in zip(points, of_every_class, strict=True):
        assert worst.per_class and not both.per_class
        assert worst.certified_agreement < both.certified_agreement


def test_what_certifies_whatever_it_finds_needs_a_confidence(library):
    for ask in (pareto, lambda *given: compose_within_latency(given[0], 1.0, given[1])):
        with pytest.raises(CompositionError, match="certify their results, which needs a confidence"):
            ask(library.directory, Settings(confidence=None))
    with pytest.raises(CompositionError, match="certifying every class needs a confidence"):
        pareto(library.directory, Settings(confidence=None, per_class=True))


@pytest.mark.parametrize("seed", range(8))
def test_within_a_latency_no_composition_agrees_more(seed: int) -> None:
    """Dropping exits that save little must cost neither agreement nor a composition that is fast enough."""
    instance = _small(seed)
    outcomes = [instance.outcome(chosen) for chosen in _every(instance)]
    fastest_ms: dict[float, float] = {}  # by disagreements
    for each in outcomes:
        known_ms = fastest_ms.get(each.disagreements, np.inf)
        fastest_ms[each.disagreements] = min(known_ms, each.mean_latency_ms)
    for latency_ms in (*fastest_ms.values(), 0.9 * instance.base_ms, 1.1 * instance.base_ms):
        contest = Contest("inline", (), instance, search_frontier(instance))
        found = frontier._highest_agreement(contest, latency_ms, instance.inputs).outcome
        fewest = min(each.disagreements for each in outcomes if each.mean_latency_ms <= latency_ms)
        assert found.mean_latency_ms <= latency_ms
        assert found.disagreements == fewest


def _small(seed: int) -> Instance:
    """Three exits, of which some save little; inputs that are hard for one are hard for all."""
    random = np.random.default_rng(seed)
    hardness = random.random(12)
    score = 1.0 - hardness + random.normal(0.0, 0.2, (3, 12))
    return make_instance(
        block=[0, 1, 2],
        score=score.astype(np.float32),
        wrong=hardness + random.normal(0.0, 0.15, (3, 12)) > np.array([[0.5], [0.65], [0.8]]),
        reach_ms=[1.0, 2.0, 3.0],
        lookup_ms=[0.1, 0.1, 0.1],
        penalty_ms=[0.1, 0.1, 0.1],
        memory_bytes=[1, 1, 1],
        base_ms=5.0,
        memory_limit_bytes=None,
        one_lookup_at_a_time=False,
    )


def _every(instance: Instance) -> Iterator[Chosen]:
    """Every composition of an instance with one trial for each block."""
    options = [
        [None, *((trial, int(at) + 1) for at in np.flatnonzero(instance.may_cut[trial]))]
        for trial in range(instance.trials)
    ]
    for picks in product(*options):
        yield tuple(pick for pick in picks if pick is not None)


@pytest.mark.slow
def test_exits_that_hardly_pay_for_their_misses_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "library"
    library = make_library(folder, blocks=6, variants=3, quality=4.0, inputs=500, certify=800, seed=2)
    within = compose_within_latency(library.directory, 0.6 * library.manifest.profile.base_ms)
    assert len(within.exits) > 1
    assert min(repaid(library, within)) >= REPAYS


class _Kept(Coarse):
    """An engine that remembers which exits' networks it was to keep."""

    kept: Sequence[tuple[TrialId, float]] = ()

    def keep(self, composition: Composition) -> Composition:
        self.kept = [(leaving.trial_id, leaving.threshold) for leaving in composition.exits]
        return super().keep(composition)


@pytest.fixture
def reduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CostedLibrary:
    """A library on an engine that loses two of a hundred inputs without any exit."""
    library = make_library(tmp_path / "library", quality=6.0, inputs=1000, certify=1000)
    found = CostedLibrary(library, costs_of(library, "openvino-int8", 2.0))
    found.__dict__["answers"] = _Kept(library, each=50)
    monkeypatch.setattr(frontier, "choose_backend", lambda *_: found)
    return found


@pytest.mark.slow
def test_within_a_latency_the_network_that_was_certified_is_kept_to_be_served(reduced: CostedLibrary) -> None:
    found = compose_within_latency(reduced.directory, 0.7 * reduced.manifest.profile.base_ms)
    assert found.backend == "openvino-int8" and found.exits
    assert reduced.answers.kept == [(leaving.trial_id, leaving.threshold) for leaving in found.exits]


@pytest.mark.slow
def test_the_frontier_counts_what_the_engine_loses_by_itself(reduced: CostedLibrary) -> None:
    base = Library(reduced.directory).base_outcomes()
    rows = base.split == SELECT
    points = pareto(reduced.directory)
    assert points
    for point in points:
        exits = [_Exit(*each) for each in zip(point.trials, point.thresholds, strict=True)]
        _, answer = reduced.answers(exits)
        assert point.agreement == pytest.approx(np.mean(answer[rows] == base.base_class[rows]))


class _Exit(NamedTuple):
    trial_id: str
    threshold: float
