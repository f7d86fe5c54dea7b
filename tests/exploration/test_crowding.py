"""Training says so when other programs use the processor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gati.costs.disturbance import Uncounted
from gati.engine.threads import on_threads
from gati.errors import DataError
from gati.exploration import planning
from gati.exploration.budget import Budget
from gati.exploration.crowding import Crowding, watched
from gati.exploration.feasible import TimeLimit, nothing_trained
from gati.exploration.pace import Pace
from gati.exploration.planning import GroupPlanner
from gati.exploration.progress import SilentProgress
from gati.exploration.state import RunState


class _Notes(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class _Waiting(Uncounted):
    """All threads of the process wait for a core for a share of the time that passes on a clock."""

    def __init__(self) -> None:
        self.now_s, self.waited_s, self.counted = 0.0, 0.0, True

    def clock(self) -> float:
        return self.now_s

    def now_ns(self) -> int:
        return round(1e9 * self.now_s)

    def passes(self, seconds: float, share: float) -> None:
        self.now_s += seconds
        self.waited_s += share * seconds

    def all_waited_ns(self) -> int | None:
        return round(1e9 * self.waited_s) if self.counted else None


def alone(machine: _Waiting) -> tuple[Crowding, list[str]]:
    said = _Notes()
    return Crowding("students", 100, said, machine.clock, machine), said.notes


@pytest.mark.parametrize("counted", [True, False])
def test_training_with_the_machine_to_itself_says_nothing(counted: bool) -> None:
    """Its own threads wait for each other a little; some systems do not count waiting."""
    machine = _Waiting()
    machine.counted = counted
    crowding, notes = alone(machine)
    for _ in range(100):
        machine.passes(1.0, 0.1 if counted else 0.9)
        crowding.look()
    crowding.end(100)
    assert notes == []


def test_programs_that_come_later_are_told_of_once() -> None:
    machine = _Waiting()
    crowding, notes = alone(machine)
    for second in range(100):
        machine.passes(1.0, 0.55 if second >= 60 else 0.1)
        crowding.look()
        assert bool(notes) == (second >= 79), "20 seconds later"
    assert notes[0].startswith(
        "students: threads waited for a core for 0.55 s in a second. Stop other programs"
    )
    assert len(notes) == 1


def test_a_moment_is_no_sign() -> None:
    machine = _Waiting()
    crowding, notes = alone(machine)
    machine.passes(19.0, 0.9)
    crowding.look()
    assert notes == []


class _Training(_Waiting):
    """Trains at a speed that depends on the number of threads, and on whether another program runs."""

    def __init__(self, cores: int, speeds: Callable[[int, bool], float]) -> None:
        super().__init__()
        self.threads, self.cores, self.speeds = cores, cores, speeds
        self.busy = False
        self.used: list[int] = []
        said = _Notes()
        self.notes = said.notes
        self.crowding = Crowding(
            "students", 10**9, said, self.clock, self, most=cores, use_threads=self.use_threads
        )

    def use_threads(self, count: int) -> None:
        self.threads = count
        self.used.append(count)

    def trains(self, seconds: float) -> int:
        """Steps in that time."""
        end_s, steps = self.now_s + seconds, 0
        while self.now_s < end_s:
            crowded = self.busy and self.threads == self.cores
            self.passes(1.0 / self.speeds(self.threads, self.busy), 0.6 if crowded else 0.05)
            self.crowding.look()
            steps += 1
        return steps


def spinning(threads: int, busy: bool) -> float:
    """As measured on two cores: threads that wait for one without a core take the other."""
    return {(1, False): 9.0, (1, True): 9.0, (2, False): 15.0, (2, True): 4.0}[threads, busy]


def test_fewer_threads_train_next_to_another_program_and_all_of_them_later() -> None:
    training = _Training(2, spinning)
    training.trains(100.0)
    assert training.used == [] and training.notes == [], "alone"
    training.busy = True
    training.trains(60.0)
    steps = training.trains(600.0)
    assert training.threads == 1 and steps > 0.97 * 9.0 * 600.0, "trials of two threads are few and short"
    training.busy = False
    training.trains(700.0)
    assert training.threads == 2 and training.trains(100.0) >= 1500
    assert training.notes[1:] == [
        "students: 1 of 2 threads train faster now",
        "students: all 2 threads train faster now",
    ]


def test_all_threads_go_on_where_fewer_are_no_faster() -> None:
    training = _Training(4, lambda threads, _: 3.0 * threads)
    training.busy = True
    steps = training.trains(3600.0)
    assert training.threads == 4 and steps > 0.98 * 12.0 * 3600.0
    assert len(training.notes) == 1


def test_slow_steps_are_judged_by_several() -> None:
    training = _Training(2, lambda threads, busy: spinning(threads, busy) / 60.0)
    training.busy = True
    training.trains(600.0)
    assert training.used[0] == 1 and training.trains(3600.0) > 0.9 * 9.0 / 60.0 * 3600.0


def test_torch_has_its_threads_again_after_a_training() -> None:
    before = torch.get_num_threads()
    with watched("students", 1, _Notes(), lambda: 0.0, torch.device("cpu")):
        torch.set_num_threads(before + 1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("share", "told"), [(0.5, True), (0.1, False)])
def test_a_budget_that_is_too_short_says_so_if_other_programs_use_the_cores(
    share: float, told: bool, tmp_path: Path
) -> None:
    """More time is not what such a run needs."""
    machine = _Waiting()
    budget = Budget(60.0, machine.clock, 0.0, RunState(tmp_path), machine)
    machine.passes(50.0, share)
    refusals = [str(nothing_trained(budget, "--budget"))]
    with pytest.raises(DataError) as refused:
        TimeLimit(budget, 600).check(8, 0.4)
    refusals.append(str(refused.value))
    added = "; threads waited for a core for 0.50 s in a second: if other programs run, stop them"
    assert [text.endswith(added) for text in refusals] == [told, told]


@pytest.mark.parametrize(("waiting", "probes"), [(0.9, 2), (0.1, 1)])
def test_a_plan_is_made_for_the_threads_that_are_faster(
    waiting: float, probes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a crowd the time of all threads is not that of the training, which soon uses fewer."""
    paces = {2: Pace(0.1, 0.4), 1: Pace(0.05, 0.1)}
    probed: list[int] = []

    def probe(*_: Any) -> Any:
        probed.append(torch.get_num_threads())
        return SimpleNamespace(pace=paces[probed[-1]])

    monkeypatch.setattr(planning, "crowding_since", lambda *_: lambda: waiting)
    monkeypatch.setattr(GroupPlanner, "_probed", probe)
    planner = GroupPlanner.__new__(GroupPlanner)
    planner.budget = Budget(None, lambda: 0.0, 0.0, SimpleNamespace(spent_s=0.0))  # type: ignore[arg-type]
    with on_threads(2):
        found = planner._probed_in_a_crowd(None, None)  # type: ignore[arg-type]
    assert probed == [2, 1][:probes]
    assert found.pace == paces[probed[-1]]


def test_training_that_is_cut_short_says_how_far_it_came() -> None:
    crowding, notes = alone(_Waiting())
    crowding.end(96)  # a plan is an estimate
    crowding.end(40)
    assert notes == ["students: 40 of 100 steps were done in the time"]
