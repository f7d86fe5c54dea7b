"""Composing for an engine that answers otherwise than the tables say: it is asked itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from gati.composition import compose as composing
from gati.composition.certified import propose
from gati.composition.composition import Composition
from gati.composition.costs import CostedLibrary
from gati.composition.ledger import Ledger
from gati.composition.outcomes import EngineOutcomes, SplitOutcomes
from gati.composition.plans import Settings
from gati.composition.problem import Candidate
from gati.errors import CompositionError
from gati.exploration.library import CERTIFY, SELECT, Library
from tests.composition.libraries import CLASSES, make_library
from tests.composition.test_costs import costs_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unbounded")]


class Coarse:
    """An engine whose network loses every `each`-th input's class; lookups answer as in the tables."""

    def __init__(self, library: Library, each: int) -> None:
        self._library = library
        self._base = library.base_outcomes().base_class
        self._lost = np.arange(len(self._base)) % each == 0
        self.asked: list[tuple[str, ...]] = []

    def keep(self, composition: Composition) -> Composition:
        return composition  # it has no graphs

    def of_split(self, split: int) -> Coarse:
        return self

    def announce(self, path: Sequence[Sequence[Candidate]]) -> None:
        """There is nothing to be shared."""

    def ask(self, path: Sequence[Sequence[Candidate]]) -> None:
        for setting in path:
            self(setting)

    def __call__(self, setting: Sequence[Candidate]) -> tuple[np.ndarray, np.ndarray]:
        self.asked.append(tuple(candidate.trial_id for candidate in setting))
        left_at = np.full(len(self._base), len(setting))
        answer = np.where(self._lost, (self._base + 1) % CLASSES, self._base)
        for position, candidate in enumerate(setting):
            outcomes = self._library.outcomes(candidate.trial_id)
            new = (left_at == len(setting)) & (outcomes.score >= np.float32(candidate.threshold))
            left_at[new] = position
            answer[new] = outcomes.predicted[new]
        return left_at, answer


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return make_library(tmp_path / "library", quality=6.0, inputs=2000, certify=2000)


def deployed(library: Library, accuracy: float, select: SplitOutcomes, certify: SplitOutcomes):
    count = certify.copies.evidence
    return propose(library, Settings(accuracy=accuracy), ["inline"], select, count).deploy(certify)


def planned(library: Library, engine: Coarse, accuracy: float):
    return deployed(
        library, accuracy, *(EngineOutcomes(library, split, engine) for split in (SELECT, CERTIFY))
    )


def test_what_the_engine_loses_without_any_cache_counts_against_the_target(library: Library) -> None:
    exact = deployed(library, 0.95, *(SplitOutcomes(library, split) for split in (SELECT, CERTIFY)))
    coarse = planned(library, Coarse(library, each=50), 0.95)
    assert coarse.exits
    assert coarse.expected.mean_latency_ms > exact.expected.mean_latency_ms


def test_the_certificate_counts_the_engines_own_answers(library: Library) -> None:
    engine = Coarse(library, each=50)
    plan = planned(library, engine, 0.95)
    certify = np.flatnonzero(library.base_outcomes().split == CERTIFY)
    answer = engine(plan.choice.candidates)[1][certify]
    lost = int((answer != library.base_outcomes().base_class[certify]).sum())
    assert plan.certificate is not None
    assert plan.certificate.losses == lost
    assert plan.certificate.inputs == len(certify)
    assert plan.expected.agreement == pytest.approx(_agreement(library, engine, plan.choice.candidates))


def _agreement(library: Library, engine: Coarse, candidates: Sequence[Candidate]) -> float:
    select = np.flatnonzero(library.base_outcomes().split == SELECT)
    answer = engine(candidates)[1][select]
    return float((answer == library.base_outcomes().base_class[select]).mean())


def test_the_walk_begins_with_no_exits_at_all(library: Library) -> None:
    """Just below what the network alone reaches, nothing but the network alone can be certified."""
    engine = Coarse(library, each=100)
    plan = planned(library, engine, 0.9845)
    assert plan.certificate is not None
    assert plan.certificate.tested[0].losses >= 10
    assert () in engine.asked


