"""Findings of `gati doctor` about a network, and what they imply."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from dataclasses import asdict, dataclass
from typing import Any

from gati.composition.binomial import p_value, required_inputs
from gati.exploration.splits import LEAST_HELD_OUT, inputs_to_select_on
from gati.types import Profile

TARGETS = (0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)


@dataclass(frozen=True, kw_only=True)
class DoctorFinding:
    """A finding with advice; `refuses` if `explore` would fail with this message."""

    about: str
    message: str
    refuses: bool


@dataclass(frozen=True, kw_only=True)
class EngineSpeed:
    """Median milliseconds per input of the plain network on one engine, or why it was not timed."""

    name: str
    precision: str
    base_ms: float | None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class CheapestLookup:
    """The cheapest cache that `explore` would train at a block; milliseconds per input, on torch."""

    block: str
    variant: str
    reach_ms: float
    lookup_ms: float
    base_ms: float

    def gain(self, share: float) -> float:
        """Return the mean speedup if this `share` of inputs exits here.

        The rest run to the end, and every input pays for the lookup. A share of 1 gives the upper bound for
        any selector and predictor of this cost at this block.
        """
        mean_ms = self.lookup_ms + share * self.reach_ms + (1.0 - share) * self.base_ms
        return self.base_ms / mean_ms if mean_ms > 0.0 else float("inf")

    def share_for(self, gain: float) -> float | None:
        """Return the share of inputs that must exit here for `gain`; None if even a share of 1 is too low."""
        saved_ms = self.base_ms - self.reach_ms
        needed_ms = self.lookup_ms + self.base_ms * (1.0 - 1.0 / gain)
        return max(0.0, needed_ms / saved_ms) if saved_ms > 0.0 and needed_ms <= saved_ms else None


@dataclass(frozen=True, kw_only=True)
class ExploreForecast:
    """What `explore` would train by default and how far it would get, from a few timed training steps.

    `input_pass_s` and `exit_pass_s` are seconds per pass over all training inputs, for caches that read the
    network's input and for exits after blocks; None if there are none or time ran out.
    """

    at_the_input: tuple[str, ...]  # variants
    exits: tuple[tuple[str, str], ...]  # (block, variant)
    measuring_s: float
    input_pass_s: float | None
    exit_pass_s: float | None
    budget_s: float
    input_passes: float | None  # that fit within the budget
    exit_passes: float | None
    usual_s: float | None  # training time of explore without a budget


@dataclass(frozen=True)
class TargetForecast:
    """Whether an agreement can be certified, and the most losses allowed (None: not even zero suffice).

    `held_out_needed` is the number of inputs in `--data` at which zero losses first certify it.
    """

    accuracy: float
    losses_allowed: int | None
    held_out_needed: int


@dataclass(frozen=True)
class DataForecast:
    """How `explore` would split the inputs; `exact` if duplicates were searched for.

    `certify` counts those that are evidence: none of their copies trains or selects.
    """

    inputs: int
    train: int
    select: int
    certify: int
    exact: bool
    confidence: float
    targets: tuple[TargetForecast, ...]


@dataclass(frozen=True)
class Diagnosis:
    """What is known about a network before training. None marks what was refused or not requested."""

    model: str
    parameters: int
    input_shape: tuple[int, ...] | None  # without the batch dimension
    profile: Profile | None
    engines: tuple[EngineSpeed, ...]
    lookups: tuple[CheapestLookup, ...]
    explore: ExploreForecast | None
    data: DataForecast | None
    findings: tuple[DoctorFinding, ...]
    seconds: float

    @property
    def can_be_cut(self) -> bool:
        """Whether caches can be added to this network."""
        return self.profile is not None

    @property
    def refused(self) -> bool:
        """Whether `explore` would refuse this network or these inputs."""
        return any(finding.refuses for finding in self.findings)

    @property
    def fastest(self) -> EngineSpeed | None:
        """The engine that runs the plain network fastest."""
        measured = [engine for engine in self.engines if engine.base_ms is not None]
        return min(measured, key=lambda engine: engine.base_ms or 0.0, default=None)

    @property
    def best(self) -> CheapestLookup | None:
        """The lookup with the largest gain if all inputs exit there: an upper bound for any single cache."""
        return max(self.lookups, key=lambda lookup: lookup.gain(1.0), default=None)

    def to_json(self) -> str:
        """Return strict JSON text, including derived values."""
        values: dict[str, Any] = asdict(self)
        values |= {"can_be_cut": self.can_be_cut, "refused": self.refused}
        values["fastest"] = None if self.fastest is None else self.fastest.name
        values["bound"] = None if self.best is None else self.best.gain(1.0)
        for written, lookup in zip(values["lookups"], self.lookups, strict=True):
            written |= {"gain_of_all": lookup.gain(1.0), "gain_of_half": lookup.gain(0.5)}
        return json.dumps(values, indent=1, allow_nan=False) + "\n"


def parts_of(inputs: int, train_data: bool) -> tuple[int, int, int]:
    """Return how many of `inputs` distinct inputs go to training, selection and certification."""
    train = 0 if train_data else inputs // 3
    select = inputs_to_select_on(inputs - train)
    return train, select, inputs - train - select


def forecast_targets(certify: int, confidence: float, train_data: bool) -> tuple[TargetForecast, ...]:
    """Return what `certify` inputs can certify, by the exact binomial test on one engine.

    Raises CompositionError if `confidence` is outside (0, 1).
    """
    delta = 1.0 - confidence
    found = []
    for accuracy in TARGETS:
        needed = required_inputs(accuracy, delta)
        losses = _most_losses(certify, accuracy, delta) if certify >= needed else None
        found.append(TargetForecast(accuracy, losses, _held_out_for(needed, train_data)))
    return tuple(found)


def _most_losses(inputs: int, accuracy: float, delta: float) -> int:
    """Return the most losses that still certify; zero losses must certify."""
    return bisect_right(range(inputs), delta, lo=1, key=lambda losses: p_value(losses, inputs, accuracy)) - 1


def _held_out_for(certify: int, train_data: bool) -> int:
    """Return the fewest inputs in `--data` that explore takes and that leave `certify` to certify on."""

    def enough(inputs: int) -> bool:  # monotonic
        _, select, left = parts_of(inputs, train_data)
        return left >= certify and select + left >= LEAST_HELD_OUT

    return bisect_left(range(4 * max(certify, LEAST_HELD_OUT) + 4), True, lo=certify, key=enough)
