"""The exact form: program and search against brute force, bound below both, limits kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.composition.contests import path_within
from gati.composition.exact import exact_program, fits_program, merge_inputs, solve_exact, solve_program
from gati.composition.instance import Instance, make_instance
from gati.composition.priced_bound import priced_bound_ms
from gati.composition.search import Searcher, improve_own, improve_priced, improve_within, search_frontier
from gati.composition.solvers import SOLVERS, MixedIntegerProgram, Solution
from gati.errors import SolverError, UnsolvedError
from tests.composition.solving import require
from tests.oracles import best_exact_latency

pytestmark = pytest.mark.slow

few = settings(max_examples=30, deadline=None, derandomize=True)


@st.composite
def instances(draw, *, trials: int = 4, inputs: int = 8, levels: int = 5) -> Instance:
    count = draw(st.integers(1, inputs))
    blocks = sorted(draw(st.lists(st.integers(0, 3), min_size=1, max_size=trials)))
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    lookup = random.integers(1, 60, len(blocks)) / 100
    inline = draw(st.booleans())
    first = draw(st.sampled_from((0, 1)))  # 0: reads the input, as students, companions, the network itself
    share = draw(st.sampled_from((1 / 8, 1.5)))  # more than the lookup: the network lacks its cores
    return make_instance(
        block=blocks,
        score=random.integers(0, levels, (len(blocks), count)).astype(np.float32),
        wrong=random.random((len(blocks), count)) < draw(st.sampled_from((0.05, 0.3, 0.6))),
        reach_ms=[0.3 * (block + first) for block in blocks],
        lookup_ms=lookup,
        penalty_ms=lookup if inline else share * lookup,
        memory_bytes=random.integers(1, 5000, len(blocks)),
        base_ms=1.5,
        memory_limit_bytes=draw(st.none() | st.integers(1, 9000)),
        one_lookup_at_a_time=not inline,
        slowdown_limit_ms=draw(st.none() | st.integers(1, 90).map(lambda hundredth: hundredth / 100)),
    )


def hard_instance(inputs: int = 300, blocks: int = 6, variants: int = 3, seed: int = 0) -> Instance:
    """Large enough that only the search takes it: scores rise with the margin of the answer."""
    random = np.random.default_rng(seed)
    hardness = random.beta(1.0, 3.0, inputs)
    block = np.repeat(np.arange(blocks), variants)
    margin = (
        0.1 + 0.8 * (block[:, None] + 1) / blocks - hardness + random.normal(0, 0.15, (len(block), inputs))
    )
    lookup = np.tile(0.03 + 0.02 * np.arange(variants), blocks)
    return make_instance(
        block=block,
        score=(margin + random.normal(0, 0.1, margin.shape)).astype(np.float32),
        wrong=margin < 0,
        reach_ms=0.2 * (block + 1),
        lookup_ms=lookup,
        penalty_ms=lookup,
        memory_bytes=np.tile(1000 * (1 + np.arange(variants)), blocks),
        base_ms=0.2 * blocks + 0.1,
    )


@pytest.mark.parametrize(("answers", "composed"), [(33, [0]), (36, [0, 1])])
def test_an_exit_must_save_a_tenth_of_what_it_adds_to_a_miss(answers: int, composed: list[int]) -> None:
    """The second exit takes half of the network's time; so it must make the mean 5 % smaller."""
    score = np.zeros((2, 100), np.float32)
    score[0, :40] = 1.0  # answered by the first exit
    score[1, 40 : 40 + answers] = 1.0
    instance = make_instance(
        block=[0, 1], score=score, wrong=score < 1.0, reach_ms=[0.0, 0.0], lookup_ms=[0.1, 0.5],
        penalty_ms=[0.1, 0.5], memory_bytes=[1, 1], base_ms=1.0,
    )  # fmt: skip
    both, first = ((0, 40), (1, answers)), ((0, 40),)
    saved = 1.0 - instance.outcome(both).mean_latency_ms / instance.outcome(first).mean_latency_ms
    assert (saved > 0.05) == (len(composed) == 2)
    path = path_within(instance, 5.0)
    assert [trial for trial, _ in path[-1].chosen] == composed


