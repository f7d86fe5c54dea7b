"""`compose` with the exact objective: replayed, certified, honest when nothing can be certified."""

from __future__ import annotations

import numpy as np
import pytest

from gati.composition.compose import Settings, compose, compose_library
from gati.composition.composition import Composition
from gati.composition.contests import REPAYS
from gati.composition.instance import make_instance
from gati.composition.replay import ExitCost, ReplayExit, replay
from gati.composition.risk import smoothed_loss
from gati.errors import CompositionError
from gati.exploration.library import CERTIFY, SELECT, Library
from tests.composition.libraries import make_library, repaid, rewrite

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unbounded")]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    return make_library(tmp_path_factory.mktemp("exact") / "library", quality=6.0, overlapped=True)


def replayed(library: Library, composition: Composition, split: int):
    """Replay a composition from its file's numbers alone."""
    base = library.base_outcomes()
    inputs = np.flatnonzero(base.split == split)
    trials = {trial.trial_id: trial for trial in library.trials}
    exits = []
    for exit_ in composition.exits:
        outcomes, trial = library.outcomes(exit_.trial_id), trials[exit_.trial_id]
        inline = composition.placement == "inline"
        beside_ms = max(trial.overlapped_penalty_ms, 0.3 * trial.overlapped_lookup_ms)
        penalty_ms = trial.lookup_ms if inline else beside_ms
        exits.append(
            ReplayExit(
                outcomes.score[inputs],
                outcomes.predicted[inputs],
                exit_.threshold,
                ExitCost(library.manifest.blocks[exit_.block_index].reach_ms, exit_.lookup_ms, penalty_ms),
            )
        )
    return replay(exits, base.base_class[inputs], library.manifest.profile.base_ms)


@pytest.mark.parametrize("placement", ["inline", "overlapped", "auto"])
@pytest.mark.parametrize("confidence", [0.95, None])
def test_the_file_says_what_a_replay_of_it_gives(library, placement, confidence):
    composition = compose(library.directory, accuracy=0.95, placement=placement, confidence=confidence)
    outcome = replayed(library, composition, SELECT)
    assert composition.objective == "exact"
    assert composition.exits
    assert composition.expected.mean_latency_ms == pytest.approx(outcome.mean_latency_ms)
    assert composition.expected.agreement == pytest.approx(outcome.agreement)
    assert [exit_.expected_hit_rate * 600 for exit_ in composition.exits] == pytest.approx(outcome.hits)
    assert [exit_.exit_ms for exit_ in composition.exits] == pytest.approx(outcome.exit_ms)


def test_the_certificate_counts_the_deployed_setting_on_the_certify_split(library):
    composition = compose(library.directory, accuracy=0.95)
    certificate = composition.certificate
    outcome = replayed(library, composition, CERTIFY)
    assert certificate.certified
    assert certificate.inputs == 600
    assert certificate.losses == int(outcome.wrong.sum())
    assert certificate.proven_agreement >= 0.95
    assert certificate.walked_on.mean_latency_ms == pytest.approx(outcome.mean_latency_ms)
    assert [test.passed for test in certificate.tested][certificate.deployed]
    assert "of 600 inputs not used for choosing were answered differently" in certificate.sentence()


def test_without_confidence_the_select_split_alone_decides(library):
    composition = compose(library.directory, accuracy=0.95, confidence=None)
    assert composition.certificate is None
    assert composition.expected.agreement >= 0.95
    certified = compose(library.directory, accuracy=0.95)
    assert certified.expected.mean_latency_ms >= composition.expected.mean_latency_ms - 1e-9


def test_a_certified_composition_may_agree_less_on_the_select_split_and_says_nothing_of_other_forms(tmp_path):
    library = make_library(tmp_path / "library", quality=6.0, certify=4000, seed=2)
    composition = compose(library.directory, accuracy=0.95, slowdown=None)
    assert composition.certificate.certified and composition.expected.agreement < 0.95
    assert composition.note == ""


def test_without_confidence_too_exits_that_hardly_pay_for_their_misses_are_left_out(tmp_path):
    folder = tmp_path / "library"
    library = make_library(folder, blocks=6, variants=3, quality=4.0, inputs=500, certify=800, seed=2)
    composition = compose(library.directory, accuracy=0.95, confidence=None)
    assert len(composition.exits) > 1
    assert min(repaid(library, composition)) >= REPAYS


@pytest.mark.parametrize("slowdown", [float("inf"), 1e300])
def test_a_slowdown_that_nothing_reaches_is_no_limit(library, slowdown):
    """The command line has no other word for it; it warned of invalid values, and chose nothing."""
    free, limited = (compose(library.directory, accuracy=0.95, slowdown=each) for each in (None, slowdown))
    assert free.exits
    assert limited.exits == free.exits


