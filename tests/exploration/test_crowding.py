"""Training says so when other programs use the processor."""

from __future__ import annotations

import pytest

from gati.costs.disturbance import Uncounted
from gati.exploration.crowding import Crowding
from gati.exploration.progress import SilentProgress


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

    def passes(self, seconds: float, share: float) -> None:
        self.now_s += seconds
        self.waited_s += share * seconds

    def all_waited_ns(self) -> int | None:
        return round(1e9 * self.waited_s) if self.counted else None


def watched(machine: _Waiting) -> tuple[Crowding, list[str]]:
    said = _Notes()
    return Crowding("students", 100, said, machine.clock, machine), said.notes


@pytest.mark.parametrize("counted", [True, False])
def test_training_with_the_machine_to_itself_says_nothing(counted: bool) -> None:
    """Its own threads wait for each other a little; some systems do not count waiting."""
    machine = _Waiting()
    machine.counted = counted
    crowding, notes = watched(machine)
    for _ in range(100):
        machine.passes(1.0, 0.1 if counted else 0.9)
        crowding.look()
    crowding.end(100)
    assert notes == []


def test_programs_that_come_later_are_told_of_once() -> None:
    machine = _Waiting()
    crowding, notes = watched(machine)
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
    crowding, notes = watched(machine)
    machine.passes(19.0, 0.9)
    crowding.look()
    assert notes == []


def test_training_that_is_cut_short_says_how_far_it_came() -> None:
    crowding, notes = watched(_Waiting())
    crowding.end(40)
    assert notes == ["students: 40 of 100 steps were done in the time"]
