"""Work in addition to requests: audits for the guard, trials for proofs, samples for retraining.

`gati.guard.auditor` decides about each request, as for a stream. Together with the decision, a place in the
line of jobs (`services.inference.line`) is reserved. The jobs run in order, at the lowest priority. If no
place is free, the work is dropped before its outcome is known. Under a load that leaves no time, it gets its
share nevertheless: caches would otherwise answer for as long, and no one would see how.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray
from torch import Tensor

from gati.adaptation.recall import Recall
from gati.adaptation.recall_records import Looked
from gati.adaptation.rest import Rest
from gati.composition.composition import Composition
from gati.engine.engine import Engine
from gati.engine.exits import BASE, Prediction
from gati.guard.auditor import NO_ANSWER, Auditor, Compared, Decided, Given, Probed, lookups_failed
from gati.guard.draws import Draws
from gati.guard.posts import Counting, Post
from gati.guard.watch import Watch
from gati.samples.record import Record
from services.inference.counts import Counts
from services.inference.keeping import ServedStanding
from services.inference.last import ask_last
from services.inference.line import Line, Reservation
from services.inference.queue import RequestQueue
from services.inference.settings import InferenceSettings
from services.logs import log_failure

if TYPE_CHECKING:
    from gati.samples.writer import BackgroundWriter  # needs SQLAlchemy

_log = logging.getLogger("gati.inference")

_COST_OF_TRIAL = 1.0  # upper bound, in runs of the network: a miss runs all of it

Probing = Callable[[Tensor, Prediction], Sequence[Probed]]


@dataclass(eq=False)
class Answering:
    """An open setting of a version: its engine, and the queue in front of it.

    `composition` is None without caches. `probe` runs all settings of a version that has several. `gone`: the
    version is being unloaded and accepts no more lookups.
    """

    name: str
    engine: Engine
    queue: RequestQueue
    composition: Composition | None = None
    probe: Probing | None = None
    gone: bool = False

    async def close(self) -> None:
        """Answer the waiting inputs, then close the engine."""
        await self.queue.close()
        self.engine.close()


@dataclass(frozen=True)
class Handling:
    """The decision about a request, and the queue that answers it.

    `place`: in the line of jobs.
    """

    decided: Decided[Answering]
    queue: RequestQueue
    place: Reservation | None = None

    def forget(self) -> None:
        """Free the reserved place, if it was not filled: the request has no answer."""
        if self.place is not None:
            self.place.leave()


@dataclass(frozen=True)
class Shared:
    """What the versions of one model share. `prober` is the thread that runs the settings of versions."""

    settings: InferenceSettings
    counts: Counts
    line: Line
    standing: ServedStanding
    writer: BackgroundWriter | None
    prober: Executor | None = None

    @property
    def guarded(self) -> bool:
        """Whether requests are audited."""
        return self.settings.audit_budget > 0.0

    @property
    def sampling(self) -> float:
        """The share of requests that are kept as samples."""
        return self.settings.sampling if self.writer is not None else 0.0


def audit_share(budget: float, sampling: float, cost: float) -> float:
    """The share of requests to audit in addition to samples, which are all audited, too.

    `budget` is the share of the base model's time for audits, `cost` the cost of an audit in runs of the base
    model.
    """
    rate = min(1.0, budget / cost)
    return 0.0 if sampling >= rate else 1.0 - (1.0 - rate) / (1.0 - sampling)


class Following:
    """Follows the requests of one version. Not thread-safe: call from the event loop.

    `post` is None if there is nothing to watch: the version is the user's network without caches. `base` is
    the queue of the reference; None if the version has no caches and its own queue gives the reference's
    answers. `exact`: a miss gives the reference's answer. `cost`: the reference's time relative to the
    version's own network.
    """

    def __init__(
        self,
        answering: Answering,
        post: Post[Answering] | None,
        base: RequestQueue | None,
        shared: Shared,
        *,
        exact: bool = True,
        cost: float = 1.0,
        memory: Recall | None = None,
        compare: Callable[[Post[Answering], Sequence[str], str | None], None] | None = None,
    ) -> None:
        self.name = answering.name
        self.post = post
        self._version = answering
        self._base = base
        self._shared = shared
        self._exact = exact
        self._cost = cost
        self._memory = memory
        self._auditor = Auditor[Answering](exact, memory, shared.guarded, compare)
        self._trial: Post[Answering] | None = None
        self._draws = self._new_draws()
        self._rest = Rest()
        self.counts_anew()

    @property
    def watch(self) -> Watch | None:
        """The watch of its caches, if any."""
        return None if self.post is None else self.post.watch

    @property
    def may_hit(self) -> bool:
        """Whether its caches may answer."""
        return self.post is None or self.post.may_hit or self._unguarded

    @property
    def _unguarded(self) -> bool:
        """Whether its caches may answer without a proof, because the user allowed it."""
        watch = self.watch
        return self._shared.settings.unguarded and watch is not None and watch.state != "stopped"

    @property
    def after_memory(self) -> bool:
        """Whether its caches are judged by the requests that memory leaves, instead of all."""
        return self.post is not None and self.post.after_memory

    @property
    def stopped(self) -> bool:
        """Whether the guard keeps the caches from answering."""
        return self.watch is not None and self.watch.state == "stopped"

    @property
    def resting(self) -> bool:
        """Whether lookups are paused because they cost more than they save."""
        return self.may_hit and not self._rest.lookups_pay

    @property
    def serving(self) -> RequestQueue:
        """The queue that answers requests now: the base model's if the caches do not answer."""
        return self._queue(self.may_hit and self._rest.lookups_pay)

    def counts_anew(self) -> None:
        """Start over with counting what lookups save: another setting answers from now on."""
        composition = None if self.post is None else self.post.deployed.composition
        if composition is not None:
            self._rest.replaced(composition)

    def draw(
        self, trial: Post[Answering] | None, looked: Looked | None = None, *, places: bool = False
    ) -> Handling:
        """Decide about the next request before it is answered.

        `trial` is the version that waits to take over, and `looked` the result of the lookup in memory, if
        there was one. `places`: memory may answer.
        """
        if trial is not self._trial or self._probes != self._draws_probe:
            self._trial = trial
            self._draws = self._new_draws()
        taken: list[Reservation] = []

        def room() -> bool:
            place = self._shared.line.reserve()
            taken.extend(() if place is None else (place,))
            return place is not None

        decided = self._auditor.decide(
            self.post,
            None if trial is None or trial.version.gone else trial,
            self._draws,
            room=room,
            more_samples=self._shared.sampling,
            lookups_pay=self._rest.lookups_pay,
            unguarded=self._unguarded,
            places=places,
            new_scene=looked is not None and looked.new_scene,
            repeated=looked is not None and looked.repeated,
        )
        return Handling(decided, self._queue(decided.lookups), taken[0] if taken else None)

    def answered(
        self, drawn: Handling, x: Tensor, given: NDArray[Any], prediction: Prediction, looked: Looked | None
    ) -> None:
        """Record the outcome of a request.

        `x` is the preprocessed input, `given` the input as its client sent it, and `looked` the result of its
        lookup in memory, if there was one.
        """
        decided, said = drawn.decided, Given(prediction, looked)
        if decided.may_hit and not said.recalled:
            self._reached(prediction)
        if drawn.place is not None:
            drawn.place.fill(lambda: self._follow(decided, x, given, said))
        elif (known := self._auditor.known(decided, said)) is not None:
            self._auditor.learn(decided, said, known)

    def unanswered(self, drawn: Handling, x: Tensor, given: NDArray[Any], looked: Looked | None) -> None:
        """Record that a request has no answer: no one waits for it any more, or the engine failed.

        Parameters as for `answered`. It still judges what did not answer (`Auditor.unanswered`).
        """
        decided = self._auditor.unanswered(drawn.decided)
        if drawn.place is not None:
            drawn.place.fill(lambda: self._follow(decided, x, given, Given(NO_ANSWER, looked)))

    # ----------------------------------------------------------------------------------------------------

    def _queue(self, lookups: bool) -> RequestQueue:
        answering = self._version if self.post is None else self.post.deployed
        return answering.queue if lookups or self._base is None else self._base

    def _reached(self, prediction: Prediction) -> None:
        """Record the cost of a request that the network answered: lookups pause if they do not pay."""
        post = self.post
        has_figures = post is not None and post.deployed.composition is not None
        can_rest = has_figures and self._exact and self._base is not None
        instead = 0.0
        if self._memory is not None:
            instead = self._memory.more_alone(after_memory=self.after_memory)
        if can_rest and self._rest.answered(prediction.exit, instead):
            why = "memory answers more without them" if instead else "they cost more than they save"
            _log.info("lookups pause for a while", extra={"version": self.name, "reason": why})

    @property
    def _probes(self) -> bool:
        """Whether an audit that agrees runs the other settings, too."""
        return self.post is not None and not self.post.shows_all(self.post.level, agreed=True)

    def _new_draws(self) -> Draws:
        """Draws at rates that depend on the versions and settings taking part, never on the answer."""
        shared = self._shared
        self._draws_probe = self._probes
        cost = self._cost + _COST_OF_TRIAL * (self._draws_probe + (self._trial is not None))
        audits = audit_share(shared.settings.audit_budget, shared.sampling, cost)
        return Draws(audits, shared.sampling, shared.settings.trials)

    async def _follow(self, decided: Decided[Answering], x: Tensor, sent: NDArray[Any], given: Given) -> None:
        """Compute all that is needed, then settle it together.

        Where the reference fails, all that was to be compared disagrees: misses need no reference, and would
        be left alone to prove something.
        """
        if self._version.gone:  # the version that answered is being unloaded
            self._shared.counts.left_out += 1
            return
        needs = self._auditor.needs(decided, given)
        if needs is None:
            return
        try:
            base = needs.known or await self._asked(self._base or self._version.queue, x)
        except Exception:
            if not self._version.gone:
                self._auditor.failed(decided, given, needs.shadows)
                self._counted()
            raise
        found = [
            (post, counting, await self._looked_up(post, x, base))
            for post, counting in needs.shadows
            if not post.version.gone
        ]
        asked = self._auditor.own(decided, given, base)
        own = () if asked is None else await self._looked_up(asked, x, base)
        said = _said(given.prediction) if decided.may_hit else self._would(decided, found)
        compared = self._auditor.settle(decided, given, base, found, own)
        early = decided.lookups or given.recalled or (decided.may_hit and not self._exact)
        for each in compared:
            if early or each.shadow:  # otherwise the reference itself answered
                self._count(each)
        self._counted()
        if decided.drawn.sample and not given.recalled:
            self._keep(sent, said, base)

    def _counted(self) -> None:
        """Have written what a request has just counted for: caches, or a proof of memory alone."""
        if self._shared.guarded:
            self._shared.standing.audited()

    async def _asked(self, queue: RequestQueue, x: Tensor) -> Prediction:
        return await ask_last(queue, x, self._shared.settings.audit_budget)

    async def _looked_up(self, post: Post[Answering], x: Tensor, base: Prediction) -> Sequence[Probed]:
        """The answer of each setting of a version; one that fails disagrees, and hides no other answer."""
        probe = post.version.probe
        try:
            if probe is not None:
                return await asyncio.get_running_loop().run_in_executor(self._shared.prober, probe, x, base)
            said = await self._asked(post.version.queue, x)
        except Exception as error:  # of any type, like the failures of engines
            if post.version.gone:
                raise
            log_failure(_log, "lookups failed", error, version=post.version.name)
            return lookups_failed(post)
        return [Probed(said.class_index, said.exit, said.class_index == base.class_index)]

    def _would(
        self,
        decided: Decided[Answering],
        found: Sequence[tuple[Post[Answering], Counting, Sequence[Probed]]],
    ) -> Probed | None:
        """The answer of the setting deployed for the request; without one, of the setting to prove next."""
        for post, counting, probed in found:
            if post is self.post:
                level = decided.level or counting.watch.level + 1
                return probed[min(level, len(probed)) - 1]
        return None

    def _count(self, compared: Compared[Answering]) -> None:
        counts, agrees = self._shared.counts, compared.class_index == compared.base_class
        if not compared.shadow:
            counts.agreed += agrees
            counts.disagreed += not agrees
        elif self._shared.guarded:
            counts.trials_agreed += agrees
            counts.trials_disagreed += not agrees

    def _keep(self, sent: NDArray[Any], own: Probed | None, reference: Prediction) -> None:
        """Keep a sample; `own` is the caches' answer, whether it was given or not."""
        if self._shared.writer is None:
            return
        hit = own is not None and own.exit != BASE
        self._shared.writer.offer(
            Record(
                sent,
                "image" if sent.dtype.kind == "u" else "input",
                reference.class_index,
                time.time(),
                self._shared.settings.name,
                source=self.name,
                exit=own.exit if own is not None and hit else None,
                agreed=own.class_index == reference.class_index if own is not None and hit else None,
                probabilities=reference.probabilities.numpy(),
            )
        )


def _said(prediction: Prediction) -> Probed:
    return Probed(prediction.class_index, prediction.exit, agreed=False)
