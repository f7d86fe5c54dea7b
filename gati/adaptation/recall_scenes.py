"""Scenes of places: which one an input belongs to, and whether it, or its place, is still new.

What audits have proven was proven on what places showed then. So the first requests of a new scene are
protected: the base model answers them instead of caches that were proven before (`gati.guard.auditor`). A
place that is new after others have been learned from begins with a new scene. So does one of which no more
than the name is known: proofs of caches live longer than the memory of what it showed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gati.adaptation.memory import Memory, Seen

_NEW_SCENE = 20  # requests of a scene that is still new
_NEW_SCENES = 100  # most whose requests are counted, besides one of each place


class Scenes:
    """The scenes of at most `most_places` places. Not thread-safe.

    `names` are the places that an earlier run has learned from; `settled`: it has learned enough. If there
    are more names than places, as where a place is a user, a new place is nothing special: else the base
    model would answer nearly all requests.
    """

    def __init__(self, most_places: int, names: Iterable[str] = (), *, settled: bool = False) -> None:
        self._most_places = most_places
        self._names = dict.fromkeys(names)  # learned from first come first
        self._only_names = set(self._names)  # what they show may have changed since
        self._settled = settled or bool(self._names)  # a place that comes now is late
        self._count = 0  # begun by jumps and by late places
        self._new: dict[int, int] = {}  # how many requests each has shown so far
        self._showing_new: set[str] = set()  # places learned from whose last request was of a new scene
        self._lookups = 0
        self._begun: dict[str, tuple[int, int]] = {}  # the last one of a place, and the lookups before it

    def resume(
        self, newest: Mapping[str, int], scenes: Iterable[int], new: Sequence[tuple[int, int]]
    ) -> None:
        """Continue with what an earlier run remembered: the `newest` scene of each place.

        `scenes` are all that are remembered, `new` those still new, with the requests that each has shown.
        """
        self._names.update(dict.fromkeys(newest))
        self._only_names.difference_update(newest)
        self._new.update(new)
        self._count = max([*scenes, *self._new], default=0)
        self._showing_new.update(place for place, scene in newest.items() if scene in self._new)

    def settle(self) -> None:
        """Enough is learned: a place that comes from now on begins with a new scene."""
        self._settled = True

    @property
    def settled(self) -> bool:
        """Whether enough is learned."""
        return self._settled

    @property
    def names(self) -> tuple[str, ...]:
        """The places to know after a restart; none of them shows a new scene.

        Empty until enough is learned: places that begin together are proven together.
        """
        if not self._settled:
            return ()
        return tuple(name for name in self._names if name not in self._showing_new)

    @property
    def new(self) -> tuple[tuple[int, int], ...]:
        """The new scenes, with the requests that each has shown."""
        return tuple(self._new.items())

    @property
    def lookups(self) -> int:
        """The number of requests so far."""
        return self._lookups

    def of(self, place: str, memory: Memory | None, seen: Seen | None) -> int | None:
        """The scene of an input: that of what looks most like it, if that is known; None begins one."""
        if seen is not None:
            return seen.scene
        if memory is not None:
            return memory.newest_scene
        return None if self._is_late(place) else 0

    def show(self, place: str, scene: int | None) -> bool:
        """Count a request of that scene; returns whether the scene is new."""
        self._lookups += 1
        is_new = scene is None or self._is_new(scene)
        if not is_new:
            self._showing_new.discard(place)
        elif place in self._names:  # clients choose names: those never learned from are not kept
            self._showing_new.add(place)
        return is_new

    def learned(self, place: str, scene: int | None, lookup: int) -> int:
        """Count a place as learned from; returns the scene, which begins now if it is None.

        `lookup` is the number of the request. Requests of one moment are looked up before any of them is
        learned from: they begin one scene together, and count as shown by it.
        """
        self._only_names.discard(place)
        if place not in self._names:
            self._names[place] = None
            if scene is None or scene in self._new:
                self._showing_new.add(place)
            if len(self._names) > self._most_places + 1:  # one too many says that there are too many
                first = next(iter(self._names))
                del self._names[first]
                self._showing_new.discard(first)
        if scene is not None:
            return scene
        begun, lookups = self._begun.get(place, (0, 0))
        if lookup <= lookups:
            self._is_new(begun)
            return begun
        self._count += 1
        self._new[self._count] = 0
        if len(self._new) > _NEW_SCENES + self._most_places:
            del self._new[next(iter(self._new))]
        self._begun[place] = self._count, self._lookups
        return self._count

    def forget(self, place: str) -> None:
        """Forget the scenes of a place, but not its name."""
        self._showing_new.discard(place)
        self._begun.pop(place, None)

    def _is_late(self, place: str) -> bool:
        """Whether the place, or what it shows now, is new after enough was learned, and places are few."""
        is_known = place in self._names and place not in self._only_names
        return self._settled and not is_known and len(self._names) <= self._most_places

    def _is_new(self, scene: int) -> bool:
        """Count a request of the scene; returns whether the scene is new."""
        shown = self._new.pop(scene, None)
        if shown is None:
            return False
        if shown + 1 < _NEW_SCENE:
            self._new[scene] = shown + 1
        return True
