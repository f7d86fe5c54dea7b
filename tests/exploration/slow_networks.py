"""Networks that take as long as is said, on a clock that only they and its readers turn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gati.costs.disturbance import Machine
from tests.exploration import networks


class FakeTime:
    """Seconds, which go on with every input that a network answers, and with every look at the clock."""

    def __init__(self) -> None:
        self.now, self.input_s, self.answered = 0.0, 0.0, 0

    def __call__(self) -> float:
        self.now += max(0.001, self.input_s / 2)
        return self.now

    def reset(self, input_s: float) -> None:
        """Begin at 0, with networks that take so long for an input."""
        self.now, self.input_s, self.answered = 0.0, input_s, 0


TIME = FakeTime()


@torch.library.custom_op("gati_tests::works", mutates_args=())
def works(x: Tensor) -> Tensor:
    """The same values, later."""
    TIME.answered += x.shape[0]
    TIME.now += TIME.input_s * x.shape[0]
    return x.clone()


@works.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class SlowNet(networks.Net):
    """As `Net`, but slow on `TIME`."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(works(x))


class TimedMachine(Machine):
    """Measures on `TIME`."""

    def now_ns(self) -> int:
        """A time a little later than that before."""
        TIME.now += 1e-5
        return round(TIME.now * 1e9)

    def waited_ns(self) -> int | None:
        """Nothing waits."""
        return None


def on_fake_time(patch: Any) -> None:
    """Let everything in `explore` that measures read from `TIME`, and only torch answer."""
    patch.setattr(Machine, "now_ns", TimedMachine.now_ns)
    patch.setattr(Machine, "waited_ns", TimedMachine.waited_ns)
    patch.setattr(Machine, "all_waited_ns", TimedMachine.waited_ns)
    patch.setattr("gati.exploration.answers.ENGINES", ("torch",))
