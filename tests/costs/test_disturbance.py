"""What counts as disturbed, and what is measured again; clocks are made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from gati.costs.disturbance import MACHINE, Machine, measure_steadily, spikes
from tests.engine.clocks import MadeUp

pytestmark = pytest.mark.usefixtures("measured_again")

Times = list[float]


def series(count: int = 200, *, of_ms: float = 3.0, seed: int = 0) -> Times:
    """Times as a quiet machine gives them: a few percent apart, now and then one twice as long."""
    draw = np.random.default_rng(seed)
    times = of_ms * draw.lognormal(0.0, 0.04, count)
    times[draw.random(count) < 0.01] *= 2.0
    return [float(each) for each in times]


def measured(machine: MadeUp, *attempts: Sequence[Times]) -> tuple[object, list[int]]:
    """Rounds by their attempts; the last one of a round is repeated. Also how often each was measured."""
    counts = [0] * len(attempts)

    def round_of(index: int) -> Callable[[], Times]:
        def run() -> Times:
            times = attempts[index][min(counts[index], len(attempts[index]) - 1)]
            counts[index] += 1
            for each in times:
                machine.request(each)
            return times

        return run

    rounds = [round_of(index) for index in range(len(attempts))]
    found = measure_steadily(rounds, lambda times: [times], machine=machine)
    return found, counts


def test_a_quiet_machine_is_measured_once() -> None:
    rounds = [[series(seed=seed)] for seed in range(20)]
    found, counts = measured(MadeUp(), *rounds)
    assert counts == [1] * 20
    assert (found.disturbed, found.note) == (0, "")
    assert found.rounds == tuple(each for (each,) in rounds)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("count", [12, 256])
def test_quiet_rounds_of_any_size_are_not_suspected(seed: int, count: int) -> None:
    found, counts = measured(MadeUp(), *[[series(count, seed=100 * seed + each)] for each in range(5)])
    assert found.disturbed == 0 and sum(counts) <= 6


def test_a_mean_far_above_the_median_is_a_disturbance_and_is_measured_again() -> None:
    """What `evaluate` once printed: a mean of 9.7 ms where the median was 2.9."""
    torn = [*series(100, of_ms=2.9), *[37.0] * 25]
    assert spikes([torn]) > 2.0
    found, counts = measured(MadeUp(), [series()], [torn, series(seed=1)], [series(seed=2)])
    assert counts == [1, 2, 1]
    assert found.disturbed == 0 and found.rounds[1] == series(seed=1)


def test_what_stays_disturbed_is_said_in_one_line() -> None:
    torn = [*series(100, of_ms=2.9), *[37.0] * 25]
    found, counts = measured(MadeUp(), [series()], [torn], [series()])
    assert counts == [1, 3, 1]
    assert found.disturbed == 1
    assert found.note.startswith("1 of 3 rounds stayed disturbed (requests that do the same work took")
    assert "\n" not in found.note


def test_what_took_long_is_not_measured_again() -> None:
    torn = [*series(100, of_ms=2.9), *[37.0] * 25]

    def measured_within(enough_s: float) -> int:
        machine, count = MadeUp(), 0

        def run() -> Times:
            nonlocal count
            count += 1
            for each in torn:
                machine.request(each)
            return torn

        found = measure_steadily([run], lambda times: [times], machine=machine, enough_s=enough_s)
        assert found.disturbed == 1, "and told all the same"
        return count

    assert [measured_within(each) for each in (1.0, 2.0, 60.0)] == [1, 2, 3]


def test_waiting_for_a_core_is_a_disturbance_even_where_times_agree() -> None:
    """A program that always has half of the core slows every request alike."""
    machine = MadeUp(waiting=lambda number: 0.5)
    found, counts = measured(machine, [series(of_ms=6.0)], [series(of_ms=6.0)])
    assert found.disturbed == 2
    assert "other programs used the processor for 50 % of the time" in found.reason
    assert counts == [2, 2], "where measuring again does not help it is not done for ever"


def test_a_busy_moment_that_passes_leaves_no_trace() -> None:
    machine = MadeUp(waiting=lambda number: 0.6 if number < 300 else 0.01)
    found, counts = measured(machine, *[[series(seed=seed)] for seed in range(4)])
    assert counts == [2, 2, 1, 1]
    assert found.disturbed == 0


def test_where_nobody_counts_waiting_the_times_alone_decide() -> None:
    machine = MadeUp(waiting=lambda number: None)
    assert measured(machine, [series()])[0].disturbed == 0
    assert measured(machine, [[*series(50), *[60.0] * 20]])[0].disturbed == 1


def test_a_round_slower_than_the_best_is_measured_again_whenever_the_best_comes() -> None:
    slow = series(of_ms=5.0)
    found, counts = measured(MadeUp(), [slow, series()], [series()], [slow])
    assert counts == [2, 1, 3]
    assert found.disturbed == 1
    assert "the base model took 1.67 times as long as in the best round" in found.reason


def test_only_times_of_the_same_work_are_compared() -> None:
    early, late = series(300, of_ms=0.5), series(of_ms=5.0)
    assert spikes([early, late]) < 1.1 < spikes([early + late])
    assert spikes([[1.0, 90.0]]) == 1.0, "two times say nothing"


def test_the_machine_counts_forward() -> None:
    first, second = MACHINE.now_ns(), MACHINE.now_ns()
    assert second >= first
    waited, by_all = Machine().waited_ns(), Machine().all_waited_ns()
    assert waited is None or (by_all is not None and by_all >= waited >= 0)
