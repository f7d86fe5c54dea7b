"""Running estimates of service times, for admission and `Retry-After`."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.quantile import RunningQuantile

_MEMORY = 0.95  # weight of earlier inputs: the averages follow a changed load within about twenty inputs
_FORGETTING = 1.002  # `least_s` grows by this factor per input, so one fast input does not fix it forever
_IN_TIME = 0.98  # share of admitted inputs that should be answered in time


@dataclass
class ServiceTimes:
    """Running estimates of the time that an input takes.

    `mean_s` is the average time from start to answer, `seconds_an_input` the average time that an input adds
    to the wait of those behind it. `least_s` is about the shortest time of recent inputs. `surprise` is the
    0.98 quantile of the time by which inputs exceed their expected time from arrival to answer.
    """

    mean_s: float = 0.0
    seconds_an_input: float = 0.0
    least_s: float = 0.0
    inputs: int = 0
    surprise: RunningQuantile = field(default_factory=lambda: RunningQuantile(_IN_TIME))

    def add(self, took_s: float, *, running: float) -> None:
        """Add an input that took `took_s` while `running` inputs ran on average, itself included."""
        share_s = took_s / max(1.0, running)
        self.inputs += 1
        self.least_s = took_s if self.inputs == 1 else min(took_s, self.least_s * _FORGETTING)
        memory = min(_MEMORY, 1.0 - 1.0 / self.inputs)  # a plain mean at first
        self.mean_s = memory * self.mean_s + (1.0 - memory) * took_s
        self.seconds_an_input = memory * self.seconds_an_input + (1.0 - memory) * share_s

    @property
    def bound_s(self) -> float:
        """The time to answer that most inputs do not exceed if they need not wait."""
        return self.mean_s + max(0.0, self.surprise.value)
