"""Records of memory: a request that was looked up, and all that is remembered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from gati.adaptation.memory import FEATURES, MemoryContents, Seen
from gati.adaptation.recall_ladder import Intent
from gati.engine.exits import Prediction
from gati.guard.auditor import RECALL


class Looked(NamedTuple):
    """A request looked up in memory.

    `confident`: memory may answer it; `known`: some setting that is released or under proof would. `intents`
    has what each ladder says. `scene` is the scene it belongs to; None: it begins one, as it is far from all
    that is remembered of its place, or as the place is new and others are not. `new_scene`: proofs by earlier
    requests say nothing of it, as its scene is new. `number` counts lookups. `asked` False: memory must not
    answer it, and proves nothing by it. `repeated`: its place showed the same just before.
    """

    place: str
    sketched: NDArray[np.float32]
    seen: Seen | None
    confident: bool
    known: bool
    intents: tuple[Intent, ...]
    scene: int | None = 0
    new_scene: bool = False
    number: int = 0
    asked: bool = True
    repeated: bool = False

    def where(self, *, alone: bool) -> Looked:
        """The same lookup, once it is known what answers the request if memory does not.

        `alone`: the reference, and not only in new scenes; otherwise caches.
        """
        return self._replace(confident=self.asked and self.intents[0 if alone else -1].confident)

    @property
    def taken(self) -> bool:
        """Whether memory answers it instead of caches, where both may."""
        return self.intents[-1].takes

    @property
    def answer(self) -> Prediction | None:
        """The remembered answer, if memory may answer."""
        return self.seen.answer._replace(exit=RECALL) if self.seen is not None and self.confident else None

    def wrong(self, base: Prediction) -> bool:
        """Whether the remembered answer is not the base model's."""
        return self.seen is not None and self.seen.answer.class_index != base.class_index


class Remembered(NamedTuple):
    """The contents of a memory: its `state`, the inputs of each place, and what it has learned from.

    `places` have sketches [n, size] with their answers and scenes, oldest first. `labelled` are features with
    whether the remembered answer was wrong and its scene, `looked` the features of recent requests.
    `new_scenes` are the scenes that are still new, with the number of requests that each has shown. `names`
    are places learned from, also of an earlier memory whose contents are not trusted any more; `settled`: so
    much was learned that places which are not among them are late.
    """

    state: Mapping[str, Any]
    places: Mapping[str, MemoryContents]
    labelled: tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]]
    looked: NDArray[np.float64]
    new_scenes: Sequence[tuple[int, int]] = ()
    names: Sequence[str] = ()
    settled: bool = False

    @property
    def last_scenes(self) -> list[int]:
        """The scene that began last, of each part of the contents."""
        parts = (self.labelled[2], *(scenes for _, _, scenes in self.places.values()))
        return [int(each.max()) for each in parts if len(each)]

    @classmethod
    def only(cls, names: Sequence[str], *, settled: bool) -> Self:
        """No contents, only the names of places."""
        nothing = np.empty((0, FEATURES))
        labelled = nothing, np.empty(0, np.bool_), np.empty(0, np.int64)
        return cls({}, {}, labelled, nothing, names=names, settled=settled)
