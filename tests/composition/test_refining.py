"""Settings between those of a path: what is skipped passes, and what is not run is known."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.composition.binomial import p_value
from gati.composition.certified import Proposal, propose
from gati.composition.contests import FEW_STEPS, path_within
from gati.composition.exact import ExactChoice
from gati.composition.instance import Instance, make_instance
from gati.composition.outcomes import EngineOutcomes
from gati.composition.plans import Settings
from gati.composition.refining import refined, wrong_in_between
from gati.composition.replay import ExitCost, Replay, ReplayExit, replay
from gati.composition.risk import smoothed_loss
from gati.composition.verdicts import count_losses
from gati.exploration.library import CERTIFY, SELECT, Library, TrialOutcomes
from tests.composition.libraries import make_library
from tests.composition.test_coarse_engines import Coarse

ACCURACY, DELTA, INPUTS = 0.95, 0.05, 400


@st.composite
def neighbours(draw: st.DrawFn) -> tuple[Replay, Replay, Replay]:
    """A strict, a middle and a loose setting of the same exits, replayed on random outcomes."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    exits, inputs = draw(st.integers(1, 4)), 60
    scores = random.normal(size=(exits, inputs)).astype(np.float32)
    predicted = random.integers(0, 3, size=(exits, inputs))
    base_class = random.integers(0, 3, inputs)
    thresholds = np.sort(random.normal(size=(3, exits)), axis=0)[::-1]
    cost = ExitCost(1.0, 0.5, 0.1)

    def replayed(at: int) -> Replay:
        every = zip(scores, predicted, thresholds[at], strict=True)
        return replay([ReplayExit(s, p, float(t), cost) for s, p, t in every], base_class, 9.0)

    return replayed(0), replayed(1), replayed(2)


@settings(deadline=None)
@given(neighbours())
def test_in_between_an_input_leaves_no_later_than_at_the_stricter_and_no_earlier_than_at_the_looser(
    found: tuple[Replay, Replay, Replay],
) -> None:
    strict, middle, loose = found
    assert (loose.left_at <= middle.left_at).all() and (middle.left_at <= strict.left_at).all()
    assert not (middle.wrong & ~wrong_in_between(strict, loose)).any()
    alike = (strict.left_at == loose.left_at) & (strict.answer == loose.answer)
    assert (middle.answer[alike] == strict.answer[alike]).all()


def exits_of(choice: ExactChoice) -> list[int]:
    return [trial for trial, _ in choice.chosen]


def with_a_copy(seed: int) -> Instance:
    """A cheap early exit that is often wrong, and a late one that hardly ever is and saves little."""
    random = np.random.default_rng(seed)
    rank = np.argsort(np.argsort(random.uniform(size=INPUTS))) / INPUTS  # how hard an input is
    wrong = np.stack([random.uniform(size=INPUTS) < 0.5 * rank**2, random.uniform(size=INPUTS) < 0.005])
    return make_instance(
        block=[0, 1],
        score=np.stack([-rank, random.uniform(size=INPUTS)]).astype(np.float32),
        wrong=wrong,
        reach_ms=[0.0, 0.3],
        lookup_ms=[0.3, 2.2],
        penalty_ms=[0.3, 2.2],
        memory_bytes=[1, 1],
        base_ms=3.0,
    )


def test_where_exits_change_the_old_ones_are_loosened_first() -> None:
    loosened = 0
    for seed in range(8):
        instance = with_a_copy(seed)
        path = path_within(instance, (1.0 - ACCURACY) * INPUTS, FEW_STEPS)
        fine, main = refined(instance, path)
        risky = replace(instance, loss=smoothed_loss(instance))
        places = [fine.index(choice) for choice in path]
        assert set(places) <= set(main) and places == sorted(places)
        for strict, loose in pairwise(places):
            if exits_of(fine[strict]) == exits_of(fine[loose]):
                continue
            most = max(risky.outcome(fine[at].chosen).disagreements for at in (strict, loose))
            for before, choice in pairwise(fine[strict:loose]):
                assert exits_of(choice) == exits_of(fine[strict])
                assert all(a[1] <= b[1] for a, b in zip(before.chosen, choice.chosen, strict=True))
                assert choice.outcome.mean_latency_ms < before.outcome.mean_latency_ms
                assert risky.outcome(choice.chosen).disagreements < most
                loosened += 1
    assert loosened >= 5