@pytest.mark.parametrize("prove", [False, True])
def test_without_any_trial_nothing_is_chosen_and_that_is_proven(prove: bool) -> None:
    """Every lookup was measured to take longer than it could save, as on a busy machine."""
    nothing = make_instance(
        block=[], score=np.empty((0, 20), np.float32), wrong=np.empty((0, 20), bool), reach_ms=[],
        lookup_ms=[], penalty_ms=[], memory_bytes=[], base_ms=1.5,
    )  # fmt: skip
    found = solve_exact(nothing, 3, frontier=search_frontier(nothing), prove=prove)
    assert (found.chosen, found.bound_ms, found.outcome.mean_latency_ms) == ((), 1.5, 1.5)
    assert found.outcome.disagreements == 0


@pytest.mark.parametrize("solver", sorted(SOLVERS))
@few
@given(instance=instances(trials=3, inputs=6, levels=4), budget=st.integers(0, 3))
def test_the_program_reaches_the_least_replayed_latency_there_is(solver, instance, budget):
    require(solver)
    choice = solve_program(instance, budget, solver=solver)
    assert choice.outcome.mean_latency_ms == pytest.approx(best_exact_latency(instance, budget), abs=1e-6)
    assert choice.bound_ms == pytest.approx(choice.outcome.mean_latency_ms, abs=1e-5)
    assert choice.outcome.disagreements <= budget


@settings(max_examples=60, deadline=None, derandomize=True)
@given(instance=instances(), budget=st.integers(0, 4))
def test_the_search_is_never_better_than_brute_force_and_keeps_every_limit(instance, budget):
    best = best_exact_latency(instance, budget)
    found = search_frontier(instance).within(budget)
    outcome = instance.outcome(found)
    assert instance.allows(found)
    assert outcome.disagreements <= budget
    assert best - 1e-9 <= outcome.mean_latency_ms <= instance.base_ms + 1e-9


def test_the_search_finds_the_optimum_of_nearly_all_small_instances():
    excess = []
    for seed in range(24):
        instance = hard_instance(inputs=10, blocks=3, variants=1, seed=seed)
        outcome = instance.outcome(search_frontier(instance).within(1))
        excess.append(outcome.mean_latency_ms / best_exact_latency(instance, 1) - 1.0)
    assert np.mean(np.array(excess) < 1e-9) >= 0.9
    assert max(excess) < 0.1


@settings(max_examples=100, deadline=None, derandomize=True)
@given(instance=instances(), budget=st.integers(0, 4), steps=st.sampled_from((1, 5, 60)))
def test_the_priced_bound_is_below_every_composition_however_far_it_is_driven(instance, budget, steps):
    assert priced_bound_ms(instance, budget, steps=steps) <= best_exact_latency(instance, budget) + 1e-9


def test_the_priced_bound_is_at_least_the_time_to_the_fastest_exit_if_many_losses_are_allowed():
    """The first price of a loss is far too high then, and a large instance gets few steps."""
    instance = hard_instance(inputs=600, blocks=8)
    fastest = float((instance.reach_ms + instance.lookup_ms).min())
    assert priced_bound_ms(instance, 360, steps=1) == pytest.approx(fastest)


def test_the_priced_bound_comes_close_where_one_exit_a_block_is_all_there_is_to_choose():
    for seed in range(5):
        instance = hard_instance(inputs=12, blocks=3, variants=1, seed=seed)
        best = best_exact_latency(instance, 1)
        assert 0.8 * best <= priced_bound_ms(instance, 1) <= best + 1e-9


def test_the_priced_bound_closes_most_of_the_gap_of_a_large_instance():
    instance = hard_instance(inputs=600, blocks=8)
    for budget in (6, 18):
        found = solve_exact(instance, budget, prove=False).outcome.mean_latency_ms
        oracle, priced = (priced_bound_ms(instance, budget, steps=steps) for steps in (1, 400))
        assert oracle < priced <= found
        assert found - priced < 0.6 * (found - oracle)


def test_the_priced_bound_counts_what_limits_use_up():
    """What lookups may add to a miss, and memory, raise it: without them many cheap exits seem possible."""
    free = hard_instance(inputs=300, blocks=8)
    limits = replace(free, slowdown_limit_ms=0.1 * free.base_ms), replace(free, memory_limit_bytes=3000)
    for limited in limits:
        assert priced_bound_ms(limited, 3) > priced_bound_ms(free, 3) + 0.01 * free.base_ms


