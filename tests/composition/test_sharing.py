"""Several engines certified on the same inputs: they share delta, by what the select split alone says."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from gati.composition import compose as composing
from gati.composition.certified import Proposal, propose
from gati.composition.compose import compose, compose_best
from gati.composition.composition import Composition
from gati.composition.costs import CostedLibrary
from gati.composition.outcomes import outcomes_of
from gati.composition.plans import Settings
from gati.composition.sharing import FIRST, Entrant, Hope, deploy_one, enter, shares
from gati.errors import BackendError, CompositionError
from gati.exploration.library import CERTIFY, SELECT, BaseOutcomes, Library, TrialOutcomes
from tests.composition.libraries import CLASSES, make_library
from tests.composition.test_coarse_engines import Coarse
from tests.composition.test_costs import costs_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unbounded")]

SETTINGS = Settings(accuracy=0.95, slowdown=None)


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return make_library(tmp_path / "library", quality=6.0, inputs=1000, certify=1000)


def on_engine(library: Library, backend: str, speed: float, engine: object) -> CostedLibrary:
    reduced = CostedLibrary(library, costs_of(library, backend, speed))
    reduced.__dict__["answers"] = engine
    return reduced


def proposed(library: Library) -> Proposal:
    return propose(library, SETTINGS, ["inline"], outcomes_of(library, SELECT), 1000)


def hope(library: Library, backend: str, speed: float, engine: object) -> Hope:
    reduced = on_engine(library, backend, speed, engine)
    at_best_ms = proposed(reduced.at_best()).hoped_ms(1000, FIRST)
    assert at_best_ms is not None
    return Hope(backend, at_best_ms, lambda: proposed(reduced))


class CoarseOnCertify(Coarse):
    """Loses nothing on the select split, and every tenth input of the certify split."""

    def __init__(self, library: Library) -> None:
        super().__init__(library, each=10)
        self._lost &= library.base_outcomes().split == CERTIFY


@pytest.mark.parametrize("engines", range(1, 8))
def test_shares_of_delta_add_up_to_no_more_than_all_of_it(engines: int) -> None:
    assert len(shares(engines)) == engines
    assert sum(shares(engines)) <= 1.0 + 1e-12
    assert min(shares(engines)) > 0.0
    assert shares(engines)[0] == (FIRST if engines > 1 else 1.0)


def test_one_command_tests_all_engines_at_one_delta_together(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [
        on_engine(library, "openvino-int8", 6.0, CoarseOnCertify(library)),
        on_engine(library, "openvino-bf16", 3.0, Coarse(library, each=200)),
    ]
    monkeypatch.setattr(composing, "choose_backend", lambda opened, *_: opened)
    monkeypatch.setattr(composing, "reduced_precisions", lambda *_: others)
    composition = compose(library.directory, accuracy=0.95, slowdown=None)
    assert composition.certificate is not None
    tried = composition.certificate.engines
    assert [each.backend for each in tried[:2]] == ["openvino-int8", "openvino-bf16"]
    assert [each.certified for each in tried[:2]] == [False, True]
    refused, walked = tried[0], tried[0].tested
    assert refused.reason and walked is not None and (walked[0].losses, walked[0].inputs) == (101, 1000)
    assert sum(each.share_of_delta for each in tried) <= 1.0 + 1e-12
    deployed = next(each for each in tried if each.backend == composition.backend)
    assert composition.certificate.level == pytest.approx(deployed.share_of_delta * 0.05)
    passed = [test for test in composition.certificate.tested if test.passed]
    assert max(test.p_value for test in passed) <= composition.certificate.level


def test_what_was_counted_of_refused_engines_is_a_use_even_if_no_cache_pays_off(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = costs_of(library, "openvino", 1.0)
    dear = CostedLibrary(library, replace(costs, lookup_ms=dict.fromkeys(costs.lookup_ms, 100.0)), asks=False)
    others = [on_engine(library, "openvino-int8", 1.5, CoarseOnCertify(library))]
    monkeypatch.setattr(composing, "choose_backend", lambda *_: dear)
    monkeypatch.setattr(composing, "reduced_precisions", lambda *_: others)
    composition = compose(library.directory, accuracy=0.95, slowdown=None)
    assert composition.backend == "openvino" and not composition.exits
    assert "on backend 'openvino-int8' the whole network" in composition.note
    certificate = composition.certificate
    assert certificate is not None and certificate.use == 1 and not certificate.certified
    assert certificate.sentence().startswith("Without caches all answers are the base model's")
    assert certificate.engines[0].tested and not certificate.engines[1].tested
    assert Composition.load(library.composition_path()) == composition


def test_who_takes_part_and_at_what_share_hangs_on_the_select_split_alone(library: Library) -> None:
    def entrants() -> list[tuple[str, float, float]]:
        engines = [
            hope(library, "openvino-int8", 6.0, Coarse(library, each=100)),
            hope(library, "openvino-bf16", 3.0, Coarse(library, each=200)),
        ]
        found = enter(proposed(library), engines, 1000)
        return [(each.backend, each.hoped_ms, each.share) for each in found]

    before = entrants()
    base = library.base_outcomes()
    certify = base.split == CERTIFY
    other = np.where(certify, (base.base_class + 1) % CLASSES, base.base_class)
    library.write_base_outcomes(BaseOutcomes(other, base.label, base.split))
    for trial in library.trials:
        answers = library.outcomes(trial.trial_id)
        score = np.where(certify, -answers.score, answers.score)
        library.write_outcomes(trial.trial_id, TrialOutcomes(score, answers.predicted))
    assert entrants() == before
    assert [backend for backend, _, _ in before][-1] == library.manifest.profile.backend


def test_the_first_that_reaches_what_it_hoped_for_ends_the_search(library: Library) -> None:
    fast, slow = Coarse(library, each=1000), Coarse(library, each=1000)
    others = [
        on_engine(library, "openvino-int8", 6.0, fast),
        on_engine(library, "openvino-bf16", 2.0, slow),
    ]
    deployed, composition = compose_best(library, others, SETTINGS)
    assert deployed.manifest.profile.backend == composition.backend == "openvino-int8"
    assert fast.asked and not slow.asked
    assert composition.certificate is not None
    assert [each.backend for each in composition.certificate.engines] == ["openvino-int8"]


def test_float32_serves_where_no_other_engine_can_be_certified(library: Library) -> None:
    others = [on_engine(library, "openvino-int8", 6.0, CoarseOnCertify(library))]
    deployed, composition = compose_best(library, others, SETTINGS)
    assert deployed is library
    assert composition.exits and composition.certified
    assert composition.certificate is not None
    assert composition.certificate.level == pytest.approx(0.005)


def test_an_engine_without_hope_takes_no_share_from_float32(library: Library) -> None:
    # it loses 8 % where 5 % are tolerated
    others = [on_engine(library, "openvino-int8", 6.0, Coarse(library, each=12))]
    _, composition = compose_best(library, others, SETTINGS)
    assert composition.backend == library.manifest.profile.backend
    assert composition.certificate is not None
    assert composition.certificate.level == pytest.approx(0.05)


@pytest.mark.parametrize("first", ["openvino-int8", "openvino-bf16"])
def test_the_fastest_of_several_that_pass_is_deployed(library: Library, first: str) -> None:
    """Whichever was expected to be the fastest."""
    speeds = {"openvino-int8": 6.0, "openvino-bf16": 2.0}
    engines = {
        name: on_engine(library, name, speed, Coarse(library, each=1000)) for name, speed in speeds.items()
    }
    order = sorted(engines, key=lambda name: name != first)
    entrants = [Entrant(name, 1e-3, partial(proposed, engines[name]), 0.5) for name in order]
    proposal, plan = deploy_one(entrants, lambda each: outcomes_of(each.library, CERTIFY))
    assert proposal.library is engines["openvino-int8"]
    assert plan.certificate is not None
    assert [each.certified for each in plan.certificate.engines] == [True, True]


@pytest.mark.parametrize("error", [BackendError("it cannot run"), CompositionError("too few inputs")])
def test_an_engine_that_fails_leaves_the_choice_to_the_others(library: Library, error: Exception) -> None:
    """When it is asked for a path, and when it is its turn to be counted."""

    def fail() -> Proposal:
        raise error

    reference = proposed(library)
    (alone,) = enter(reference, [Hope("openvino-bf16", 1e-3, fail)], 1000)
    assert (alone.backend, alone.share) == (library.manifest.profile.backend, 1.0)
    entrants = [Entrant("openvino-bf16", 1e-3, fail, 0.9), replace(alone, share=0.1)]
    proposal, plan = deploy_one(entrants, lambda _: outcomes_of(library, CERTIFY))
    assert proposal is reference and plan.exits and plan.certificate is not None
    assert plan.certificate.engines[0].reason == str(error)
    assert plan.certificate.level == pytest.approx(0.1 * 0.05)


def test_entrants_are_walked_only_while_they_hope_for_less(library: Library) -> None:
    def refuse() -> Proposal:
        raise AssertionError("not to be asked")

    reference = proposed(library)
    slower = Entrant("openvino-bf16", 1e9, refuse, 0.1)
    split = outcomes_of(library, CERTIFY)
    proposal, plan = deploy_one([Entrant("torch", 1.0, lambda: reference, 0.9), slower], lambda _: split)
    assert proposal is reference
    assert plan.exits
