"""Recall: returns the base model's earlier answer for an input similar to one seen before at the same place.

It is a cache before the network. Its prediction is the remembered answer (`gati.adaptation.memory`). Its
selector is a logistic regression of the probability that this answer is wrong
(`gati.adaptation.recall_settings`), refitted as base answers become known. It adapts to a scene within
seconds, without training networks, and costs a few percent of a small network.

Two ladders of settings decide what it may answer (`gati.adaptation.recall_ladder`): one for requests that
caches answer otherwise, one for requests that the reference answers otherwise.

It learns the same way before and after it may answer: if a released or tested setting would answer an input,
it learns the base model's answer only if the request was drawn for it beforehand, as when serving.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gati.adaptation.memory import FURTHER, FeatureRows, LastShown, Memories, sketch
from gati.adaptation.recall_checked import CheckedDistances
from gati.adaptation.recall_ladder import RecallLadder
from gati.adaptation.recall_records import Looked, Remembered
from gati.adaptation.recall_scenes import Scenes
from gati.adaptation.recall_settings import MOST, Risk
from gati.adaptation.settings import AdaptSettings
from gati.engine.exits import Prediction
from gati.errors import AdaptError
from gati.guard.ladder import Judgement
from gati.guard.proof import Proof

_LABELS = 1500  # number of most recent labels to fit to
_FEWEST = 60
_FIT_EVERY = 10  # new labels, and at least a share of all labels
_FIT_SHARE = 1 / 50
_RECENT = 600  # requests that thresholds are computed from
_LARGEST = 1e30  # of squared sketches: distances between larger ones overflow
_CAUTIOUS = 4  # requests that the base model answers after a wrong answer: the next inputs are alike
_NOTHING_CHECKED = CheckedDistances()


class Recall:
    """Remembers answers, reuses them, and learns when they can be trusted. Thread-safe.

    `agreement` is the promise, `spend` gives the delta of each attempt to prove some settings,
    `audits_to_false_alarm` is the guard's. `leave` takes the fits as jobs for the background, and returns
    whether it does. `on_change` is called when a setting is released or withdrawn, with the number of
    settings released from then on and whether they are those of memory alone. With `alone` False there is
    only the ladder next to caches. At most `places` are remembered; the one unused for longest is forgotten.
    `known` are the contents of an earlier memory, which this one continues, with its released settings and
    proofs under way.
    """

    def __init__(
        self,
        agreement: float,
        spend: Callable[[], float],
        audits_to_false_alarm: float,
        *,
        leave: Callable[[Callable[[], None]], bool],
        on_change: Callable[[Judgement, int, bool], None],
        alone: bool = True,
        places: int = AdaptSettings.places,
        known: Remembered | None = None,
    ) -> None:
        self._leave, self._on_change = leave, on_change
        self._lock = threading.RLock()
        self._memories = Memories(places)
        self._last_shown = LastShown()
        self._labelled = FeatureRows(_LABELS)
        self._looked = FeatureRows(_RECENT)
        self._since_fit = 0
        self._fitting = False
        self._risk: Risk | None = None
        self._checked: dict[int, CheckedDistances] = {}  # by scene
        names, settled = ((), False) if known is None else (known.names, known.settled)
        self._scenes = Scenes(places, names, settled=settled)
        self._cautious: dict[str, int] = {}  # how many more requests of a place are not answered
        cases = (True, False) if alone else (False,)
        new = partial(RecallLadder, agreement, spend, audits_to_false_alarm)
        resumed = None if known is None else self._resumed(known, new, cases)
        self._ladders = resumed or tuple(new(alone=case) for case in cases)
        if resumed is not None and len(self._labelled) >= _FEWEST and len(self._looked):
            self._fit()

    @property
    def settings(self) -> int:
        """The number of settings, from strict to loose."""
        return len(MOST)

    @property
    def level(self) -> int:
        """The largest number of settings that may answer."""
        return max(ladder.level for ladder in self._ladders)

    @property
    def serves(self) -> bool:
        """Whether it may answer."""
        return self.level > 0

    @property
    def proof(self) -> Proof | None:
        """The next setting's proof, of the first ladder that has one; None if all settings are released."""
        return next((proof for ladder in self._ladders if (proof := ladder.proof) is not None), None)

    @property
    def proving(self) -> Proof | None:
        """The current proof, unless it is hopeless."""
        proof = self._ladders[0].proof
        return None if self._risk is None or proof is None or proof.hopeless else proof

    @property
    def next_to_caches(self) -> tuple[float | None, int]:
        """The share of requests that memory answers next to caches, None if it may not; by which setting."""
        ladder = self._ladders[-1]
        return ladder.share if ladder.level else None, ladder.level

    def more_alone(self, *, after_memory: bool) -> float:
        """The share of requests left to caches that memory would answer if caches were not looked up.

        `after_memory`: memory answers next to them; otherwise all requests are left to them.
        """
        if len(self._ladders) < 2:
            return 0.0
        alone, others = (ladder.share for ladder in self._ladders)
        if not after_memory:
            return alone
        return max(0.0, alone - others) / max(1.0 - others, 1e-9)

    def look(self, x: Tensor, place: str | None, *, alone: bool = False, asked: bool = True) -> Looked | None:
        """Look up an input [1, ...] of that place; None without a place, or if its numbers compare nothing.

        `alone`: the reference answers the request if memory does not, and not only in new scenes; if that is
        decided later, see `Looked.where`. `asked` False: only to know its scene, and to learn from it.
        """
        if place is None or not x.is_floating_point() or not _is_usual(sketched := sketch(x)):
            with self._lock:
                for ladder in self._ladders if asked else ():
                    ladder.passed()
            return None
        with self._lock:
            memory = self._memories.used(place)
            seen = None if memory is None else memory.recall(sketched)
            repeated = self._last_shown.again(place, sketched)
            risk, covered, scene = 1.0, False, self._scenes.of(place, memory, seen)
            if seen is not None:
                self._looked.add(seen.features)
            if seen is not None and self._risk is not None:
                risk = float(self._risk(seen.features))
                checked = self._checked.get(seen.scene, _NOTHING_CHECKED)
                covered = checked.covers(seen.distance)
                scene = None if checked.is_jump(seen.distance) else scene
            if (left := self._cautious.pop(place, 0)) > 0:
                covered = False
                self._cautious[place] = left - 1
            new, number = self._scenes.show(place, scene), self._scenes.lookups
            intents = tuple(ladder.judge(risk, covered=covered, asked=asked) for ladder in self._ladders)
            known = any(each.known for each in intents)
            looked = Looked(place, sketched, seen, False, known, intents, scene, new, number, asked, repeated)
            return looked.where(alone=alone)

    def learn(self, looked: Looked, base: Prediction, *, drawn: bool, tried: bool = False) -> None:
        """Learn from the base model's answer to a request.

        `drawn`: it was drawn for an audit before its answer was known, as is done while memory answers. Only
        then do known inputs count for learning and for guards. `tried`: it was drawn for the current proofs,
        which count both kinds.
        """
        with self._lock:
            audited = drawn or tried
            changes = self._audited(looked, wrong=looked.wrong(base), drawn=drawn) if audited else []
            if (drawn or not looked.known) and bool(torch.isfinite(base.probabilities).all()):
                self._remember(looked, base)
            count = len(self._labelled)
            due = count >= _FEWEST and self._since_fit >= max(_FIT_EVERY, count * _FIT_SHARE)
            wanted = due and not self._fitting
            self._fitting |= wanted
        if wanted and not self._leave(self._fit):
            self._fitting = False
        for change in changes:
            self._on_change(*change)

    def _remember(self, looked: Looked, base: Prediction) -> None:
        if (seen := looked.seen) is not None:
            wrong, meant = looked.wrong(base), any(each.meant for each in looked.intents)
            self._labelled.add(seen.features, wrong, seen.scene)
            self._since_fit += 1
            checked = self._checked.setdefault(seen.scene, CheckedDistances())
            checked.add(seen.distance, wrong=wrong, meant=meant)
            if meant and wrong:
                self._cautious[looked.place] = _CAUTIOUS
        scene = self._scenes.learned(looked.place, looked.scene, looked.number)
        forgotten = self._memories.add(looked.place, looked.sketched, base, scene)
        if forgotten is not None:
            self._cautious.pop(forgotten, None)
            self._scenes.forget(forgotten)

    def lost(self, looked: Looked, *, drawn: bool) -> None:
        """Count an audit for which the base model has no answer, as if the remembered one were wrong."""
        with self._lock:
            changes = self._audited(looked, wrong=True, drawn=drawn)
        for change in changes:
            self._on_change(*change)

    def _audited(self, looked: Looked, *, wrong: bool, drawn: bool) -> list[tuple[Judgement, int, bool]]:
        """Count an audit for the ladders; returns what changes."""
        found = []
        for ladder, each in zip(self._ladders, looked.intents, strict=True) if looked.asked else ():
            judged = ladder.audited(each, wrong=wrong, steers=drawn, repeated=looked.repeated)
            if judged is not None:
                found.append((judged, ladder.level, ladder.alone))
        return found

    def _fit(self) -> None:
        with self._lock:
            self._since_fit, self._fitting = 0, False  # first: one that fails must not be the last
            features, wrong, scenes = self._labelled.all()
            recent = self._looked.all()[0]
        risk = Risk(features, wrong, FURTHER)
        risks, own = np.sort(risk(recent)), risk(features)
        with self._lock:
            self._risk = risk
            for ladder in self._ladders:
                ladder.expect(risks)
            meant = own < max(ladder.highest_risk for ladder in self._ladders)
            self._checked = {
                scene: CheckedDistances(features[of, 0].tolist(), wrong[of].tolist(), meant[of].tolist())
                for scene in np.unique(scenes).tolist()
                for of in (scenes == scene,)
            }
            self._scenes.settle()

    def state(self) -> dict[str, Any]:
        """Its ladders, as JSON values."""
        with self._lock:
            return {"ladders": [ladder.state() for ladder in self._ladders]}

    def prove_apart(self) -> None:
        """Begin the proofs under way on further shares of delta, as another process goes on with them."""
        with self._lock:
            for ladder in self._ladders:
                ladder.prove_apart()

    def heed(self, before: Any, theirs: Any) -> bool:
        """Withdraw what another process has, between states `before` and `theirs`; returns whether it did."""
        with self._lock:  # its proofs are of what it has learned meanwhile, and not taken
            levels = zip(self._ladders, levels_in(before), levels_in(theirs), strict=False)
            return any([ladder.restrict(left) for ladder, was, left in levels if left < was])

    def remembered(self) -> Remembered:
        """All of its contents."""
        with self._lock:
            contents = self.state(), self._memories.contents(), self._labelled.all(), self._looked.all()[0]
            return Remembered(*contents, self._scenes.new, self._scenes.names, self._scenes.settled)

    @property
    def names(self) -> tuple[str, ...]:
        """The places learned from, to know which are new after a restart."""
        with self._lock:
            return self._scenes.names

    @property
    def settled(self) -> bool:
        """Whether so much was learned that a place which is new from now on is late."""
        with self._lock:
            return self._scenes.settled

    def _resumed(
        self, known: Remembered, new: Callable[..., RecallLadder], cases: Sequence[bool]
    ) -> tuple[RecallLadder, ...] | None:
        """Restore the contents of an earlier memory; None, without any change, if it does not match."""
        try:
            states = known.state["ladders"]
            ladders = tuple(new(alone=case, known=state) for case, state in zip(cases, states, strict=True))
            memories = self._memories.filled(known.places)
        except (KeyError, TypeError, ValueError, AdaptError):
            return None
        self._memories = memories
        for features, label, scene in zip(*known.labelled, strict=True):
            self._labelled.add(features, bool(label), int(scene))
        self._scenes.resume(memories.newest_scenes, known.last_scenes, known.new_scenes)
        for features in known.looked:
            self._looked.add(features)
        return ladders

    @property
    def places(self) -> int:
        """The number of places remembered."""
        return len(self._memories)

    @property
    def forgotten(self) -> int:
        """The number of places forgotten so far, as there was no room for them."""
        return self._memories.forgotten


def _is_usual(sketched: NDArray[np.float32]) -> bool:
    """Whether distances from it are finite: one that is not would spoil the regression for all places."""
    return bool(np.square(sketched, dtype=np.float64).sum() <= _LARGEST)


def levels_in(state: Any) -> list[int]:
    """The number of settings that each ladder of a saved state lets answer; none if it is damaged."""
    try:
        return [int(each["ladder"]["level"]) for each in state["ladders"]]
    except (LookupError, TypeError, ValueError):
        return []
