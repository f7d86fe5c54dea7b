"""The walk that certifies agreement with the base model of at least A, stated with confidence 1 - delta.

Settings are ordered from the strictest to the loosest before the certify split is looked at. From the
strictest on, a setting with k disagreements among n inputs passes if P(Bin(n, 1 - A) <= k) <= delta; the walk
stops at the first that does not, and the last that passed is deployed (fixed-sequence testing; Angelopoulos,
Bates, Candes, Jordan, Lei: Learn then Test, 2021). To deploy a setting whose true agreement is below A, the
walk must have passed the first such setting of the sequence, which has probability at most delta. So no
correction for the number of settings is needed.

Class by class the same walk is taken, and a setting passes if each class passes on its own inputs (classes as
the base model answers). That "some class is below A" is rejected only if the test of every class rejects, the
bad one's among them, which happens with probability at most delta: an intersection-union test (Berger 1982).
So the number of classes needs no correction either; what it needs is enough inputs of every class.

All of this assumes that the inputs were drawn independently of each other from what will be served. Frames of
one video, or crops of one picture, were not: a hundred of them may prove no more than one. Exact copies are
found and counted with care (`gati.composition.copies`); near ones cannot be.

A command that walks several paths on the same inputs, one an engine, takes each at a `level` of its own; the
levels add up to at most delta, and are fixed before these inputs are looked at (`gati.composition.sharing`).

What a walk through several settings proves is the target and no more: the exact lower limit (Clopper,
Pearson) of the setting it ends at would not hold, as the walk ended there because of these counts. Where one
setting was fixed beforehand it holds; of several classes the least of their limits, by the argument above.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gati.composition.binomial import check_levels, p_value
from gati.composition.certificate import Certificate, ClassCounts, LossCounts, Tested
from gati.errors import CompositionError

if TYPE_CHECKING:
    from jaxtyping import Int


def certify(
    path: Iterable[LossCounts],
    accuracy: float,
    delta: float,
    *,
    share: float = 1.0,
    settings: int | None = None,
) -> Certificate:
    """Walk through `path`, (losses, inputs) of each setting, strictest first, fixed before counting.

    It is counted no further than the walk goes; `settings` is how many there are, if `path` does not tell.
    `share` of `delta` is what this walk may err with. Raises CompositionError for a target, delta or share
    outside (0, 1), or counts that cannot be.
    """
    return _walk(([counts] for counts in path), accuracy, delta, share, _length(path, settings))[0]


def certify_every_class(
    path: Iterable[Sequence[LossCounts]],
    accuracy: float,
    delta: float,
    class_names: Sequence[str] = (),
    *,
    share: float = 1.0,
    settings: int | None = None,
) -> Certificate:
    """Walk through `path`, (losses, inputs) of each class of each setting; each class must reach `accuracy`.

    As `certify` otherwise.
    """
    certificate, counted = _walk(path, accuracy, delta, share, _length(path, settings))
    counts = counted[certificate.deployed or 0] if counted else ()
    names = class_names or [str(index) for index in range(len(counts))]
    by_class = tuple(ClassCounts(name, *each) for name, each in zip(names, counts, strict=True))
    return replace(certificate, by_class=by_class)


def _length(path: Iterable[object], settings: int | None) -> int:
    if settings is not None:
        return settings
    if not isinstance(path, Sized):
        raise TypeError("give settings, how many there are, with a path that has no length")
    return len(path)


def _walk(
    path: Iterable[Sequence[LossCounts]], accuracy: float, delta: float, share: float, settings: int
) -> tuple[Certificate, list[Sequence[LossCounts]]]:
    # a setting passes if each of its parts does
    check_levels(accuracy, delta)
    if not 0.0 < share <= 1.0:
        raise CompositionError(f"share of delta is {share!r}, must be above 0 and at most 1")
    tested: list[Tested] = []
    counted: list[Sequence[LossCounts]] = []
    deployed: int | None = None
    for position, parts in enumerate(path):
        for lost, count in parts:
            if not 0 <= lost <= count:
                raise CompositionError(f"{lost} losses among {count} inputs: there cannot be; count again")
        probability = max(p_value(*part, accuracy) for part in parts)
        passed = probability <= share * delta
        losses, inputs = (sum(column) for column in zip(*parts, strict=True))
        tested.append(Tested(losses, inputs, probability, passed))
        counted.append(parts)
        if not passed:
            break
        deployed = position
    return Certificate(
        accuracy=accuracy,
        delta=delta,
        deployed=deployed,
        tested=tuple(tested),
        settings=settings,
        share=share,
    ), counted


def count_by_class(
    answer: Int[NDArray[np.int64], " n"], base_class: Int[NDArray[np.int64], " n"], classes: int
) -> tuple[LossCounts, ...]:
    """Return (losses, inputs) of each class of the base model's, from both answers to all inputs."""
    inputs = np.bincount(base_class, minlength=classes)
    losses = np.bincount(base_class[answer != base_class], minlength=classes)
    return tuple(LossCounts(int(lost), int(count)) for lost, count in zip(losses, inputs, strict=True))