@few
@given(instance=instances(inputs=12), data=st.data())
def test_a_pass_over_all_moves_predicts_what_a_replay_of_each_gives(instance, data):
    start = search_frontier(instance).within(data.draw(st.integers(0, 6)))
    moves = Searcher(instance).moves(start)
    for trial in range(instance.trials):
        others = [pair for pair in start if instance.block[pair[0]] != instance.block[trial]]
        dropped = instance.outcome(tuple(others))
        assert moves.without_ms[trial] == pytest.approx(dropped.mean_latency_ms * instance.inputs)
        assert moves.without_disagreements[trial] == pytest.approx(dropped.disagreements)
        for cut in np.flatnonzero(instance.may_cut[trial]) + 1:
            moved = tuple(sorted([*others, (trial, int(cut))]))
            if not instance.allows(moved):
                assert moves.latency_ms[trial, cut - 1] == np.inf
                continue
            outcome = instance.outcome(moved)
            assert moves.latency_ms[trial, cut - 1] == pytest.approx(
                outcome.mean_latency_ms * instance.inputs
            )
            assert moves.disagreements[trial, cut - 1] == pytest.approx(outcome.disagreements)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(instance=instances(inputs=12), only_loosen=st.booleans(), data=st.data())
def test_a_search_among_own_exits_finds_what_one_with_all_others_forbidden_does(instance, only_loosen, data):
    budget = data.draw(st.integers(0, 6))
    start = search_frontier(instance).within(budget)
    may_cut = np.zeros_like(instance.may_cut)
    for trial, cut in start:
        first = cut - 1 if only_loosen else 0
        may_cut[trial, first:] = instance.may_cut[trial, first:]
    forbidden = Searcher(replace(instance, may_cut=may_cut))
    more = budget + data.draw(st.integers(0, 3))
    expected = improve_within(forbidden, start, more, thorough=False)
    assert improve_own(instance, start, more, only_loosen=only_loosen) == expected


def test_a_search_among_own_exits_does_not_pass_over_all_trials(monkeypatch):
    instance = hard_instance()
    start, passed = search_frontier(instance).within(6), []
    made = Searcher.__init__

    def noted(self, of):
        passed.append(of.trials)
        made(self, of)

    monkeypatch.setattr(Searcher, "__init__", noted)
    assert improve_own(instance, start, 6)
    assert passed == [len(start)] and 0 < len(start) < instance.trials


def test_more_budget_never_makes_the_result_slower():
    instance = hard_instance()
    frontier = search_frontier(instance)
    latencies = [instance.outcome(frontier.within(budget)).mean_latency_ms for budget in (0, 1, 3, 6, 12, 24)]
    again = [instance.outcome(frontier.within(budget)).mean_latency_ms for budget in (0, 1, 3, 6, 12, 24)]
    assert again == sorted(again, reverse=True)
    assert all(later <= first + 1e-9 for later, first in zip(again, latencies, strict=True))


def test_the_program_of_one_cache_and_many_inputs_has_few_coefficients():
    """With one for each pair of inputs, solvers ran into their limit of a minute."""
    instance = hard_instance(inputs=600, blocks=1, variants=1)
    assert fits_program(instance)
    program, _ = exact_program(instance, 6)
    assert sum(len(row.coefficients) for row in program.rows) < 20 * instance.inputs


def test_a_large_instance_is_searched_and_the_gap_is_stated():
    instance = hard_instance()
    assert not fits_program(instance)
    choice = solve_exact(instance, 3)
    assert choice.solver == "search"
    assert 0.0 < choice.bound_ms <= choice.outcome.mean_latency_ms < instance.base_ms
    assert 0.0 <= choice.gap < 1.0


def test_memory_and_one_lookup_at_a_time_bind_the_search():
    free = hard_instance()
    limited = make_instance(
        block=free.block,
        score=_scores(free),
        wrong=free.wrong,
        reach_ms=free.reach_ms,
        lookup_ms=np.full(free.trials, 0.5),
        penalty_ms=np.full(free.trials, 0.01),
        memory_bytes=free.memory_bytes,
        base_ms=free.base_ms,
        memory_limit_bytes=2500,
        one_lookup_at_a_time=True,
    )
    chosen = solve_exact(limited, 10).chosen
    assert chosen and limited.allows(chosen)
    blocks = [int(limited.block[trial]) for trial, _ in chosen]
    assert all(later - earlier >= 3 for earlier, later in zip(blocks, blocks[1:], strict=False))


