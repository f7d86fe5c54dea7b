"""The certificate: the walk, the numbers, and that it is false no more often than it says."""

from __future__ import annotations

import json
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.composition.binomial import (
    agreement_lower_bound,
    check_confidence,
    p_value,
    required_inputs,
)
from gati.composition.certificate import ClassCounts
from gati.composition.walk import certify, certify_every_class, count_by_class
from gati.errors import CompositionError
from gati.units import at_least

levels = st.sampled_from((0.5, 0.9, 0.97, 0.99, 0.999))
deltas = st.sampled_from((0.01, 0.05, 0.2))


@given(losses=st.integers(0, 8), inputs=st.integers(8, 40), accuracy=levels)
def test_the_p_value_is_the_binomial_tail(losses, inputs, accuracy):
    exact = sum(comb(inputs, k) * (1 - accuracy) ** k * accuracy ** (inputs - k) for k in range(losses + 1))
    assert p_value(losses, inputs, accuracy) == pytest.approx(exact)


@given(losses=st.integers(0, 60), more=st.integers(0, 600), delta=deltas)
def test_at_the_limit_of_agreement_so_few_losses_are_exactly_as_rare_as_delta(losses, more, delta):
    limit = agreement_lower_bound(losses, losses + more, delta)
    assert (limit == 0.0) == (more == 0)
    assert more == 0 or p_value(losses, losses + more, limit) == pytest.approx(delta)


def test_299_inputs_without_loss_certify_99_percent_and_298_do_not():
    assert required_inputs(0.99, 0.05) == 299
    assert certify([(0, 299)], 0.99, 0.05).deployed == 0
    assert certify([(0, 298)], 0.99, 0.05).deployed is None


@settings(deadline=None)
@given(accuracy=levels, delta=deltas, losses=st.integers(0, 20))
def test_the_required_number_is_the_least_that_passes(accuracy, delta, losses):
    needed = required_inputs(accuracy, delta, losses)
    assert p_value(losses, needed, accuracy) <= delta
    assert needed == losses + 1 or p_value(losses, needed - 1, accuracy) > delta


def test_the_walk_stops_at_the_first_failure_and_deploys_the_last_that_passed():
    path = [(0, 1000), (1, 1000), (4, 1000), (9, 1000), (0, 1000)]
    certificate = certify(path, 0.99, 0.05)
    assert [test.passed for test in certificate.tested] == [True, True, True, False]
    assert certificate.deployed == 2  # the later setting without loss is never looked at
    assert (certificate.losses, certificate.inputs, certificate.settings) == (4, 1000, 5)


def test_nothing_is_deployed_when_the_strictest_fails():
    certificate = certify([(40, 1000), (0, 1000)], 0.99, 0.05)
    assert certificate.deployed is None
    assert "already the strictest setting answered 40 of 1000 inputs differently" in certificate.sentence()


def test_too_few_inputs_say_how_many_would_do():
    sentence = certify([(0, 200)], 0.99, 0.05).sentence()
    assert sentence == (
        "Agreement of 99 % cannot be certified with 95 % confidence on 200 inputs: "
        "it takes at least 299 even without any disagreement."
    )


def test_the_sentence_says_what_was_counted():
    assert certify([(2, 1000)], 0.99, 0.05).sentence() == (
        "With 95 % confidence at least 99 % of answers are the base model's: "
        "2 of 1000 inputs not used for choosing were answered differently."
    )


def test_an_empty_path_deploys_nothing_and_is_strict_json():
    document = certify([], 0.99, 0.05).to_json()
    assert document["deployed"] is None
    assert json.loads(json.dumps(document, allow_nan=False)) == document


@given(losses=st.integers(0, 60), accuracy=levels, delta=deltas)
def test_passing_means_that_the_lower_confidence_limit_reaches_the_target(losses, accuracy, delta):
    passed = certify([(losses, 500)], accuracy, delta).deployed == 0
    limit = agreement_lower_bound(losses, 500, delta)
    assert passed == (limit >= accuracy) or limit == pytest.approx(accuracy, abs=1e-9)


@pytest.mark.parametrize(
    ("accuracy", "delta", "path", "message"),
    [
        (1.0, 0.05, [], "accuracy target is 1.0, but must lie strictly"),
        (0.9, 0.0, [], "delta is 0.0, but must lie strictly"),
        (0.9, 0.05, [(3, 2)], "3 losses among 2 inputs"),
        (0.9, 0.05, [(-1, 2)], "-1 losses among 2 inputs"),
    ],
)
def test_impossible_values_are_refused(accuracy, delta, path, message):
    with pytest.raises(CompositionError, match=message):
        certify(path, accuracy, delta)


