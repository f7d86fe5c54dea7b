"""Hit rates and agreement, against counting by hand."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gati.exploration.library import CERTIFY, SELECT
from gati.exploration.measure import accuracy_curve, hit_rate_at, measure_cache
from gati.types import TrialId

records = st.lists(
    st.tuples(st.sampled_from([0.1, 0.2, 0.3, 0.5, 0.8, 0.9]), st.booleans()), min_size=1, max_size=40
)


@given(records)
def test_every_threshold_of_the_curve_counts_what_it_says(record: list[tuple[float, bool]]) -> None:
    score = np.array([row[0] for row in record], dtype=np.float32)
    agrees = np.array([row[1] for row in record])
    thresholds, hits, accuracies = accuracy_curve(score, agrees)
    for threshold, count, accuracy in zip(thresholds, hits, accuracies, strict=True):
        hit = score >= threshold
        assert hit.sum() == count
        assert abs(agrees[hit].mean() - accuracy) < 1e-12
    assert len(thresholds) == len(set(score.tolist()))
    assert (np.diff(thresholds) < 0).all()


@given(records, st.floats(0.05, 1.0))
def test_the_hit_rate_at_an_accuracy_is_the_best_any_threshold_gives(
    record: list[tuple[float, bool]], accuracy: float
) -> None:
    score = np.array([row[0] for row in record], dtype=np.float32)
    agrees = np.array([row[1] for row in record])
    best = 0.0
    for threshold in set(score.tolist()):
        hit = score >= threshold
        if agrees[hit].mean() >= accuracy:
            best = max(best, hit.mean())
    assert hit_rate_at(score, agrees, accuracy) == best


def test_the_score_decides_on_select_inputs_alone() -> None:
    """Turning every certify answer round changes neither selector nor operating points."""
    generator = np.random.default_rng(0)
    probabilities = torch.from_numpy(generator.dirichlet([0.3] * 4, 800)).float()
    split = np.where(np.arange(800) % 2 == 0, SELECT, CERTIFY).astype(np.uint8)
    base_class = probabilities.argmax(1).numpy().copy()
    wrong = generator.random(800) < 1 - probabilities.amax(1).numpy()
    base_class[wrong] = (base_class[wrong] + 1) % 4
    turned = base_class.copy()
    turned[split == CERTIFY] = (turned[split == CERTIFY] + 1) % 4
    parts = ("grid(4)", (4,), nn.Sequential(nn.Linear(4, 4)))
    first = measure_cache(TrialId("t"), parts, probabilities, base_class, split, seed=0)
    second = measure_cache(TrialId("t"), parts, probabilities, turned, split, seed=0)
    assert first.points == second.points
    assert first.cache.selector_name == second.cache.selector_name
    assert first.hit_rate_at_97 == second.hit_rate_at_97
    assert first.agreement == second.agreement  # it breaks ties between two trainings of a cache


def test_a_network_selector_is_used_only_where_it_beats_the_plain_probability() -> None:
    """Class 0 lies, however sure the predictor is: only a selector that sees the class can know."""
    generator = np.random.default_rng(1)
    probabilities = torch.from_numpy(generator.dirichlet([0.1] * 3, 2000)).float()
    predicted = probabilities.argmax(1).numpy()
    split = np.full(2000, SELECT, dtype=np.uint8)
    lies = (predicted == 0) & (generator.random(2000) < 0.5)
    parts = ("grid(4)", (3,), nn.Sequential(nn.Linear(3, 3)))
    liar = measure_cache(TrialId("t"), parts, probabilities, np.where(lies, 1, predicted), split, seed=0)
    assert liar.cache.selector_name == "network"
    noise = generator.random(2000) < 0.02
    honest = measure_cache(
        TrialId("t"), parts, probabilities, np.where(noise, (predicted + 1) % 3, predicted), split, seed=0
    )
    assert honest.cache.selector_name == "maximum-probability"
