"""The checks of `gati doctor`, run one after another within a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gati.errors import GatiError
from gati.evaluation.diagnosis import DoctorFinding

T = TypeVar("T")


class Examination:
    """Runs checks one after another and collects the findings."""

    def __init__(self, clock: Callable[[], float], within_s: float) -> None:
        self.clock, self._began, self.within_s = clock, clock(), within_s
        self.findings: list[DoctorFinding] = []

    @property
    def spent_s(self) -> float:
        """Seconds since the start."""
        return self.clock() - self._began

    def is_late(self, share: float = 1.0) -> bool:
        """Whether this share of the time has passed."""
        return self.spent_s >= share * self.within_s

    def note(self, about: str, message: str) -> None:
        """Add a finding that would not make `explore` fail."""
        self.findings.append(DoctorFinding(about=about, message=message, refuses=False))

    def ask(self, about: str, question: Callable[[], T]) -> T | None:
        """Return the result of a check, or None and add a finding that says why."""
        if self.is_late():
            self.note(about, f"not examined: the {self.within_s:g} seconds were up; give a longer --within")
            return None
        try:
            return question()
        except GatiError as error:
            self.findings.append(DoctorFinding(about=about, message=str(error), refuses=True))
            return None
