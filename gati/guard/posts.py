"""A version with its watches: which of its settings may answer, and what they cost.

What is proven holds for the requests that it was proven on. A certificate and the audits of all requests say
nothing about those that memory leaves: memory answers the easy ones. So a version has a second watch, which
counts only audits of what memory leaves, and decides as soon as memory answers next to the version's caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

from gati.composition.composition import Composition
from gati.guard.watch import Watch

Version = TypeVar("Version")

_FASTER = 0.97  # a version on trial must take less than this share of the serving version's time


class Counting(NamedTuple):
    """The watch that counts a request, as of the `epoch` in which it was decided about.

    `level` is the setting that may answer by then; 0 if none may. In a `new_scene`, the reference answers
    instead of settings that audits have proven, so it is not what these are proven on, and not what they are
    guarded by either. Only what a certificate covers answers there, and is guarded there, too. `repeated`:
    the input is a copy of the one before, and no further evidence that the caches are right. `answered`
    False: the request has no answer, and counts only for settings that are not proven yet. `at_s` is its
    time, on the clock of proofs: audits may wait.
    """

    watch: Watch
    epoch: int
    level: int = 0
    new_scene: bool = False
    repeated: bool = False
    answered: bool = True
    at_s: float | None = None

    @property
    def proves(self) -> bool:
        """Whether it counts for the proof of any setting next to those that answer."""
        return self.watch.proof is not None and not self.new_scene

    @property
    def apart(self) -> bool:
        """Whether it counts for no proof and no guard, but only shows what does not suit the scene."""
        return self.new_scene and self.watch.proven_on > 0

    def audited(self, agreed: Sequence[bool], *, looked_up: bool = True) -> None:
        """Record what all settings said, as `Watch.audited`, if the request still counts.

        `looked_up` False: the network answered although its caches may.
        """
        if self.watch.epoch != self.epoch:
            return
        if self.apart:
            self.watch.in_new_scene(agreed, deployed=self.level)
        elif not self.answered:
            self.watch.tried(agreed, repeated=self.repeated, at_s=self.at_s)
        else:
            proves = looked_up and not self.new_scene
            self.watch.audited(
                agreed=agreed,
                proves=proves,
                deployed=self.level,
                repeated=self.repeated,
                at_s=self.at_s,
            )


class Post(Generic[Version]):
    """A version, its watches, and its `open` settings by level.

    `of_all` is the watch of all requests; `rest` opens that of the requests that memory leaves, which decides
    while `is_after_memory` returns True. Without `rest`, memory never answers next to the version's caches.

    `settings` are the ways to deploy the version, from strict to loose; empty if it has only one. `nested`:
    it is a composition of the library, and whatever a setting answers early, all looser ones answer alike.
    The loosest is the version itself, and open.
    """

    def __init__(
        self,
        version: Version,
        of_all: Watch,
        settings: Sequence[Composition] = (),
        *,
        nested: bool = False,
        rest: Callable[[], Watch] | None = None,
        is_after_memory: Callable[[], bool] = lambda: False,
    ) -> None:
        self.version = version
        self.of_all = of_all
        self._rest, self._is_after_memory = rest, is_after_memory
        self._of_earlier = False  # what the watch of the rest knows is of earlier requests
        self._memory_level: int | None = None  # by which memory leaves requests now, if it does
        self.settings = tuple(settings)
        self.nested = nested
        self.open: dict[int, Version] = {}
        if nested or not settings:
            self.open[max(1, len(settings))] = version
        self.opening = 0  # the level of the setting that is being opened
        self.waits = 0  # requests until the setting that could not be opened is tried again
        self._failed_level = self._failures = 0
        self.compare_anew()

    @property
    def after_memory(self) -> bool:
        """Whether it is judged by the requests that memory leaves, instead of all."""
        return self._rest is not None and self._is_after_memory()

    @property
    def watch(self) -> Watch:
        """The watch that decides now."""
        return self.of_rest if self.after_memory else self.of_all

    @cached_property
    def of_rest(self) -> Watch:
        """The watch of the requests that memory leaves; its proofs take their delta when it is first used."""
        if self._rest is None:
            raise AssertionError("memory does not answer next to this version")
        watch = self._rest()
        if self._of_earlier:
            watch.bring_back()
        if self._memory_level is not None:
            watch.left_by(self._memory_level)
        return watch

    def counting(self, *, new_scene: bool = False, repeated: bool = False) -> Counting:
        """The watch that counts the next request."""
        watch = self.watch
        level = self._level_by(watch)
        return Counting(watch, watch.epoch, level, new_scene, repeated, at_s=watch.now_s)

    @property
    def answers_new_scenes(self) -> bool:
        """Whether a certificate alone lets its caches answer."""
        return self.may_hit and not self.watch.proven_on

    @property
    def level(self) -> int:
        """The loosest setting that is proven, open and not in alarm; 0 if there is none."""
        return self._level_by(self.watch)

    def _level_by(self, watch: Watch) -> int:
        proven = watch.level
        if proven in self.open:  # the common case; called several times per request
            return proven
        stricter = (level for level in self.open if level < proven and not watch.in_alarm(level))
        return max(stricter, default=0)

    @property
    def may_hit(self) -> bool:
        """Whether its caches may answer."""
        return self.level > 0

    @property
    def deployed(self) -> Version:
        """The version at the setting that may answer, or as it was published if none may."""
        return self.at(self.level)

    def at(self, level: int) -> Version:
        """The version at an open setting, or as it was published."""
        return self.open.get(level, self.version)

    def shows_all(self, level: int, *, agreed: bool) -> bool:
        """Whether an answer of the setting of that level shows what all other settings would have done.

        If settings are nested and the loosest one agrees, all of them do: a stricter one either answers in
        the same way or leaves the request to the base model.
        """
        return not self.settings or (self.nested and agreed and level == len(self.settings))

    @property
    def hopeless(self) -> bool:
        """Whether no setting is proven and the proof has failed."""
        proof = self.watch.proof
        return self.watch.level == 0 and proof is not None and proof.hopeless

    def bring_back(self) -> None:
        """Withdraw proofs by audits, which were made on other requests. A certificate stays valid."""
        self.of_all.bring_back()
        self._withdraw_rest()

    def prove_anew(self) -> None:
        """Begin other proofs, with further shares of delta, unless the current ones are better than none."""
        self.of_all.prove_anew()
        self._withdraw_rest()

    def _withdraw_rest(self) -> None:
        self._of_earlier = True
        if "of_rest" in self.__dict__:
            self.of_rest.bring_back()

    def left_by(self, memory_level: int) -> bool:
        """From now on, memory leaves requests by its setting `memory_level`; as `Watch.left_by`."""
        self._memory_level = memory_level
        return "of_rest" in self.__dict__ and self.of_rest.left_by(memory_level)

    def not_opened(self, waits: int) -> None:
        """The setting that was being opened cannot be: it is due again after `waits` requests.

        They double with each further failure.
        """
        self._failures = self._failures + 1 if self.opening == self._failed_level else 1
        self._failed_level, self.opening = self.opening, 0
        self.waits = waits * 2 ** (self._failures - 1)

    @property
    def is_due(self) -> bool:
        """Whether its loosest proven setting is to be opened."""
        proven = self.watch.level
        if self.opening or not proven or proven in self.open:
            return False
        return not self.waits or proven != self._failed_level

    def compare_anew(self) -> None:
        """Forget the times compared so far."""
        self.compared = 0  # requests for which the times of all settings and of the serving version are known
        self._settings_ms = [0.0] * len(self.settings)
        self._serving_ms = 0.0

    def compare(self, exits: Sequence[str], serving_ms: float) -> None:
        """Record the exit of each setting and the time of the serving version for one request."""
        self.compared += 1
        self._serving_ms += serving_ms
        for at, (setting, exit) in enumerate(zip(self.settings, exits, strict=True)):
            self._settings_ms[at] += cost_ms(setting, exit)

    @property
    def faster(self) -> bool:
        """Whether the proven setting takes less time than the serving version, on the same requests."""
        if not self.compared:
            return True
        return self._settings_ms[self.level - 1] < _FASTER * self._serving_ms


def cost_ms(composition: Composition, exit: str) -> float:
    """The latency of a request that leaves at that exit, as measured in the composition."""
    lookups_ms = 0.0
    for leaving in composition.exits:
        if leaving.block == exit:
            return leaving.exit_ms
        lookups_ms += leaving.lookup_ms
    return composition.expected.base_latency_ms + lookups_ms
