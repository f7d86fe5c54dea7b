"""Check that nothing answers without permission: day-long streams through all code that grants it.

    python -m benchmarks.promise_streams [--streams 200] [--requests 17280]

The deciding code is real: draws, the audit queue, watches, proofs, the file that survives restarts, trials of
new versions, their settings and those of memory. The world is synthetic: scenes change, and each setting of a
version has an error probability per scene, usually exactly the smallest that must not be proven. In every
other stream, caches are wrong only about requests that memory does not know. New versions are faster than the
serving one. There are retrainings, rollbacks to earlier versions, restarts, and an audit queue that is full
half of the time.

A stream breaks its promise if a proof releases something whose error probability exceeded the tolerance at
every audit of that proof. The delay is that of alarms, in audits, relative to ln(R) / KL.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gati.adaptation.deployments import Deployed
from gati.adaptation.follow import FollowUp
from gati.adaptation.memory import FEATURES, FURTHER, Seen
from gati.adaptation.recall import Recall
from gati.adaptation.recall_records import Looked, Remembered
from gati.adaptation.recall_settings import Risk
from gati.adaptation.renewal import Promise, RenewalOutcome
from gati.adaptation.samples import Samples
from gati.adaptation.shadow import Ticket
from gati.adaptation.succession import Succession
from gati.composition.composition import Composition, Exit, Expected
from gati.composition.walk import certify
from gati.engine.exits import BASE, Prediction
from gati.guard.auditor import RECALL, Probed
from gati.guard.draws import Draws
from gati.guard.ladder import Judgement
from gati.guard.posts import Post
from gati.guard.standing import Standing
from gati.types import TrialId
from gati.versions.setting import Setting

AGREEMENT, CONFIDENCE, FALSE_ALARM = 0.97, 0.95, 10_000.0
ALPHA = 1.0 - AGREEMENT
KNOWN = 0.5  # share of requests that memory knows
SCENES = 3
HOPELESS = 0.8  # share of versions that must not be proven in any scene; the others vary
QUALITIES = (ALPHA, 0.3 * ALPHA, 3.0 * ALPHA)
FAST_MS, SLOW_MS = 0.1, 0.2  # an early answer of a new version, and of the serving version
LEVELS = 3  # settings of a retrained version, from strict to loose
STRICTER = 0.3  # loss factor of its strictest setting, unless all settings are equally bad
FEATURELESS = np.zeros(FEATURES)
X = torch.zeros(1, 1)
PROBABILITIES = torch.tensor([0.9, 0.1])


def said(class_index: int, exit: str) -> Prediction:
    return Prediction(class_index, PROBABILITIES, exit, "v")


TRUE, RIGHT, WRONG = said(0, BASE), said(0, "block"), said(1, "block")


def composition(number: int) -> Composition:
    """Return caches distinguished by creation time; the library's own are certified."""
    leaving = Exit(
        TrialId("t"), "block", 0, "v", "s", 0.5, "inline", 0.9, 0.99, 0.1, 8, FAST_MS if number else SLOW_MS
    )
    certificate = certify([(0, 1500)], AGREEMENT, 1.0 - CONFIDENCE)
    return Composition(
        name="default", objective="exact", solver="none", gap=None, alpha=None, accuracy_target=AGREEMENT,
        confidence=CONFIDENCE, memory_limit_bytes=None, backend="torch", placement="inline",
        exits=(leaving,), expected=Expected(1.0, 2.0, 2.0, 0.9, 0.99, 8),
        certificate=None if number else certificate, checkpoint_sha256="0" * 64, created=str(number),
    )  # fmt: skip