def proposed(
    folder: Path, seed: int, each: int, *, accuracy: float = ACCURACY, per_class: bool = False
) -> tuple[Library, Coarse, Proposal]:
    library = make_library(folder, quality=4.0, inputs=INPUTS, certify=INPUTS, seed=seed)
    engine = Coarse(library, each=each)
    wanted = Settings(accuracy=accuracy, slowdown=None, per_class=per_class)
    return library, engine, propose(library, wanted, ["inline"], EngineOutcomes(library, SELECT, engine), 400)


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.02])
@pytest.mark.parametrize("seed", range(6))
def test_a_walk_ends_where_one_that_counts_every_setting_ends(
    tmp_path: Path, seed: int, share: float
) -> None:
    library, engine, proposal = proposed(tmp_path, seed, each=100)
    assert len(proposal.path) > len(proposal.main)
    latencies = [choice.outcome.mean_latency_ms for choice in proposal.path]
    assert latencies == sorted(latencies, reverse=True)
    split = EngineOutcomes(library, CERTIFY, engine)
    certificate, position = proposal.walk(split, share)
    counts = [count_losses(library, proposal.settings, each, split)[0] for each in proposal.candidates]
    passes = [p_value(*each, ACCURACY) <= share * DELTA for each in counts]
    every = passes.index(False) - 1 if False in passes else len(passes) - 1
    assert position == (None if every < 0 else every)
    if position is not None:
        assert (certificate.losses, certificate.inputs) == counts[position]


@pytest.mark.slow
def test_a_setting_that_loses_more_than_both_its_neighbours_ends_the_walk(tmp_path: Path) -> None:
    """The cache is wrong on the inputs that leave first, right on those after, which the engine loses."""
    library = make_library(tmp_path, variants=1, quality=4.0, inputs=INPUTS, certify=INPUTS)
    alone = [
        replace(each, status="trained" if each.block_index == 1 else "skipped") for each in library.trials
    ]
    library.write_trials(alone, list(library.operating_points))
    library = Library.open(library.directory)
    engine = Coarse(library, each=10**6)
    wanted = Settings(accuracy=ACCURACY, slowdown=None)
    proposal = propose(library, wanted, ["inline"], EngineOutcomes(library, SELECT, engine), INPUTS)
    strict, loose = next((a, b) for a, b in pairwise(proposal.main[1:]) if b - a > 4)
    base, (trial,) = library.base_outcomes(), [each.trial_id for each in proposal.candidates[loose]]
    score = library.outcomes(trial).score.copy()
    high, low = (proposal.candidates[at][0].threshold for at in (strict, loose))
    certify = np.flatnonzero(base.split == CERTIFY)
    first, second, others = certify[:8], certify[8:16], certify[16:]
    score[others] = high + 1.0
    score[first], score[second] = high - 0.1 * (high - low), low + 0.1 * (high - low)
    predicted = base.base_class.copy()
    predicted[first] += 1
    library.write_outcomes(trial, TrialOutcomes(score, predicted))
    engine._lost[:] = False
    engine._lost[second] = True
    split = EngineOutcomes(library, CERTIFY, engine)
    lost = [
        count_losses(library, wanted, proposal.candidates[at], split)[0].losses for at in range(loose + 1)
    ]
    assert (lost[strict], max(lost[strict:loose]), lost[loose]) == (8, 16, 8)
    _, position = proposal.walk(split)
    assert position is not None and strict <= position < loose


@pytest.mark.slow
def test_a_walk_that_certifies_every_class_counts_every_setting(tmp_path: Path) -> None:
    """That two neighbours pass says nothing of a class in between."""
    library, engine, proposal = proposed(tmp_path, seed=2, each=100, accuracy=0.6, per_class=True)
    assert len(proposal.path) > len(proposal.main)
    certificate, position = proposal.walk(EngineOutcomes(library, CERTIFY, engine))
    assert position is not None and position > proposal.main[2]
    assert len(certificate.tested) == min(position + 2, len(proposal.path))


@pytest.mark.slow
def test_it_ends_beyond_the_setting_where_a_walk_without_them_ends(tmp_path: Path) -> None:
    farther = 0
    for seed in sorted(range(12), key=lambda seed: seed not in (4, 10)):  # it now does so with these two
        library, engine, proposal = proposed(tmp_path / str(seed), seed, each=100)
        _, position = proposal.walk(EngineOutcomes(library, CERTIFY, engine))
        farther += position not in (None, *proposal.main)
        if farther == 2:
            return
    pytest.fail("of 12 walks, at most one ended there")
