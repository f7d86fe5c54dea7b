"""Running estimates of service times, for admission and `Retry-After`."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.quantile import RunningQuantile

_MEMORY = 0.95  # weight of earlier inputs: the averages follow a changed load within about twenty inputs
_FORGETTING = 1.002  # `least_s` grows by this factor per input, so one fast input does not fix it forever
_IN_TIME = 0.98  # share of admitted inputs that should be answered in time
_PRIOR = 0.25  # weight of the assumption that inputs that run together divide the engine's time equally


@dataclass
class ServiceTimes:
    """Running estimates of the time that an input takes, given how many run at the same time.

    `mean_s` is the average time from start to answer, and `mean_running` the average number of inputs that
    ran then. `seconds_an_input` is the average time that an input adds to the wait of those behind it.
    `least_s` is about the shortest time of recent inputs. `surprise` is the 0.98 quantile of the time by
    which inputs exceed their expected time from arrival to answer.
    """

    mean_s: float = 0.0
    seconds_an_input: float = 0.0
    least_s: float = 0.0
    inputs: int = 0
    surprise: RunningQuantile = field(default_factory=lambda: RunningQuantile(_IN_TIME))
    mean_running: float = 1.0
    _variance: float = 0.0  # of the number that run
    _covariance: float = 0.0  # of that number with the time, in seconds

    def add(self, took_s: float, *, running: float) -> None:
        """Add an input that took `took_s` while `running` inputs ran on average, itself included."""
        share_s = took_s / max(1.0, running)
        self.inputs += 1
        self.least_s = took_s if self.inputs == 1 else min(took_s, self.least_s * _FORGETTING)
        memory = min(_MEMORY, 1.0 - 1.0 / self.inputs)  # a plain mean at first
        more, longer_s = running - self.mean_running, took_s - self.mean_s
        self._variance = memory * (self._variance + (1.0 - memory) * more * more)
        self._covariance = memory * (self._covariance + (1.0 - memory) * more * longer_s)
        self.mean_running += (1.0 - memory) * more
        self.mean_s += (1.0 - memory) * longer_s
        self.seconds_an_input = memory * self.seconds_an_input + (1.0 - memory) * share_s

    def expected_s(self, running: float) -> float:
        """The time from start to answer if `running` inputs run, this one included.

        A line through the recent inputs, by least squares. Where they all ran with equally many others, each
        further one is expected to add its share.
        """
        most_s = self.mean_s / max(1.0, self.mean_running)
        slope_s = (self._covariance + _PRIOR * most_s) / (self._variance + _PRIOR)
        slope_s = min(max(0.0, slope_s), most_s)
        return max(self.least_s, self.mean_s + slope_s * (running - self.mean_running))

    def bound_s(self, running: float) -> float:
        """The time to answer that most inputs do not exceed if they need not wait."""
        return self.expected_s(running) + max(0.0, self.surprise.value)
