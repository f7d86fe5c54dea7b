"""Figures of a stage that follow the traffic, with the offline measurement as prior.

**Engine, queue, transport.** A stage's time consists of the time in the engine and in the queue, which the
engine reports, and of transport (`way`), which is the rest. Engine times are stored per option and confidence
level, queueing times per option, and transport times per stage, because they are the same for all options.
So the transport time is known also for an option that never ran, and options can be compared.

**Prior.** Each figure is a mixture of the offline measurement and the observations. The offline part has the
weight of `w * exp(-n / w)` queries if the observations have the weight n: it counts for `w` queries at first,
almost vanishes after 5 w, and returns as evidence decays. Without observations, the figures are exactly the
offline ones.

**Decay.** The evidence of all options of a stage halves every `half_life` queries of that stage, whichever
option ran. An observation has the weight of a quarter of the queries since the option's last one, but at
least 1 and at most `explore_every`. With a weight of 1, rare evidence could never outweigh a wrong prior;
with the weight of all of these queries, a single slow answer would outweigh the prior.

**Which inputs an option gets.** Plans give hard inputs to large networks, so the inputs of an option differ
from those it was measured on. Therefore times are stored by confidence level, and levels by the finding of
the previous stage; both are mixed in the proportions of all inputs. So an option does not appear slow because
it gets hard inputs.

**Agreement.** Audits compare answers with the base model's. The expected agreement starts with the counts of
the certificate, corrected for the option's confidence on its inputs, with the weight of 256 audits. If audits
change it, the expected accuracy changes, too, but only by the part of the disagreements that can be mistakes
of this stage. This part is small if the stage only distinguishes groups. Only the plan's expectations change:
the promise remains the certified one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from gati.errors import PipelineError
from gati.pipelines.decayed import DecayedCounts, DecayedHistogram
from gati.pipelines.distribution import Distribution
from gati.pipelines.pipeline import Behaviour, Finding, Option, Stage
from gati.types import BASE

_LEAST_SHARE = 1e-3  # smallest share of the offline part that is kept in a mixture
_QUEUE_FASTER = 4  # queueing times decay faster: the load changes faster than the networks
_RARER = 4  # an observation has the weight of the queries since the last one, divided by this
_AUDITS_SLOWER = 16  # decay of audits is slower: few requests are audited
_CERTIFIED_AUDITS = 256.0  # weight of a certificate's counts, in audits


@dataclass(frozen=True)
class LiveSettings:
    """Settings of figures that follow the traffic. Counts are in queries of a stage.

    `half_life`: number after which evidence counts half. `prior`: weight of the offline measurement.
    `explore_every`: at most one query in this many explores: it runs an option other than the chosen one, to
    observe it; 0 disables exploring. `replan_every`: number after which a new plan is made, if a figure
    has changed by more than `tolerance`.

    **Raises:** `PipelineError` for values out of range.
    """

    half_life: float = 256.0
    prior: float = 32.0
    explore_every: int = 128
    replan_every: int = 32
    tolerance: float = 0.02

    def __post_init__(self) -> None:
        for name in ("half_life", "prior"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise PipelineError(f"{name} is {value}; give a number of queries above zero")
        if self.explore_every < 0 or self.replan_every < 1 or not self.tolerance >= 0.0:
            raise PipelineError(
                f"explore_every is {self.explore_every}, replan_every {self.replan_every}, tolerance "
                f"{self.tolerance}; give at least 0, 1 and 0"
            )

    @property
    def most_weight(self) -> float:
        """The largest weight of an observation: enough for explored ones alone to outweigh the prior."""
        return max(1.0, float(self.explore_every))


class Observation(NamedTuple):
    """The outcome of one request at one stage. `level` is None if the answer's confidence is unknown.

    `engine_ms` and `queue_ms` are reported by the engine; `took_ms` is the whole time seen by the caller.
    """

    option: str
    label: str
    finding: Finding | None
    level: int | None
    took_ms: float
    engine_ms: float
    queue_ms: float
    exit: str


class Agreement(NamedTuple):
    """The share of an option's answers that equal its base model's.

    `usual` is the share expected from the certificate's counts for the inputs that the option received.
    `expected` also includes audits, whose decayed weight is `audits`. `promised` is the promise of
    the certificate, which audits do not change.
    """

    expected: float
    usual: float
    promised: float | None
    audits: float

    @property
    def based_on(self) -> str:
        """The basis of the expectation, in words."""
        return "the certificate" if self.audits < 0.5 else f"the certificate and {self.audits:.0f} audits"


class Audits:
    """Audits of the answers of one model against its certificate; it may serve several options."""

    def __init__(self, certified: float, promised: float | None, settings: LiveSettings) -> None:
        self._certified = certified
        self._promised = promised
        self._counts: DecayedCounts[bool] = DecayedCounts(_AUDITS_SLOWER * settings.half_life)

    def add(self, agreed: int, lost: int, at: float) -> None:
        """Add audits of answers."""
        self._counts.add(True, at, agreed)
        self._counts.add(False, at, lost)

    def agreement(self, at: float, errors: float) -> Agreement:
        """The agreement; `errors` is the ratio of likely mistakes on its inputs to usual ones."""
        usual = 1.0 - min(1.0, (1.0 - self._certified) * errors)
        audits, agreed = self._counts.mass(at), self._counts.count(True, at)
        expected = (_CERTIFIED_AUDITS * usual + agreed) / (_CERTIFIED_AUDITS + audits)
        return Agreement(expected, usual, self._promised, audits)


class OptionFigures:
    """Observations of one option."""

    def __init__(self, option: Option, settings: LiveSettings) -> None:
        self.offline = option
        self.chosen = 0  # queries that it answered, ever
        self.explored = 0  # queries sent to it to observe it, whether or not it answered
        self.last_tick = 0  # of the last answer
        self.tried_tick = 0  # of the last query that explored it, whether or not it answered
        self.exits: DecayedCounts[str] = DecayedCounts(settings.half_life)
        self.queue = DecayedHistogram(settings.half_life / _QUEUE_FASTER)
        self._settings = settings
        self._engine: dict[int | None, DecayedHistogram] = {}  # by level
        self._levels: dict[Finding | None, DecayedCounts[int]] = {}
        # confidence levels of its inputs
        self._got: DecayedCounts[int] = DecayedCounts(settings.half_life)

    def observe(self, seen: Observation, tick: int) -> None:
        """Add a request that this option answered."""
        weight = min(max(1.0, (tick - self.last_tick) / _RARER), self._settings.most_weight)
        self.chosen += 1
        self.last_tick = tick
        half_life = self._settings.half_life
        engine = self._engine.get(seen.level)
        if engine is None:
            engine = self._engine[seen.level] = DecayedHistogram(half_life)
        engine.observe(seen.engine_ms, tick, weight)
        self.queue.observe(seen.queue_ms, tick)
        if seen.exit:
            self.exits.add(seen.exit, tick, weight)
        if seen.level is not None:
            self._got.add(seen.level, tick)
            counts = self._levels.get(seen.finding)
            if counts is None:
                counts = self._levels[seen.finding] = DecayedCounts(half_life)
            counts.add(seen.level, tick, weight)

    def mistakes(self, tick: int) -> tuple[float, float]:
        """Expected mistakes: on the inputs it received, by its confidence, and on as many average inputs."""
        known = self.offline.behaviour()
        got = self._got.shares()
        wrong = [1.0 - accuracy for accuracy in known.accuracies]
        count = self._got.mass(tick)
        likely = sum(got.get(level, 0.0) * each for level, each in enumerate(wrong))
        usual = sum(share * each for share, each in zip(known.shares, wrong, strict=True))
        return count * likely, count * usual

    def hit_rate(self) -> float | None:
        """The recent share of requests that left at an early exit, None without requests."""
        shares = self.exits.shares()
        return 1.0 - shares.get(BASE, 0.0) if shares else None

    def evidence(self, tick: int) -> float:
        """The current weight of its observations, in queries."""
        return sum(engine.mass(tick) for engine in self._engine.values())

    def prior_share(self, tick: int) -> float:
        """The share of the offline measurement in its figures."""
        return _prior_share(self.evidence(tick), self._settings.prior)

    def engine_ms(self) -> float | None:
        """The recent mean time of the engine, None without requests."""
        overall = self._overall()
        return None if overall is None else overall.mean_ms()

    def copy(self) -> OptionFigures:
        """A copy; later observations change only the original."""
        found = copy.copy(self)
        found.exits, found.queue, found._got = self.exits.copy(), self.queue.copy(), self._got.copy()
        found._engine = {level: engine.copy() for level, engine in self._engine.items()}
        found._levels = {finding: counts.copy() for finding, counts in self._levels.items()}
        return found

    def option(self, tick: int, way: DecayedHistogram, agreement: Agreement | None = None) -> Option:
        """The option with its current figures; `way` is the transport time."""
        if not self._engine and agreement is None and way.mass(tick) <= 0.0:
            return self.offline
        known = self.offline
        behaviours = self._behaviours(tick, agreement)
        overall = behaviours.get(None)
        return replace(
            known,
            accuracy=None if known.accuracy is None else _moved(known.accuracy, agreement),
            latency=self._latency(tick) if overall is None or None in self._engine else _together(overall),
            behaviours=behaviours,
            overhead=_sum(self._on_nothing(way, tick), self._on_nothing(self.queue, tick)),
        )

    # ----------------------------------------------------------------------------------------------------

    def _latency(self, tick: int) -> Distribution | None:
        """The latency of all its requests, for options without levels."""
        known, seen = self.offline.latency, self._overall()
        if known is None or seen is None:
            return known
        return _blend(known, seen.distribution(), _prior_share(seen.mass(tick), self._settings.prior))

    def _behaviours(self, tick: int, agreement: Agreement | None) -> dict[Finding | None, Behaviour]:
        everywhere = self.offline.behaviours.get(None)
        usual = () if everywhere is None else everywhere.shares
        latencies = {
            level: (engine, _prior_share(engine.mass(tick), max(1.0, self._settings.prior * share)))
            for level, share in enumerate(usual)
            if (engine := self._engine.get(level)) is not None
        }
        observed = {level: engine.distribution() for level, (engine, _) in latencies.items()}
        found = {}
        for finding, known in self.offline.behaviours.items():
            counts = self._levels.get(finding)
            shares = known.shares
            if counts is not None:
                part = _prior_share(counts.mass(tick), self._settings.prior)
                live = counts.shares()
                shares = tuple(
                    part * share + (1.0 - part) * live.get(level, 0.0) for level, share in enumerate(shares)
                )
            found[finding] = Behaviour(
                shares,
                tuple(_moved(accuracy, agreement) for accuracy in known.accuracies),
                tuple(
                    _blend(latency, observed.get(level), latencies[level][1])
                    if level in latencies
                    else latency
                    for level, latency in enumerate(known.latencies)
                ),
            )
        return found

    def _overall(self) -> DecayedHistogram | None:
        if not self._engine:
            return None
        merged = DecayedHistogram(self._settings.half_life)
        for engine in self._engine.values():
            merged.merge(engine)
        return merged

    def _on_nothing(self, seen: DecayedHistogram, tick: int) -> Distribution | None:
        """The distribution of a time that was not measured offline: its prior is a constant zero."""
        found = seen.distribution()
        if found is None:
            return None
        share = _prior_share(seen.mass(tick), self._settings.prior / _QUEUE_FASTER)
        return _blend(Distribution((0.0,), (1.0,)), found, share)


class StageFigures:
    """Observations of one stage. Not thread-safe."""

    def __init__(self, stage: Stage, settings: LiveSettings) -> None:
        self.offline = stage
        self.tick = 0  # number of queries of this stage
        self.options = {name: OptionFigures(option, settings) for name, option in stage.options.items()}
        self.way = DecayedHistogram(settings.half_life)
        self._labels: DecayedCounts[str] = DecayedCounts(settings.half_life)
        self._settings = settings

    def observe(self, seen: Observation) -> None:
        """Add a request."""
        self.tick += 1
        self.options[seen.option].observe(seen, self.tick)
        self.way.observe(max(0.0, seen.took_ms - seen.engine_ms - seen.queue_ms), self.tick)
        self._labels.add(seen.label, self.tick)

    def copy(self) -> StageFigures:
        """A copy; later observations change only the original."""
        found = copy.copy(self)
        found.options = {name: option.copy() for name, option in self.options.items()}
        found.way, found._labels = self.way.copy(), self._labels.copy()
        return found

    def stage(self, agreements: Mapping[str, Agreement | None]) -> Stage:
        """The stage with current figures and agreements; without any, the offline stage itself."""
        options = {
            name: each.option(self.tick, self.way, agreements.get(name))
            for name, each in self.options.items()
        }
        if not self.tick and all(options[name] is each for name, each in self.offline.options.items()):
            return self.offline
        part = _prior_share(self._labels.mass(self.tick), self._settings.prior)
        live = self._labels.shares()
        shares = tuple(
            part * share + (1.0 - part) * live.get(label, 0.0)
            for label, share in zip(self.offline.labels, self.offline.shares, strict=True)
        )
        return replace(self.offline, options=options, shares=shares)


def _moved(accuracy: float, agreement: Agreement | None) -> float:
    """The expected accuracy, given an agreement that differs from the usual one."""
    if agreement is None:
        return accuracy
    wrong, differing = 1.0 - accuracy, 1.0 - agreement.usual
    part = min(1.0, wrong / differing) if differing > 0.0 else 1.0
    return min(1.0, max(0.0, accuracy + part * (agreement.expected - agreement.usual)))


def _together(behaviour: Behaviour) -> Distribution:
    """The latency over all levels."""
    pairs = [
        (value, share * probability)
        for share, latency in zip(behaviour.shares, behaviour.latencies, strict=True)
        for value, probability in zip(latency.values_ms, latency.probabilities, strict=True)
    ]
    total = sum(behaviour.shares)
    pairs.sort()
    return Distribution(tuple(value for value, _ in pairs), tuple(weight / total for _, weight in pairs))


def _prior_share(evidence: float, prior: float) -> float:
    weight = prior * math.exp(-evidence / prior)
    share = weight / (weight + evidence)
    return share if share >= _LEAST_SHARE else 0.0


def _blend(known: Distribution, observed: Distribution | None, prior_share: float) -> Distribution:
    return known if observed is None else known.mixed(observed, 1.0 - prior_share)


def _sum(one: Distribution | None, other: Distribution | None) -> Distribution | None:
    if one is None or other is None:
        return one or other
    return one.plus(other)
