"""Training that is slower than planned says so, and names other programs if they are the cause."""

from __future__ import annotations

import pytest

from gati.costs.disturbance import Uncounted
from gati.exploration.lagging import Lagging
from gati.exploration.progress import SilentProgress


class _Notes(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class _Waiting(Uncounted):
    """All threads of the process wait for a core for a share of the time of a clock."""

    def __init__(self, share: float | None) -> None:
        self.share, self.now_s = share, 0.0

    def clock(self) -> float:
        return self.now_s

    def all_waited_ns(self) -> int | None:
        return None if self.share is None else round(1e9 * self.share * self.now_s)


def notes(waiting: float | None, *looks: tuple[float, int, float]) -> list[str]:
    """What is told when training has done so many of 100 steps at a time, and a share of them is due."""
    machine, said = _Waiting(waiting), _Notes()
    lagging = Lagging("students", 100, said, machine.clock, machine)
    for now_s, step, due in looks:
        machine.now_s = now_s
        lagging.look(step, due)
    lagging.end(looks[-1][1])
    return said.notes


def test_training_that_keeps_up_says_nothing() -> None:
    assert notes(0.5, (30.0, 26, 0.3), (60.0, 60, 0.6), (100.0, 100, 1.0)) == []


def test_the_first_steps_are_no_sign() -> None:
    assert notes(0.5, (10.0, 0, 0.1), (100.0, 100, 1.0)) == []


@pytest.mark.parametrize(
    ("waiting", "reason"),
    [
        (0.31, "threads waited for a core for 0.31 s in a second. Stop other programs for better caches: "),
        (0.01, "the machine is slower than when they were planned (threads hardly waited for a core)"),
        (None, "the machine is slower than when they were planned"),
    ],
)
def test_a_lag_is_told_once_with_its_cause_and_the_end_with_what_was_done(
    waiting: float | None, reason: str
) -> None:
    first, last = notes(waiting, (30.0, 10, 0.3), (60.0, 20, 0.6), (105.0, 40, 1.05))
    assert first.startswith(f"students: 10 steps done instead of 30: {reason}")
    assert last == "students: 40 of 100 steps were done in the time"