@dataclass
class World:
    """The ground truth: error rates of each version and of memory in each scene."""

    random: np.random.Generator
    easy: bool = False  # caches are wrong only about requests that memory does not know
    known: bool = False  # whether memory knows the current request
    scene: int = 0
    wrong: dict[int, tuple[float, ...]] = field(default_factory=dict)
    memory: tuple[float, ...] = ()
    activated: int | None = None

    def version(self, number: int) -> Deployed:
        """Return a version, as deployments open it; a new number creates one."""
        if number not in self.wrong:
            self.wrong[number] = self.qualities() if number else (0.5 * ALPHA, 3.0 * ALPHA, ALPHA)
        served: Any = SimpleNamespace(composition=composition(number), number=number)
        laid = Setting(served.composition, ())
        return Deployed(number, served, settings=(laid,) * LEVELS if number else ())

    def at(self, number: int, level: int) -> Deployed:
        """Return a version at one of its settings."""
        return self.version(number)

    def qualities(self) -> tuple[float, ...]:
        """Draw error rates for each scene."""
        if self.random.random() < HOPELESS:
            return (ALPHA,) * SCENES
        return tuple(float(each) for each in self.random.choice(QUALITIES, SCENES))

    def chance(self, number: int, level: int, *, after_memory: bool) -> float:
        """Return the current error probability of a version at a setting; the strictest may be better.

        It is over all requests, or over those that memory leaves.
        """
        stricter = number and level == 1 and number % 2 == 0
        of_rest = 1.0 / (1.0 - KNOWN) if after_memory and self.easy else 1.0
        return self.wrong[number][self.scene] * (STRICTER if stricter else 1.0) * of_rest

    def chance_now(self, number: int, level: int) -> float:
        """Return the error probability for the current request."""
        if self.easy and self.known:
            return 0.0
        return self.chance(number, level, after_memory=True)

    def answer(self, number: int, level: int = 1) -> Prediction:
        """Return the answer of its caches to the current request."""
        return WRONG if self.random.random() < self.chance_now(number, level) else RIGHT

    # As deployments
    open = version

    def active(self) -> tuple[Deployed, str]:
        return self.version(self.activated or 0), ""

    def newest(self) -> tuple[Deployed | None, str]:
        return None, ""

    def activate(self, deployed: Deployed) -> None:
        self.activated = deployed.number

    # As the shadow
    def reference(self, x: Any) -> Prediction:
        return TRUE

    def caches(self, served: Any, *, threaded: bool) -> SimpleNamespace:
        return SimpleNamespace(inline=lambda x: [self.answer(served.number)])

    def probe(self, version: Deployed) -> Callable[[Any, Prediction], list[Probed]]:
        """Probe a version; looser settings are wrong wherever stricter ones are."""

        def probed(x: Any, base: Prediction) -> list[Probed]:
            drawn = self.random.random()
            lost = [drawn < self.chance_now(version.number, level) for level in range(1, LEVELS + 1)]
            return [Probed(int(each), "block", not each) for each in lost]

        return probed