# Class by class -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("confidence", [0.0, 1.0, -0.5, 95, float("nan")])
def test_a_confidence_is_neither_none_at_all_nor_certainty(confidence):
    with pytest.raises(CompositionError, match="must lie strictly between 0 and 1, such as 0.95"):
        check_confidence(confidence)


def test_a_setting_passes_only_if_every_class_does():
    path = [[(0, 400), (0, 400)], [(1, 500), (9, 500)]]
    certificate = certify_every_class(path, 0.99, 0.05, ("cat", "dog"))
    assert certificate.deployed == 0
    assert certificate.by_class == (ClassCounts("cat", 0, 400), ClassCounts("dog", 0, 400))
    assert certify_every_class([[(0, 400), (0, 298)]], 0.99, 0.05).deployed is None
    assert certify([(0, 698)], 0.99, 0.05).deployed == 0  # overall it would


def test_a_class_with_too_few_inputs_is_named():
    sentence = certify_every_class([[(0, 400), (0, 120)]], 0.99, 0.05, ("cat", "dog")).sentence()
    assert sentence == (
        "Agreement of 99 % cannot be certified with 95 % confidence in every class: "
        "class 'dog' has 120 inputs, it takes at least 299 even without any disagreement."
    )


def test_the_sentence_of_every_class_names_the_worst():
    sentence = certify_every_class([[(0, 500), (1, 500)]], 0.99, 0.05).sentence()
    assert sentence == (
        "With 95 % confidence at least 99 % of answers are the base model's in each of 2 classes: "
        "1 of 1000 inputs not used for choosing were answered differently, of class '1' 1 of 500."
    )


def test_classes_are_those_of_the_base_model():
    answer, base = np.array([0, 1, 1, 2]), np.array([0, 0, 1, 1])
    assert count_by_class(answer, base, 4) == ((1, 2), (1, 2), (0, 0), (0, 0))


def test_a_class_nobody_has_seen_is_not_certified():
    certificate = certify_every_class([[(0, 400), (0, 0)]], 0.99, 0.05)
    assert certificate.deployed is None
    counted = certificate.to_json()["by_class"]
    assert [(each["class"], each["losses"], each["n"]) for each in counted] == [("0", 0, 400), ("1", 0, 0)]


# A world with known truth -------------------------------------------------------------------------------

DRAWS, INPUTS, ACCURACY, DELTA = 3000, 600, 0.95, 0.1
TRUE_LOSS = np.array([0.005, 0.01, 0.015, 0.02, 0.0505, 0.06, 0.07, 0.1])  # of each setting


def false_certificates(deployed_of) -> float:
    """Share of draws whose deployed setting is truly below the target.

    An input with a uniform number u is lost at every setting whose loss rate exceeds u: nested settings,
    counted on the same inputs, as thresholds are.
    """
    random = np.random.default_rng(0)
    false = 0
    for _ in range(DRAWS):
        u = random.random(INPUTS)
        path = [(int((u < rate).sum()), INPUTS) for rate in TRUE_LOSS]
        deployed = deployed_of(path)
        false += deployed is not None and TRUE_LOSS[deployed] > 1.0 - ACCURACY
    return false / DRAWS


def allowed() -> float:
    """Delta, and three standard errors of the simulation."""
    return DELTA + 3.0 * (DELTA * (1.0 - DELTA) / DRAWS) ** 0.5


def test_certificates_are_false_no_more_often_than_delta():
    share = false_certificates(lambda path: certify(path, ACCURACY, DELTA).deployed)
    assert 0.0 < share <= allowed()


def test_the_same_simulation_catches_deploying_the_first_that_failed():
    def off_by_one(path):
        deployed = certify(path, ACCURACY, DELTA).deployed
        return 0 if deployed is None else min(deployed + 1, len(path) - 1)

    assert false_certificates(off_by_one) > allowed()


