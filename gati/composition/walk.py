"""The walk that certifies agreement with the base model of at least A, stated with confidence 1 - delta.

Settings are ordered from the strictest to the loosest before anything looks at the certify split. Starting
with the strictest, a setting with k disagreements among n inputs passes if P(Bin(n, 1 - A) <= k) <= delta.
The walk stops at the first setting that does not pass, and the last one that passed is deployed
(fixed-sequence testing; Angelopoulos, Bates, Candes, Jordan, Lei: Learn then Test, 2021). To deploy a setting
whose true agreement is below A, the walk must have passed the first such setting of the sequence, which has
probability at most delta. So no correction for the number of settings is needed.

To certify every class, the same walk is taken, and a setting passes if each class passes on its own inputs
(classes are the base model's answers). The hypothesis that some class is below A is rejected only if the test
of every class rejects, including that of the bad class, which has probability at most delta: an
intersection-union test (Berger 1982). So the number of classes needs no correction either, but every class
needs enough inputs.

All of this assumes that the inputs were drawn independently from the distribution that will be served. Frames
of one video, or crops of one image, are not independent: a hundred of them may prove no more than one. Exact
copies are detected and counted conservatively (`gati.composition.copies`); near copies cannot be detected.

A command that walks several paths on the same inputs, one per engine, walks each at its own `level`. The
levels add up to at most delta and are fixed before these inputs are looked at (`gati.composition.sharing`).

A walk through several settings proves the target and no more. The exact lower limit (Clopper, Pearson) of the
setting at which it ends would not hold, because the walk ended there due to these counts. For a single
setting that was fixed beforehand the limit holds; with several classes it is the lowest of their limits, by
the argument above.
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

    `path` is consumed only as far as the walk goes; `settings` is its length, needed if it has no `len`.
    This walk errs with probability at most `share` of `delta`. Raises CompositionError for a target or delta
    outside (0, 1), a share outside (0, 1], or impossible counts.
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
        raise TypeError("a path without a length needs settings, the number of its settings")
    return len(path)


def _walk(
    path: Iterable[Sequence[LossCounts]], accuracy: float, delta: float, share: float, settings: int
) -> tuple[Certificate, list[Sequence[LossCounts]]]:
    # a setting passes if each of its parts does
    check_levels(accuracy, delta)
    if not 0.0 < share <= 1.0:
        raise CompositionError(f"share of delta is {share!r}, but must be above 0 and at most 1")
    tested: list[Tested] = []
    counted: list[Sequence[LossCounts]] = []
    deployed: int | None = None
    for position, parts in enumerate(path):
        for lost, count in parts:
            if not 0 <= lost <= count:
                raise CompositionError(f"{lost} losses among {count} inputs are impossible; count again")
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
    """Return (losses, inputs) of each class of the base model, from Gati's and the base model's answers."""
    inputs = np.bincount(base_class, minlength=classes)
    losses = np.bincount(base_class[answer != base_class], minlength=classes)
    return tuple(LossCounts(int(lost), int(count)) for lost, count in zip(losses, inputs, strict=True))
