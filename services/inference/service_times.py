"""Running estimates of service times, for admission and `Retry-After`."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.quantile import RunningQuantile

_MEMORY = 0.95  # of the averages: they follow a changed load within about twenty inputs
_FORGETTING = 1.002  # of the least, so that a single fast input does not fix it for good
_IN_TIME = 0.98  # of the inputs that are admitted should be


@dataclass
class ServiceTimes:
    """Running averages: `mean_s` from start to answer, `seconds_an_input` what each adds to the others' wait.

    `least_s` is about the least of recent inputs, `surprise` a bound on how far most inputs exceed their
    expected time.
    """

    mean_s: float = 0.0
    seconds_an_input: float = 0.0
    least_s: float = 0.0
    inputs: int = 0
    surprise: RunningQuantile = field(default_factory=lambda: RunningQuantile(_IN_TIME))

    def add(self, took_s: float, *, running: float) -> None:
        """Add an input that took this long while `running` inputs ran, itself included."""
        share_s = took_s / max(1.0, running)
        self.inputs += 1
        self.least_s = took_s if self.inputs == 1 else min(took_s, self.least_s * _FORGETTING)
        memory = min(_MEMORY, 1.0 - 1.0 / self.inputs)  # a plain mean to begin with
        self.mean_s = memory * self.mean_s + (1.0 - memory) * took_s
        self.seconds_an_input = memory * self.seconds_an_input + (1.0 - memory) * share_s

    @property
    def bound_s(self) -> float:
        """An upper bound for most inputs that find an empty queue."""
        return self.mean_s + max(0.0, self.surprise.value)