def test_the_same_simulation_catches_taking_the_best_of_all_without_an_order():
    def loosest_that_passes(path):
        passing = [i for i, counts in enumerate(path) if certify([counts], ACCURACY, DELTA).deployed == 0]
        return passing[-1] if passing else None

    # allowed for nested losses, but not for independent ones: there the last of many chances wins
    random = np.random.default_rng(1)
    false = 0
    for _ in range(DRAWS):
        path = [(int(random.binomial(INPUTS, 0.0505)), INPUTS) for _ in range(10)]
        false += loosest_that_passes(path) is not None
    assert false / DRAWS > allowed()


def test_a_class_below_the_target_is_certified_no_more_often_than_delta():
    """Five classes, one of them bad at the last setting: no correction for their number is needed."""
    random = np.random.default_rng(2)
    rates = [[0.01] * 5, [0.01] * 4 + [0.0505]]
    false = 0
    for _ in range(DRAWS):
        inputs = random.multinomial(1500, [0.2] * 5)
        path = [
            [(int(random.binomial(n, rate)), int(n)) for n, rate in zip(inputs, setting, strict=True)]
            for setting in rates
        ]
        false += certify_every_class(path, ACCURACY, DELTA).deployed == 1
    assert 0.0 < false / DRAWS <= allowed()


# What is proven ------------------------------------------------------------------------------------------


def test_a_walk_through_several_settings_proves_the_target_and_one_setting_its_exact_limit():
    walked = certify([(0, 1000), (2, 1000)], 0.99, 0.05)
    assert walked.deployed == 1
    assert walked.to_json()["agreement_lower_bound"] == 0.99
    assert certify([(40, 1000), (0, 1000)], 0.99, 0.05).to_json()["agreement_lower_bound"] is None
    one = certify([(2, 1000)], 0.99, 0.05)
    assert one.to_json()["agreement_lower_bound"] == agreement_lower_bound(2, 1000, 0.05)
    every = certify_every_class([[(0, 500), (1, 500)]], 0.99, 0.05)
    assert every.proven_agreement == agreement_lower_bound(1, 500, 0.05)


def test_the_exact_limit_after_a_walk_is_false_too_often_and_what_is_reported_is_not():
    """The second setting is just below the target, and a limit is said of it, or else of the first."""
    random = np.random.default_rng(3)
    rates, draws = (0.025, 0.0401), 4000
    false = {"limit": 0, "reported": 0}
    for _ in range(draws):
        certificate = certify([(int(random.binomial(1500, rate)), 1500) for rate in rates], 0.96, 0.05)
        if certificate.deployed is None:
            continue
        true = 1.0 - rates[certificate.deployed]
        false["limit"] += agreement_lower_bound(certificate.losses, 1500, 0.05) > true
        false["reported"] += (certificate.proven_agreement or 0.0) > true
    at_most = 0.05 + 3.0 * (0.05 * 0.95 / draws) ** 0.5
    assert false["reported"] / draws <= at_most < false["limit"] / draws


def test_a_share_of_delta_is_what_p_values_are_compared_with():
    assert certify([(33, 1500)], 0.97, 0.05, share=0.9).deployed == 0
    assert certify([(33, 1500)], 0.97, 0.05, share=0.3).deployed is None
    tenth = certify([(2, 1000)], 0.99, 0.05, share=0.1)
    assert tenth.proven_agreement == agreement_lower_bound(2, 1000, tenth.level)
    document = certify([(0, 400)], 0.99, 0.05, share=0.1).to_json()
    assert (document["level"], document["required_inputs"]) == (pytest.approx(0.005), 528)
    assert "it takes at least 528" in document["sentence"]
    by_class = certify_every_class([[(0, 400), (0, 500)]], 0.99, 0.05, share=0.1)
    assert "it takes at least 528" in by_class.sentence()
    limit = agreement_lower_bound(20, 1000, 0.005)
    failed = certify([(20, 1000)], 0.99, 0.05, share=0.1).sentence()
    assert failed.endswith(f"which certifies {at_least(limit)} %.") and limit < 0.968
    for share in (0.0, 1.5):
        with pytest.raises(CompositionError, match=f"share of delta is {share}"):
            certify([(0, 400)], 0.99, 0.05, share=share)


def test_a_path_is_counted_no_further_than_the_walk_goes():
    def path():
        yield 0, 1000
        yield 40, 1000
        raise AssertionError("counted beyond the first that failed")

    certificate = certify(path(), 0.99, 0.05, settings=7)
    assert (certificate.deployed, certificate.settings) == (0, 7)
    with pytest.raises(TypeError, match="needs settings"):
        certify(path(), 0.99, 0.05)