class Queue:
    """A queue that runs jobs at once; every other stretch of requests it is full, every fourth also late."""

    threaded = False

    def __init__(self, stretch: int) -> None:
        self._stretch = stretch
        self.request = 0

    @property
    def late(self) -> bool:
        return self._stretch > 0 and (self.request // self._stretch) % 4 == 3

    def reserve(self) -> bool:
        return self._stretch == 0 or (self.request // self._stretch) % 2 == 0

    def release(self) -> None:
        return None

    def submit(self, job: Callable[[], None], *, reserved: bool = False) -> bool:
        job()
        return True

    def wait(self, deadline_s: float) -> bool:
        return True

    def close(self, deadline_s: float) -> None:
        return None


class Memory(Recall):
    """Memory that knows half of the requests, with the world's error rate at every setting.

    The rate is over its answers, or over all requests if memory answers `alone`.
    """

    def __init__(self, world: World, *, answers_alone: bool, **options: Any) -> None:
        super().__init__(AGREEMENT, options.pop("spend"), FALSE_ALARM, leave=at_once, **options)
        self._world, self._answers_alone = world, answers_alone
        for ladder in self._ladders:
            ladder.expect(np.full(100, 1e-6))
        self._risk = Risk(np.random.default_rng(0).normal(size=(60, FEATURES)), np.zeros(60, bool), FURTHER)

    def chance(self, *, of_all: bool) -> float:
        """Return its current error rate, over its answers or over all requests."""
        own = self._world.memory[self._world.scene] / (KNOWN if self._answers_alone else 1.0)
        return own * KNOWN if of_all else own

    def look(self, x: Any, place: str, *, alone: bool = False) -> Looked:
        known = self._world.known = bool(self._world.random.random() < KNOWN)
        wrong = self._world.random.random() < self.chance(of_all=False)
        seen = Seen(FEATURELESS, WRONG if wrong else RIGHT)
        judged = tuple(ladder.judge(0.0 if known else 1.0) for ladder in self._ladders)
        answers = judged[0 if alone else 1].confident
        return Looked(place, FEATURELESS, seen, answers, known, judged)

    def learn(self, looked: Looked, base: Prediction, *, drawn: bool, tried: bool = False) -> None:
        if not (drawn or tried):
            return
        for ladder, each in zip(self._ladders, looked.intents, strict=True):
            judged = ladder.audited(each, wrong=looked.wrong(base), steers=drawn)
            if judged is not None:
                self._on_change(judged, ladder.level, ladder.alone)


def at_once(job: Callable[[], None]) -> bool:
    job()
    return True


@dataclass
class Day:
    """Results of a stream."""

    broken: int = 0  # releases with too high an error rate at every audit of the proof
    released: int = 0
    stopped: int = 0
    early: int = 0
    requests: int = 0
    delays: list[float] = field(default_factory=list)  # audits to an alarm, times KL / ln R


class Stream:
    """One day of requests."""

    def __init__(self, seed: int, folder: Path, *, stretch: int) -> None:
        self.random = np.random.default_rng(seed)
        self.world = World(self.random, easy=seed % 2 == 0)
        self.day = Day()
        self._seed, self._path, self._queue = seed, folder / f"{seed}.json", Queue(stretch)
        self._alone = seed % 4 == 3  # no lookups: memory answers next to the reference
        self._starts = 0
        self._least: dict[Any, float] = {}  # lowest loss probability since the proof began
        self._levels: dict[tuple[int, bool], int] = {}  # proven settings, by version and requests
        # the audit count at which the current error rate began, and that rate
        self._since: dict[tuple[int, bool], tuple[int, float]] = {}
        self.world.memory = self.world.qualities()
        self.start()

    def start(self) -> None:
        """Start or restart the process."""
        self._starts += 1
        lock = threading.RLock()
        standing = Standing(1.0 - CONFIDENCE, self._path, audits_to_false_alarm=FALSE_ALARM)
        standing.save = partial(quickly_saved, standing, standing.save)  # type: ignore[method-assign]
        self._standing = standing
        self._lock = lock
        self.succession = Succession(
            self.world,
            Promise(AGREEMENT, CONFIDENCE),
            standing,
            lock,  # type: ignore[arg-type]
            tell=lambda *_: None,
            on_serving=lambda each: None,
            figures=lambda each: composition(0),
        )
        self.recall = Memory(
            self.world,
            answers_alone=self._alone,
            spend=standing.spending.next,
            on_change=self._recalling,
            known=_kept(standing),
        )
        standing.keep("memory", self.recall.state)
        self.succession.begin(0)
        self._levels.clear()  # continuing is not a release
        self._follow = FollowUp(
            Draws(0.05, 0.1, 1.0, seed=1000 * self._seed + self._starts),
            self.succession,
            Samples(10, 1e9),
            self.world,  # type: ignore[arg-type]
            self._queue,
            lock,
            exact=True,
            recall=self.recall,
        )

    def restart(self) -> None:
        self._standing.save(really=True)  # type: ignore[call-arg]
        self.start()

    def request(self, number: int) -> None:
        self._queue.request = number
        self._note()
        decided = self._follow.decide(1.0, lookups_pay=not self._alone)
        looked = self.recall.look(X, "place", alone=decided.alone)
        post = decided.post
        prediction = looked.answer if decided.recalls else None
        if prediction is None:
            prediction = self.world.answer(post.version.number, decided.level) if decided.lookups else TRUE
        posts = self._posts()
        before, name = post.watch, (post.version.number, post.after_memory)
        self._follow.answered(Ticket(X, number, float(number), "", prediction, looked), decided, None)
        for post in posts:
            self._proven(post)
        self.day.early += prediction.exit != BASE
        self.day.requests += 1
        if before.state == "stopped" and decided.may_hit:
            self._alarm(name, before)
        self.succession.follow_memory(*self.recall.next_to_caches)
        self.succession.give_up()

    def _posts(self) -> list[Post[Deployed]]:
        return [post for post in (self.succession.serving, self.succession.trial) if post is not None]

    def _note(self) -> None:
        """Record the lowest loss probability while each proof runs."""
        for post in self._posts():
            number, watch, after = post.version.number, post.watch, post.after_memory
            self._levels.setdefault((number, after), watch.level)
            for level, proof in enumerate(watch._ladder._proofs, 1):
                chance = self.world.chance(number, level, after_memory=after)
                name = number, after, level
                if level > watch.level:
                    begun = proof.audits == 0
                    self._least[name] = chance if begun else min(chance, self._least.get(name, chance))
            chance = self.world.chance(number, max(watch.level, 1), after_memory=after)
            known = self._since.get((number, after))
            if not watch.may_hit:
                self._since.pop((number, after), None)
            elif known is None or known[1] != chance:
                self._since[number, after] = watch.audits, chance
        for ladder in self.recall._ladders:
            chance, name = self.recall.chance(of_all=ladder.alone), (RECALL, ladder.alone)
            begun = ladder.proof is None or ladder.proof.audits == 0
            self._least[name] = chance if begun else min(chance, self._least.get(name, chance))

    def _proven(self, post: Post[Deployed]) -> None:
        """Count the settings released by this request."""
        number, after, level = post.version.number, post.after_memory, post.watch.level
        for each in range(self._levels.get((number, after), level) + 1, level + 1):
            chance = self.world.chance(number, each, after_memory=after)
            self._released((number, after, each), chance)
        self._levels[number, after] = level

    def _released(self, name: Any, chance: float) -> None:
        self.day.released += 1
        self.day.broken += self._least.get(name, chance) >= ALPHA

    def _recalling(self, judged: Judgement, level: int, alone: bool) -> None:
        if judged.kind == "released":
            self._released((RECALL, alone), self.recall.chance(of_all=alone))
        else:
            self.day.stopped += 1

    def _alarm(self, name: tuple[int, bool], watch: Any) -> None:
        self.day.stopped += 1
        begun, chance = self._since.pop(name, (0, 0.0))
        if chance > 2.0 * ALPHA:
            right = 1.0 - chance
            divergence = chance * math.log(chance / ALPHA) + right * math.log(right / AGREEMENT)
            self.day.delays.append((watch.audits - begun) * divergence / math.log(FALSE_ALARM))


def _kept(standing: Standing) -> Remembered | None:
    """Return the stored state of memory; the rest is synthetic."""
    state, nothing = standing.kept("memory", math.inf), np.empty((0, FEATURES))
    if state is None:
        return None
    labelled = nothing, np.empty(0, bool), np.empty(0, np.int64)
    return Remembered(state, {}, labelled, nothing)


def quickly_saved(standing: Standing, save: Callable[[], None], *, really: bool = False) -> None:
    """Write the file only before it is read: flushing the disk on every change tests nothing."""
    if really:
        save()


def run(seed: int, folder: Path, requests: int, *, stretch: int = 100, until_broken: bool = False) -> Day:
    """Run a stream of `requests` requests: eight scenes, at most sixty retrainings, six restarts.

    `until_broken`: it may end as soon as it has broken a promise.
    """
    stream = Stream(seed, folder, stretch=stretch)
    numbers = 0
    for number in range(requests):
        if number % (requests // 8) == 0:
            stream.world.scene = int(stream.random.integers(SCENES))
        if number % (requests // 6) == requests // 12:
            stream.restart()
        if number % (requests // 60) == requests // 120 and stream.succession.trial is None:
            serving = stream.succession.serving.deployed.number
            known = [each for each in range(1, numbers + 1) if each != serving]
            if known and stream.random.random() < 0.3:
                chosen, kind = int(stream.random.choice(known)), "reused"
            else:
                numbers += 1
                chosen, kind = numbers, "activated"
            stream.succession.take(RenewalOutcome(kind, stream.world.version(chosen), ""))  # type: ignore[arg-type]
        stream.request(number)
        if until_broken and stream.day.broken:
            break
    return stream.day


def summary(days: list[Day]) -> dict[str, float]:
    """Summarise all streams."""
    delta, count = 1.0 - CONFIDENCE, len(days)
    delays = [delay for day in days for delay in day.delays]
    return {
        "streams": count,
        "requests": sum(day.requests for day in days),
        "broken_streams": sum(day.broken > 0 for day in days) / count,
        "allowed": delta + 2.0 * math.sqrt(delta * (1.0 - delta) / count),
        "releases": sum(day.released for day in days),
        "stops": sum(day.stopped for day in days),
        "early": sum(day.early for day in days) / sum(day.requests for day in days),
        "alarms_timed": len(delays),
        "delay_of_theory": float(np.mean(delays)) if delays else float("nan"),
    }


def main() -> int:
    """Print one JSON document for a queue with room, and for one that is full half of the time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--requests", type=int, default=17_280, help="per day: one every five seconds")
    arguments = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, stretch in (("room in the queue", 0), ("queue full half of the time", 100)):
            within = Path(folder) / name
            days = [
                run(seed, within, arguments.requests, stretch=stretch) for seed in range(arguments.streams)
            ]
            found[name] = summary(days)
            print(json.dumps({name: found[name]}, indent=1), file=sys.stderr)
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
