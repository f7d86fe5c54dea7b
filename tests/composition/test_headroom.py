"""What perfect exits would gain, against a loop that takes one input after the other."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.cli import render
from gati.composition.compose import Settings, compose, compose_library
from gati.composition.composition import Composition
from gati.composition.costs import CostedLibrary
from gati.composition.explain import explain
from gati.composition.outcomes import SplitOutcomes
from gati.composition.pareto import compose_within_latency
from gati.composition.problem import Candidate, Problem
from gati.composition.prospects import headroom_of, with_headroom
from gati.errors import CompositionError
from gati.exploration.library import SELECT
from tests.composition.libraries import make_library
from tests.composition.test_coarse_engines import Coarse
from tests.composition.test_costs import costs_of, keep

pytestmark = pytest.mark.usefixtures("unbounded")

NOTHING: frozenset[str] = frozenset()


def one_by_one(problem, select, wishes):
    """Mean latency and agreement with each exit perfect in what its wish, a set of words, names."""
    spent_ms, agreeing = 0.0, 0
    for i, base in enumerate(select.base_class):
        paid_ms = 0.0
        for candidate, wish in zip(problem.candidates, wishes, strict=True):
            outcomes = select.trial(candidate.trial_id)
            agrees = outcomes.predicted[i] == base
            leaves = outcomes.score[i] >= candidate.threshold
            if "knowing" in wish:
                leaves = agrees
            if "right" in wish:
                leaves, agrees = True, True
            if leaves:
                lookup_ms = 0.0 if "free" in wish else candidate.lookup_ms
                spent_ms += problem.reach_ms[candidate.block_index] + paid_ms + lookup_ms
                agreeing += bool(agrees)
                break
            paid_ms += 0.0 if "free" in wish else candidate.penalty_ms
        else:
            spent_ms += problem.base_ms + paid_ms
            agreeing += 1
    return spent_ms / len(select), agreeing / len(select)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    # so many inputs that composing searches rather than proves, which would take seconds
    return make_library(tmp_path_factory.mktemp("headroom") / "library", quality=3.0, inputs=150, certify=60)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make_library(tmp_path_factory.mktemp("headroom") / "small", quality=3.0, inputs=40, certify=20)


def chosen_problem(library, places, thresholds):
    candidates = tuple(
        Candidate(
            trial_id=f"b{block:02d}-v{variant}",
            block_index=block,
            variant="fc(64)",
            threshold=threshold,
            hit_rate=0.5,
            accuracy=0.9,
            lookup_ms=0.04,
            penalty_ms=penalty_ms,
            memory_bytes=1000,
        )
        for (block, variant, penalty_ms), threshold in zip(places, thresholds, strict=True)
    )
    profile = library.manifest.profile
    reach_ms = tuple(block.reach_ms for block in profile.blocks)
    return Problem(reach_ms, profile.base_ms, candidates, 0.9, one_lookup_at_a_time=False)


@given(
    blocks=st.sets(st.integers(0, 3), min_size=1),
    variant=st.integers(0, 1),
    penalty_ms=st.sampled_from((0.0, 0.01, 0.04)),
    thresholds=st.lists(st.floats(-3.0, 3.0, width=32), min_size=4, max_size=4),
)
@settings(max_examples=25, deadline=None)
def test_every_figure_equals_sending_one_input_after_the_other(
    small, blocks, variant, penalty_ms, thresholds
):
    places = [(block, variant, penalty_ms) for block in sorted(blocks)]
    problem = chosen_problem(small, places, thresholds[: len(places)])
    select = SplitOutcomes(small, SELECT)
    found = headroom_of(problem, small, select)
    count = len(places)

    def expect(prospect, wishes):
        mean_ms, agreement = one_by_one(problem, select, wishes)
        assert prospect.mean_latency_ms == pytest.approx(mean_ms)
        assert prospect.agreement == pytest.approx(agreement)
        assert prospect.gain == pytest.approx(problem.base_ms / mean_ms)

    def only(position, wish):
        return [{wish} if at == position else NOTHING for at in range(count)]

    assert found.inputs == len(select)
    expect(found.chosen, [NOTHING] * count)
    expect(found.free, [{"free"}] * count)
    expect(found.oracle, [{"knowing"}] * count)
    expect(found.free_oracle, [{"free", "knowing"}] * count)
    for position, exit_ in enumerate(found.exits):
        assert exit_.trial_id == problem.candidates[position].trial_id
        expect(exit_.free, only(position, "free"))
        expect(exit_.knowing, only(position, "knowing"))
        expect(exit_.right, only(position, "right"))
    assert found.oracle.agreement == 1.0


def test_an_answer_at_the_input_that_costs_nothing_has_a_finite_gain(small):
    problem = chosen_problem(small, [(0, 0, 0.0)], [0.0])
    first = replace(problem.candidates[0], lookup_ms=0.0)
    reach_ms = (0.0, *problem.reach_ms[1:])
    found = headroom_of(replace(problem, reach_ms=reach_ms, candidates=(first,)), small, None)
    assert found.exits[0].right.mean_latency_ms == 0.0
    assert found.exits[0].right.gain == pytest.approx(1000.0)


def test_a_composition_keeps_its_headroom_and_explains_each_exit_by_it(library):
    composition = compose(library.directory, accuracy=0.9, confidence=None)
    headroom = composition.headroom
    assert composition.exits and headroom is not None
    assert headroom.chosen.mean_latency_ms == pytest.approx(composition.expected.mean_latency_ms)
    assert [each.trial_id for each in headroom.exits] == [each.trial_id for each in composition.exits]
    assert Composition.load(library.composition_path()) == composition
    for explanation, own in zip(explain(composition, library), headroom.exits, strict=True):
        assert explanation.headroom == own
        assert explanation.headroom.free.gain > headroom.chosen.gain
        assert explanation.headroom.free.agreement == headroom.chosen.agreement
    assert headroom.free.gain >= max(each.free.gain for each in headroom.exits)


def test_within_a_latency_too(library):
    composition = compose_within_latency(library.directory, 0.8, Settings(name="within"))
    assert composition.headroom is not None
    assert Composition.load(library.composition_path("within")).headroom == composition.headroom


@pytest.mark.slow
def test_without_exits_there_is_none(library):
    composition = compose(library.directory, accuracy=0.9999, name="nothing")
    assert not composition.exits and composition.headroom is None


def test_without_outcomes_it_is_estimated_from_the_table(tmp_path):
    library = make_library(tmp_path / "library", outcomes=False, quality=6.0)
    headroom = compose(library.directory, accuracy=0.95, objective="full").headroom
    assert headroom is not None and headroom.inputs == 0
    for each in headroom.exits:
        assert each.free.gain > headroom.chosen.gain
        assert each.right.gain >= max(each.knowing.gain, headroom.chosen.gain)
        assert min(each.right.agreement, each.knowing.agreement) >= headroom.chosen.agreement
    last = headroom.exits[-1]
    block = next(trial.block_index for trial in library.trials if trial.trial_id == last.trial_id)
    assert last.right.mean_latency_ms <= library.manifest.blocks[block].reach_ms + 0.5


@pytest.mark.slow
def test_of_an_engine_of_reduced_precision_what_it_loses_itself_is_left_out(tmp_path):
    library = make_library(tmp_path / "library", quality=6.0, inputs=2000, certify=2000)
    costs = costs_of(library, "openvino-int8", 4.0)
    keep(library, costs)
    reduced = CostedLibrary(library, costs)
    reduced.__dict__["answers"] = Coarse(library, each=40)  # loses 2.5 % by itself
    composition = with_headroom(compose_library(reduced, Settings(accuracy=0.93, slowdown=None)), library)
    assert composition.headroom is not None
    assert composition.headroom.chosen.agreement > composition.expected.agreement + 0.002
    assert composition.headroom.free_oracle.gain > composition.headroom.oracle.gain


def test_files_of_an_older_gati_have_none_and_damaged_ones_are_refused(library):
    document = json.loads(compose(library.directory, accuracy=0.9, confidence=None).to_json())
    del document["headroom"]
    assert Composition.from_json(json.dumps(document)).headroom is None
    document["headroom"] = {"inputs": 3, "exits": 7}
    with pytest.raises(CompositionError, match="headroom: has no field 'chosen'; run gati compose again"):
        Composition.from_json(json.dumps(document))
    document["headroom"] = "much"
    with pytest.raises(CompositionError, match="field 'headroom' is 'much', expected an object"):
        Composition.from_json(json.dumps(document))


def test_the_table_has_a_row_for_each_exit_and_one_for_all(library, capsys):
    composition = compose(library.directory, accuracy=0.9, confidence=None)
    render.composition(composition, library.directory)
    printed = capsys.readouterr().out
    headroom = composition.headroom
    assert headroom is not None
    for each in headroom.exits:
        gains = (each.free.gain, each.knowing.gain, each.right.gain)
        lines = [line.split() for line in printed.splitlines() if "ms" not in line]
        row = next(words for words in lines if words[:1] == [each.block])
        assert row[1:] == [f"{gain:.2f}x" for gain in gains]
    assert f"with free lookups and perfect selectors {headroom.free_oracle.gain:.2f}x" in printed
    assert "replayed on the select inputs, with the same choice of exits" in printed
    render.composition(replace(composition, headroom=None), library.directory)
    assert "all right" not in capsys.readouterr().out