def _scores(instance: Instance) -> np.ndarray:
    scores = np.empty_like(instance.score)
    np.put_along_axis(scores, instance.order, instance.score, axis=1)
    return scores


def test_a_threshold_lies_strictly_between_hits_and_misses():
    instance = make_instance(
        block=[0],
        score=np.array([[0.5, 0.25, 0.5, 0.75]], dtype=np.float32),
        wrong=np.zeros((1, 4), dtype=bool),
        reach_ms=[1.0],
        lookup_ms=[0.1],
        penalty_ms=[0.1],
        memory_bytes=[10],
        base_ms=2.0,
    )
    assert np.flatnonzero(instance.may_cut[0]).tolist() == [0, 2, 3]
    assert [instance.threshold(0, cut) for cut in (1, 3, 4)] == [0.625, 0.375, 0.25]


def test_a_threshold_tells_neighbouring_numbers_apart():
    """Half-way between them is one of them, which may be the one that must not hit."""
    scores = [np.float32(0.5)]
    for _ in range(4):
        scores.append(np.nextafter(scores[-1], np.float32(1.0)))
    instance = make_instance(
        block=[0], score=np.array([scores]), wrong=np.zeros((1, 5), dtype=bool), reach_ms=[1.0],
        lookup_ms=[0.1], penalty_ms=[0.1], memory_bytes=[10], base_ms=2.0,
    )  # fmt: skip
    for cut in range(1, 6):
        assert int((instance.score[0] >= np.float32(instance.threshold(0, cut))).sum()) == cut


def test_inputs_that_every_trial_treats_alike_are_merged():
    instance = make_instance(
        block=[0, 1],
        score=np.array([[1, 1, 1, 0], [2, 2, 3, 3]], dtype=np.float32),
        wrong=np.array([[0, 0, 0, 1], [0, 0, 0, 0]], dtype=bool),
        reach_ms=[1.0, 2.0],
        lookup_ms=[0.1, 0.1],
        penalty_ms=[0.1, 0.1],
        memory_bytes=[10, 10],
        base_ms=3.0,
    )
    groups, wrong, count = merge_inputs(instance)
    assert sorted(count.tolist()) == [1, 1, 2]
    assert groups.shape == wrong.shape == (2, 3)


def test_descents_end_where_they_began_when_nothing_improves():
    instance = hard_instance()
    searcher = Searcher(instance)
    settled = improve_priced(searcher, (), 5.0)
    assert improve_priced(searcher, settled, 5.0) == settled
    within = improve_within(searcher, (), 4)
    assert improve_within(searcher, within, 4) == within


def test_without_an_answer_in_its_time_the_search_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = hard_instance(inputs=20, blocks=2, variants=1)
    assert fits_program(instance)
    proven = solve_exact(instance, 2)

    def late(*_: object, **__: object) -> None:
        raise UnsolvedError("no solution yet")

    monkeypatch.setattr("gati.composition.exact.solve", late)
    found = solve_exact(instance, 2)
    assert found.solver == "search"
    assert found.outcome.disagreements <= 2
    assert 0 < found.bound_ms <= proven.outcome.mean_latency_ms <= found.outcome.mean_latency_ms + 1e-9
    with pytest.raises(UnsolvedError, match="no solution yet"):
        solve_exact(instance, 2, solver="highs")


def test_a_solver_that_breaks_a_limit_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever asked for any solver gets the result of the search, and a warning."""
    instance = hard_instance(inputs=20, blocks=2, variants=1)

    def greedy(program: MixedIntegerProgram, _: str) -> Solution:  # every input leaves at once
        return Solution(np.ones(len(program.names)), 0.0, 0.0, "optimal", "highs")

    monkeypatch.setattr("gati.composition.exact.solve", greedy)
    with pytest.raises(SolverError, match="highs chose caches that break a limit.*report this"):
        solve_exact(instance, 0, solver="highs")
    assert not caplog.records
    found = solve_exact(instance, 0)
    assert found.solver == "search" and found.outcome.disagreements == 0
    assert "highs chose caches that break a limit" in caplog.text
