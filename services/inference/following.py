"""What happens beside a request: audits for the guard, trials for proofs, samples for retraining.

Whether a request is looked at is drawn before anything is known of its answer, at a rate that does not change
with the answers, and together with a place in the line (`services.inference.line`): what nobody has time for
is dropped before its outcome is known. An answer that a version gave is an audit for its guard. Caches that
do not answer yet, those of the version itself or of the one that waits to take over, are tried on the same
inputs, and what they would have answered counts for their proof and nobody else's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.typing import NDArray
from torch import Tensor

from gati.engine.engine import Prediction
from gati.engine.exits import BASE
from gati.guard.draws import Draws
from gati.guard.watch import Watch
from gati.samples.record import Record
from services.inference.counts import Counts
from services.inference.keeping import ServedStanding
from services.inference.line import Line, Reservation
from services.inference.queue import RequestQueue
from services.inference.settings import InferenceSettings

if TYPE_CHECKING:
    from gati.samples.writer import BackgroundWriter  # needs SQLAlchemy

__all__ = ["Following", "Handling", "Shared", "audit_share"]

_LAST = 10  # the lowest priority
_COST_OF_TRIAL = 1.0  # at most, in runs of the network: a lookup that misses runs all of it


class _Trial(NamedTuple):
    """Caches to be tried, and the epoch of their watch when that was drawn."""

    following: Following
    epoch: int


@dataclass(frozen=True)
class Handling:
    """What was drawn for a request, and whether early answers may be given to it."""

    may_hit: bool
    epoch: int = 0
    audit: bool = False
    sample: bool = False
    trials: tuple[_Trial, ...] = ()
    place: Reservation | None = None

    def forget(self) -> None:
        """Give back what was reserved: the request has no answer."""
        if self.place is not None:
            self.place.leave()


@dataclass(frozen=True)
class Shared:
    """What the versions of one model share."""

    settings: InferenceSettings
    counts: Counts
    line: Line
    standing: ServedStanding
    writer: BackgroundWriter | None

    @property
    def guarded(self) -> bool:
        """Whether anything is audited."""
        return self.settings.audit_budget > 0.0

    @property
    def sampling(self) -> float:
        """The share of requests that is kept."""
        return self.settings.sampling if self.writer is not None else 0.0


def audit_share(budget: float, sampling: float, cost: float) -> float:
    """The share of requests to audit besides those sampled, each of which is an audit, too.

    `budget` is of the base model's time, `cost` what an audit takes of it, in runs of the base model.
    """
    rate = min(1.0, budget / cost)
    return 0.0 if sampling >= rate else 1.0 - (1.0 - rate) / (1.0 - sampling)


class Following:
    """Follows the requests of one version. Its methods belong to the event loop's thread.

    `watch` None has no caches, and a network that is the user's: nothing to be watched. `base` gives the
    reference answer; None where the version's own network does and has no caches. `exact` says that a miss is
    the reference answer, `cost` how many times as long the reference takes as the version's own network.
    """

    def __init__(
        self,
        name: str,
        watch: Watch | None,
        early: RequestQueue,
        base: RequestQueue | None,
        shared: Shared,
        *,
        exact: bool = True,
        cost: float = 1.0,
    ) -> None:
        self.name = name
        self.watch = watch
        self.gone = False  # being unloaded: nothing is looked up in it any more
        self._early = early
        self._base = base
        self._shared = shared
        self._exact = exact
        self._cost = cost
        self._beside: Following | None = None
        self._draws = self._new_draws()

    @property
    def may_hit(self) -> bool:
        """Whether its caches answer."""
        if self.watch is None or self.watch.may_hit:
            return True
        return self._shared.settings.unguarded and self.watch.state != "stopped"

    @property
    def stopped(self) -> bool:
        """Whether the guard keeps the caches from answering."""
        return self.watch is not None and self.watch.state == "stopped"

    @property
    def serving(self) -> RequestQueue:
        """The queue in which requests are answered now: the reference's where the caches may not."""
        return self.queue(self.may_hit)

    def queue(self, may_hit: bool) -> RequestQueue:
        """Where a request is answered."""
        return self._early if may_hit or self._base is None else self._base

    def draw(self, beside: Following | None) -> Handling:
        """Decide about the next request, before it is answered; `beside` waits to take over."""
        if beside is not self._beside:
            self._beside = beside
            self._draws = self._new_draws()
        may_hit = self.may_hit
        epoch = 0 if self.watch is None else self.watch.epoch
        chances = self._draws.draw()
        early = may_hit and self.watch is not None  # otherwise the answer is the reference's
        looked = self._shared.guarded and (chances.audit if early else chances.trial)
        tried = [self] if not may_hit and (looked or chances.sample) else []
        if beside is not None and looked and not beside.gone:
            tried.append(beside)
        trials = tuple(_Trial(each, each.watch.epoch) for each in tried if each.watch is not None)
        audit = looked and early
        place = self._shared.line.reserve() if audit or trials or chances.sample else None
        if place is None:
            return Handling(may_hit, epoch)
        return Handling(may_hit, epoch, audit, chances.sample, trials, place)

    def answered(self, drawn: Handling, x: Tensor, given: NDArray[Any], prediction: Prediction) -> None:
        """Tell what became of a request; `given` is one input as its client sent it."""
        if drawn.place is not None:
            drawn.place.fill(lambda: self._follow(drawn, x, given, prediction))

    # ----------------------------------------------------------------------------------------------------

    def _new_draws(self) -> Draws:
        """Draws at rates that depend on who takes part, never on answers."""
        shared = self._shared
        cost = self._cost + (_COST_OF_TRIAL if self._beside is not None else 0.0)
        audits = audit_share(shared.settings.audit_budget, shared.sampling, cost)
        return Draws(audits, shared.sampling, shared.settings.trials)

    async def _follow(self, drawn: Handling, x: Tensor, given: NDArray[Any], prediction: Prediction) -> None:
        """Ask who has to be asked, then settle everything at once. Raises `GatiError`: nothing is settled."""
        if self.gone:  # the request was answered by a version on its way out
            self._shared.counts.left_out += 1
            return
        reference = prediction
        if drawn.may_hit and self._base is not None and not (self._exact and prediction.exit == BASE):
            reference = await _ask(self._base, x)
        found: list[tuple[_Trial, Prediction]] = []
        for trial in drawn.trials:
            if not trial.following.gone:
                found.append((trial, await _ask(trial.following._early, x)))
        if drawn.audit:
            self._audited(drawn.epoch, _agree(prediction, reference))
        for trial, answer in found:
            trial.following._tried(trial.epoch, _agree(answer, reference))
        if drawn.sample:
            own = prediction if drawn.may_hit else _own(self, found)
            self._keep(given, own, reference)

    def _audited(self, epoch: int, agreed: bool) -> None:
        counts = self._shared.counts
        counts.agreed += agreed
        counts.disagreed += not agreed
        self._tell(epoch, agreed)

    def _tried(self, epoch: int, agreed: bool) -> None:
        if self._shared.guarded:
            counts = self._shared.counts
            counts.trials_agreed += agreed
            counts.trials_disagreed += not agreed
            self._tell(epoch, agreed)

    def _tell(self, epoch: int, agreed: bool) -> None:
        if self.watch is not None and self.watch.epoch == epoch:
            self.watch.audited(agreed=agreed)
            self._shared.standing.audited()

    def _keep(self, given: NDArray[Any], own: Prediction | None, reference: Prediction) -> None:
        """Keep a sample; `own` is what the caches answered, or would have."""
        hit = own is not None and own.exit != BASE
        if self._shared.writer is None:
            return
        self._shared.writer.offer(
            Record(
                given,
                "image" if given.dtype.kind == "u" else "input",
                reference.class_index,
                time.time(),
                self._shared.settings.name,
                source=self.name,
                exit=own.exit if own is not None and hit else None,
                agreed=_agree(own, reference) if own is not None and hit else None,
                probabilities=reference.probabilities.numpy(),
            )
        )


async def _ask(queue: RequestQueue, x: Tensor) -> Prediction:
    """An answer after everybody who waits, however long that takes: patience would drop some inputs only."""
    return await queue.put(x, priority=_LAST, deadline_s=math.inf).answer


def _own(following: Following, found: Sequence[tuple[_Trial, Prediction]]) -> Prediction | None:
    return next((answer for trial, answer in found if trial.following is following), None)


def _agree(answer: Prediction, reference: Prediction) -> bool:
    return answer.class_index == reference.class_index