def test_an_engine_that_competes_with_no_other_is_not_asked_what_the_walk_may_not_need(
    library: Library,
) -> None:
    """Estimates of the latency order engines; without others, only the deployed setting is replayed."""
    engine = Coarse(library, each=50)
    select = EngineOutcomes(library, SELECT, engine)
    proposal = propose(library, Settings(accuracy=0.95), ["inline"], select, 2000)
    assert set(engine.asked) <= {()} and len(proposal.main) > 3
    assert proposal.hoped_ms(2000) is not None
    assert len(engine.asked) > len(proposal.main)


def test_an_engine_that_cannot_keep_the_target_is_refused_in_one_line(library: Library) -> None:
    message = r"on backend 'torch' the whole network.*0\.99 cannot be certified"
    with pytest.raises(CompositionError, match=message) as caught:
        planned(library, Coarse(library, each=50), 0.99)
    assert "\n" not in str(caught.value)


def test_single_inputs_that_the_engine_loses_anyway_cost_nothing_to_let_go(library: Library) -> None:
    outcomes = EngineOutcomes(library, SELECT, Coarse(library, each=2))
    wrong = (outcomes.base_class + 1) % CLASSES
    assert outcomes.costs_agreement(wrong).sum() == len(outcomes) - outcomes.lost_without_exits


def test_what_was_counted_of_an_engine_that_is_refused_is_a_use_of_the_split(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its losses are told, so whoever lowers the accuracy then has looked at the split before."""
    reduced = CostedLibrary(library, costs_of(library, "openvino-int8", 4.0))
    reduced.__dict__["answers"] = Coarse(library, each=50)
    monkeypatch.setattr(composing, "choose_backend", lambda *_: reduced)
    monkeypatch.setattr(composing, "reduced_precisions", lambda *_: [])
    refusal = r"answers \d+ of 2000 inputs differently .*; this was a use of the certify split"
    with pytest.raises(CompositionError, match=refusal):
        composing.compose(library.directory, accuracy=0.99)
    (use,) = Ledger(library.directory).uses
    assert use.look["walked"][0][0] == "openvino-int8" and not use.verdict["certified"]
    composition = composing.compose(library.directory, accuracy=0.95, slowdown=0.5)
    assert composition.certificate is not None and composition.certificate.use == 2


@pytest.mark.parametrize(("speed", "worth_asking"), [(4.0, True), (0.9, False)])
def test_an_engine_is_not_asked_where_it_could_not_be_faster_even_if_it_lost_nothing(
    library: Library, monkeypatch: pytest.MonkeyPatch, speed: float, worth_asking: bool
) -> None:
    engine = Coarse(library, each=200)
    reduced = CostedLibrary(library, costs_of(library, "openvino-int8", speed))
    reduced.__dict__["answers"] = engine
    monkeypatch.setattr(composing, "choose_backend", lambda opened, *_: opened)
    monkeypatch.setattr(composing, "reduced_precisions", lambda *_: [reduced])
    composition = composing.compose(library.directory, accuracy=0.95, slowdown=0.5)
    assert bool(engine.asked) == worth_asking
    assert composition.backend == ("openvino-int8" if worth_asking else library.manifest.profile.backend)


def test_a_limit_below_the_smallest_cache_is_refused_before_any_engine_is_asked(library: Library) -> None:
    engine = Coarse(library, each=100)
    reduced = CostedLibrary(library, costs_of(library, "openvino-int8", 2.0))
    reduced.__dict__["answers"] = engine
    with pytest.raises(CompositionError, match="memory limit 10 bytes is too small for any cache"):
        composing.compose_best(library, [reduced], Settings(accuracy=0.95, memory_limit_bytes=10))
    assert not engine.asked


def test_too_few_inputs_for_any_proof_are_told_before_the_engine_is_asked(tmp_path: Path) -> None:
    library = make_library(tmp_path / "small", quality=6.0, inputs=400, certify=200)
    engine = Coarse(library, each=1000)
    message = (
        r"0\.99 must be proven even without caches: that needs 299 inputs to certify on, but there are 200; "
    )
    with pytest.raises(CompositionError, match=message):
        planned(library, engine, 0.99)
    assert not engine.asked
