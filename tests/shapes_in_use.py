"""Calls of every annotated function; only run by `tests/test_shapes.py`, with shapes executed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

from gati.caches import LearnedCache, distillation_loss, feature_loss, selector_loss
from gati.caches.selectors import build_selector, fit_selector_networks, fit_temperature, selector_names
from gati.composition.accuracy import accuracy_drop
from gati.composition.copies import counted
from gati.composition.walk import count_by_class
from gati.engine.engine import Engine
from gati.evaluation.by_class import count_classes
from gati.model.identity import CopyCounts
from tests.engine.networks import CLASSES, traced_network

ROWS, K = 7, 4
PROBABILITIES = torch.full((ROWS, K), 1.0 / K)
CLASS = torch.zeros(ROWS, dtype=torch.int64)
AGREES = torch.arange(ROWS) % 2 == 0


@pytest.mark.parametrize("name", selector_names())
def test_a_selector_scores_each_row(name: str) -> None:
    selector = build_selector(name, K)
    assert selector(PROBABILITIES).shape == (ROWS,)
    with pytest.raises(TypeCheckError):
        selector(PROBABILITIES[0])


def test_selectors_are_fitted_on_as_many_answers_as_rows() -> None:
    assert fit_temperature(PROBABILITIES, CLASS)(PROBABILITIES).shape == (ROWS,)
    assert fit_selector_networks(PROBABILITIES, AGREES, seed=0, steps=2).held_out_scores.shape == (ROWS,)
    with pytest.raises(TypeCheckError):
        fit_temperature(PROBABILITIES, CLASS[1:])
    with pytest.raises(TypeCheckError):
        fit_selector_networks(PROBABILITIES, AGREES[1:], seed=0, steps=2)


def test_losses_are_scalars() -> None:
    weights = torch.ones(ROWS)
    assert distillation_loss(PROBABILITIES, PROBABILITIES, row_weights=weights).shape == ()
    assert feature_loss(PROBABILITIES, PROBABILITIES, row_weights=weights).shape == ()
    assert selector_loss(PROBABILITIES.T, AGREES).shape == (K,)
    with pytest.raises(TypeCheckError):
        distillation_loss(PROBABILITIES, PROBABILITIES[1:])
    with pytest.raises(TypeCheckError):
        feature_loss(PROBABILITIES, PROBABILITIES, row_weights=weights[1:])
    with pytest.raises(TypeCheckError):
        selector_loss(PROBABILITIES.T, AGREES[1:])


@pytest.mark.parametrize(
    ("variant", "shape"),
    [("grid(8)", (6, 8, 8)), ("pyramid(4)", (6, 9)), ("fc(8)", (12,)), ("conv2d(3,1)", (6, 8, 8))],
)
def test_a_lookup_gives_probabilities_and_a_score(variant: str, shape: tuple[int, ...]) -> None:
    probabilities, score = LearnedCache(variant, shape, K, "margin")(torch.zeros(ROWS, *shape))
    assert (probabilities.shape, score.shape) == ((ROWS, K), (ROWS,))


def test_an_engine_takes_a_batch() -> None:
    traced = traced_network()
    x = traced.example().expand(3, -1, -1, -1)
    with Engine(traced) as engine:
        for answers in (engine(x), engine.inline(x), engine.base(x)):
            assert [each.probabilities.shape for each in answers] == [(CLASSES,)] * 3
        assert engine.reference(x).shape == (3,)
        with pytest.raises(TypeCheckError):
            engine([1, 2, 3])  # type: ignore[arg-type]


def test_answers_are_counted_row_by_row() -> None:
    answer, base, hit = np.array([0, 1, 1]), np.array([0, 1, 0]), np.array([True, False, True])
    copies = CopyCounts(np.array([1, 1, 2]), np.array([1, 0, 1]))
    assert count_by_class(answer, base, 2) == ((1, 2), (0, 1))
    assert [each.n for each in count_classes(answer, base, hit, None)] == [2, 1]
    assert list(counted(answer != base, *copies)) == [0, 2, 2]
    assert accuracy_drop(answer, base, base, 0.05, copies=copies).became_wrong == 2
    for broken in (
        lambda: count_by_class(answer, base[1:], 2),
        lambda: count_classes(answer, base, hit[1:], None),
        lambda: counted(answer != base, *copies.of(np.array([1, 2]))),
        lambda: accuracy_drop(answer, base, base, 0.05, copies=copies.of(np.array([1, 2]))),
        lambda: counted(answer, *copies),  # counts, not flags
    ):
        with pytest.raises(TypeCheckError):
            broken()
