"""The certified drop of true accuracy: counts, and a bound that holds after choosing among settings."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from gati.composition.accuracy import accuracy_drop

classes = st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=1, max_size=60)


@given(classes)
def test_the_net_change_of_accuracy_is_what_became_right_less_what_became_wrong(rows):
    answer, base, label = np.array(rows).T
    drop = accuracy_drop(answer, base, label, 0.05)
    change = (answer == label).sum() - (base == label).sum()
    assert drop.became_right - drop.became_wrong == change
    assert (base == label).mean() - (answer == label).mean() <= drop.upper_bound
    assert json.loads(json.dumps(drop.to_json(), allow_nan=False))["n"] == len(rows)


def test_the_bound_is_the_rate_under_which_so_few_losses_are_as_rare_as_delta():
    label = np.zeros(500, dtype=np.int64)
    answer = np.where(np.arange(500) < 7, 1, 0)
    bound = accuracy_drop(answer, label, label, 0.05).upper_bound
    assert abs(binom.cdf(7, 500, bound) - 0.05) < 1e-9
    shared = accuracy_drop(answer, label, label, 0.05, settings=37).upper_bound
    assert abs(binom.cdf(7, 500, shared) - 0.05 / 37) < 1e-9
    part = accuracy_drop(answer, label, label, 0.05, settings=37, share=0.75).upper_bound
    assert abs(binom.cdf(7, 500, part) - 0.75 * 0.05 / 37) < 1e-9


def test_the_bound_holds_for_whichever_setting_looks_best():
    """The one with the fewest losses is taken: the shared bound holds, the plain one does not."""
    random = np.random.default_rng(0)
    draws, inputs, settings, rate, delta = 2000, 300, 20, 0.05, 0.1
    label = np.zeros(inputs, dtype=np.int64)
    false = {1: 0, settings: 0}
    for _ in range(draws):
        losses = random.binomial(inputs, rate, settings).min()
        answer = np.where(np.arange(inputs) < losses, 1, 0)
        for shares in false:
            false[shares] += accuracy_drop(answer, label, label, delta, settings=shares).upper_bound < rate
    allowed = delta + 3.0 * (delta * (1.0 - delta) / draws) ** 0.5
    assert false[settings] / draws <= allowed
    assert false[1] / draws > allowed


def test_the_sentence_says_what_was_counted():
    base = np.array([0, 0, 1, 1])
    sentence = accuracy_drop(np.array([0, 1, 0, 1]), base, np.array([0, 0, 0, 1]), 0.05).sentence()
    beginning = (
        "As a separate statement, with 95 % confidence early answers cost at most 75.14 points of accuracy: "
    )
    assert sentence.startswith(beginning)
    assert sentence.endswith("of 4 labelled inputs 1 became wrong and 1 right.")
