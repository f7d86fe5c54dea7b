"""Replaying held-out outcomes, against a loop that takes one input after the other."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gati.composition.candidates import LEAST_OVERLAPPED_PENALTY
from gati.composition.compose import compose
from gati.composition.outcomes import cost_of
from gati.composition.prospects import problem_deployed
from gati.composition.replay import ExitCost, ReplayExit, exit_costs, replay
from gati.errors import DataError
from tests.composition.libraries import make_library, rewrite
from tests.oracles import replay_one_by_one


@st.composite
def replays(draw):
    count = draw(st.integers(1, 30))
    classes = arrays.arrays(np.int64, count, elements=st.integers(0, 2))
    scores = arrays.arrays(np.float32, count, elements=st.sampled_from((-1.0, 0.1, 0.5, 0.7, 2.0)))
    exits = [
        ReplayExit(
            score=draw(scores),
            predicted=draw(classes),
            threshold=draw(st.sampled_from((-2.0, 0.1, 0.5, 0.7, 5.0))),
            cost=ExitCost(
                reach_ms=float(position + 1),
                lookup_ms=draw(st.sampled_from((0.0, 0.25))),
                penalty_ms=draw(st.sampled_from((0.0, 0.25, 1.0))),
            ),
        )
        for position in range(draw(st.integers(0, 4)))
    ]
    return exits, draw(classes)


@given(replays())
def test_replay_equals_sending_one_input_after_the_other(case):
    exits, base_class = case
    mean_ms, hits, wrong = replay_one_by_one(exits, base_class, 6.0)
    outcome = replay(exits, base_class, 6.0)
    assert outcome.mean_latency_ms == pytest.approx(mean_ms)
    assert list(outcome.hits) == hits
    assert list(outcome.wrong) == wrong
    assert outcome.hit_rate == pytest.approx(sum(hits) / len(base_class))
    assert outcome.agreement == pytest.approx(1 - sum(wrong) / len(base_class))
    assert [int((outcome.left_at == i).sum()) for i in range(len(exits) + 1)] == [
        *hits,
        len(base_class) - sum(hits),
    ]
    assert sum(outcome.hits) - sum(outcome.agreeing) == sum(wrong)


def test_a_score_equal_to_the_threshold_is_a_hit_in_single_precision():
    score = np.array([0.1], dtype=np.float32)
    # 0.1 in double is below 0.1 in single
    exit_ = ReplayExit(score, np.array([1]), 0.1, ExitCost(1.0, 0.0, 0.0))
    assert replay([exit_], np.array([1]), 2.0).hits == (1,)


@pytest.mark.parametrize("placement", ["inline", "overlapped"])
def test_a_composition_knows_what_its_exits_cost(tmp_path, placement):
    """Lookups on cores that the network lacks may add more to a miss than they take."""
    library = rewrite(make_library(tmp_path, overlapped=True), overlapped_penalty_ms=0.11)
    composition = compose(library.directory, accuracy=0.9, objective="full", placement=placement)
    assert len(composition.exits) > 1
    problem = problem_deployed(composition, library)
    for found, candidate in zip(exit_costs(composition.exits), problem.candidates, strict=True):
        assert astuple(found) == pytest.approx(astuple(cost_of(problem, candidate)))
    older = exit_costs([replace(each, penalty_ms=None) for each in composition.exits])
    least = 1.0 if placement == "inline" else LEAST_OVERLAPPED_PENALTY
    assert [each.penalty_ms for each in older] == [least * each.lookup_ms for each in older]


def test_without_inputs_there_is_nothing_to_replay():
    with pytest.raises(DataError, match="no held-out inputs"):
        replay([], np.array([], dtype=np.int64), 1.0)