def test_caches_that_hardly_save_time_are_left_out(tmp_path):
    """Their gain is within the error of measuring, while every miss takes longer."""
    library = make_library(tmp_path / "library", quality=6.0)
    savings = []
    for lookup_ms in np.linspace(0.2, 0.5, 9):
        rewrite(library, lookup_ms=float(lookup_ms))
        composition = compose(library.directory, accuracy=0.95, slowdown=None)
        saved = 1.0 - composition.expected.mean_latency_ms / library.manifest.profile.base_ms
        savings.append(saved)
        assert saved >= 0.03 if composition.exits else saved == 0.0
    assert savings[0] > 0.03 and savings[-1] == 0.0


def test_too_few_certify_inputs_give_no_caches_and_the_number_that_would_do(tmp_path):
    library = make_library(tmp_path / "library", certify=200, quality=6.0)
    composition = compose(library.directory, accuracy=0.99)
    assert composition.exits == ()
    assert "cannot be certified with 95 % confidence on 200 inputs: it takes at least 299" in composition.note
    assert composition.certificate.to_json()["required_inputs"] == 299
    assert Composition.load(library.composition_path("default")) == composition


def test_a_library_without_certify_inputs_deploys_nothing_but_with_no_confidence_asked_it_does(tmp_path):
    library = make_library(tmp_path / "library", certify=0, quality=6.0)
    assert "on 0 inputs" in compose(library.directory, accuracy=0.95).note
    assert compose(library.directory, accuracy=0.95, confidence=None).exits


def test_the_exact_objective_asks_for_outcomes_and_names_the_one_that_does_without(tmp_path):
    library = make_library(tmp_path / "library", outcomes=False)
    with pytest.raises(CompositionError, match="needs the per-input outcomes.*use --objective full"):
        compose(library.directory)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("objective", ["relaxed", "full"])
def test_exact_is_never_slower_than_a_published_form_at_the_agreement_that_form_reaches(
    tmp_path, objective, seed
):
    library = make_library(tmp_path / "library", seed=seed, quality=5.0)
    published = compose_library(library, Settings(accuracy=0.95, objective=objective, placement="inline"))
    if published.expected.agreement >= 1.0:
        pytest.skip("the published form lets nothing wrong through here")
    wanted = published.expected.agreement - 1e-9
    exact = compose_library(library, Settings(accuracy=wanted, confidence=None, placement="inline"))
    assert exact.expected.agreement >= wanted
    assert exact.expected.mean_latency_ms <= published.expected.mean_latency_ms + 1e-9


def test_memory_limits_the_exact_form(library):
    composition = compose(library.directory, accuracy=0.95, memory_bytes=4000)
    assert 0 < composition.expected.memory_bytes <= 4000


def test_a_published_form_that_does_not_hold_is_deployed_as_published_and_says_so(library):
    composition = compose(library.directory, accuracy=0.95, objective="full")
    assert composition.exits
    assert composition.certificate.settings == 1
    assert composition.certificate.certified == (composition.certificate.proven_agreement >= 0.95)


def test_risk_is_half_what_happened_and_half_how_often_it_happens_at_such_a_score():
    random = np.random.default_rng(0)
    score = random.normal(size=(3, 2000)).astype(np.float32)
    rate = np.stack([1 / (1 + np.exp(2 * score[0] + 2)), np.full(2000, 0.3), np.zeros(2000)])
    wrong = random.random((3, 2000)) < rate
    instance = make_instance(
        block=[0, 1, 2],
        score=score,
        wrong=wrong,
        reach_ms=[1.0, 2.0, 3.0],
        lookup_ms=[0.1] * 3,
        penalty_ms=[0.1] * 3,
        memory_bytes=[10] * 3,
        base_ms=4.0,
    )
    estimated = 2.0 * smoothed_loss(instance) - wrong
    assert np.abs(estimated[:2] - rate[:2]).mean(axis=1) == pytest.approx([0.0, 0.0], abs=0.03)
    assert estimated[2].min() >= 0.0 and estimated[2].max() < 0.1  # never certain of the highest scores
    in_order = np.take_along_axis(estimated, instance.order, axis=1)
    assert (np.diff(in_order[0]) >= -1e-9).all()


def test_per_class_certifies_every_class_and_deploys_no_more_than_overall(library):
    overall = compose(library.directory, accuracy=0.9)
    every = compose(library.directory, accuracy=0.9, per_class=True)
    counted = every.certificate.by_class
    assert every.certificate.certified
    assert len(counted) == 10
    assert sum(each.inputs for each in counted) == 600
    assert sum(each.losses for each in counted) == every.certificate.losses
    assert every.certificate.deployed <= overall.certificate.deployed
    assert overall.certificate.by_class == ()


def test_the_drop_of_accuracy_counts_labels_on_the_certify_split(library):
    composition = compose(library.directory, accuracy=0.95)
    drop = composition.certificate.accuracy_drop
    assert drop.n == 600
    assert drop.became_wrong == composition.certificate.losses  # labels are base answers
    assert drop.became_right == 0
    assert drop.upper_bound > drop.became_wrong / 600
