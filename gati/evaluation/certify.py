"""Certify an existing composition again, on inputs that were not used for any choice.

Anyone can try again, on other data, until one attempt passes. So every attempt is kept, passed or not,
written or not, and all attempts of a library share delta: `gati.composition.ledger` says how, and what the
confidence of each covers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gati.composition.accuracy import AccuracyDrop, accuracy_drop
from gati.composition.binomial import check_levels
from gati.composition.certificate import AttemptCount, Certificate, LossCounts, Recount
from gati.composition.composition import Composition
from gati.composition.copies import counted
from gati.composition.ledger import Attempt, Ledger
from gati.composition.load import Served, open_served
from gati.composition.verdicts import DEFAULT_CONFIDENCE
from gati.composition.walk import certify as walk
from gati.composition.walk import certify_every_class, count_by_class
from gati.errors import CompositionError
from gati.exploration.fresh import fresh_inputs
from gati.exploration.labels import name_and_label
from gati.exploration.library import Library
from gati.model.data import load_data
from gati.model.labels import ClassNames, LabelMap
from gati.model.sequence import Data

_BATCH = 64
_SURPRISING = 0.05  # two counts that differ by more than chance explains


@dataclass(frozen=True)
class Recertification:
    """The verdict of new data on a composition, and a comparison with its earlier certificate."""

    certificate: Certificate
    accuracy_drop: AccuracyDrop | None
    hit_rate: float
    data: str
    previous: Certificate | None
    comparison: str
    attempt: Attempt
    note: str = ""

    @property
    def agreement_lower_bound(self) -> float:
        """The agreement that the counts prove, 0 without inputs."""
        return self.certificate.proven_agreement or 0.0

    def issued(self, created: str = "") -> Certificate:
        """Return the certificate as a composition keeps it, with what it rests on and what came before."""
        return replace(
            self.certificate,
            accuracy_drop=self.accuracy_drop,
            attempt=AttemptCount(self.attempt.number, self.attempt.compositions),
            recount=Recount(
                data=self.data,
                hit_rate=self.hit_rate,
                comparison=self.comparison,
                note=self.note,
                created=created,
            ),
            previous=self.previous,
        )

    def sentence(self) -> str:
        """Return the certificate as one plain sentence, and another where this was not the first attempt."""
        return self.issued().sentence()

    def to_json(self) -> dict[str, Any]:
        """Return it as strict JSON values: a certificate as `compose` writes it, with what came before."""
        return self.issued().to_json()


def certify(
    directory: str | Path,
    data: Any,
    *,
    composition: str = "default",
    accuracy: float | None = None,
    confidence: float | None = None,
    per_class: bool | None = None,
    write: bool = False,
    device: str | None = None,
    class_names: ClassNames | None = None,
    label_map: LabelMap | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Recertification:
    """Count on `data` how often a composition answers as the base model, and certify it from that alone.

    `accuracy`, `confidence` and `per_class` are the composition's own unless given. One setting is tested, so
    its lower bound is as exact as its verdict, if the inputs were drawn independently from what will be
    served. Those that `explore` has seen are left out, and copies count as `gati.composition.copies` says.
    `write` puts the new certificate into the composition, the old one below it as `previous`; exits and
    thresholds stay as they are and go on serving, whatever the verdict: `Composition.certified` and its note
    say which it is. `class_names` and `label_map` are as for `explore`, whose own are taken otherwise.

    Every attempt is entered in the library's ledger, written or not, and the k-th is tested at a share of
    delta, 3/4 for the first and 1 / (4 k (k - 1)) for later ones. The same composition on the same data, at
    any accuracy, is one attempt: no new evidence, and the verdict of before.

    Raises:
        DataError: no inputs, or none that `explore` has not seen.
        LibraryError, CompositionError, BackendError: as `load` does; CompositionError without any exit, and
            for `write` where that would drop a promise that every class has.
    """
    served = open_served(directory, composition=composition, device=device)
    chosen = served.composition
    if not chosen.exits:
        raise CompositionError(
            f"composition '{composition}' has no caches, so there is nothing to certify; compose again"
        )
    every_class = chosen.per_class if per_class is None else per_class
    if write and chosen.per_class and not every_class:
        raise CompositionError(
            f"composition '{composition}' promises its agreement in every class, which a certificate of all "
            "together would drop; certify every class, or compose again without --per-class"
        )
    given = load_data(data, served.model.preprocessing, what="certification data")
    fresh = fresh_inputs(served.library, given)
    named = name_and_label(served.library, fresh.inputs, class_names, label_map)
    inputs = named.data
    target = chosen.accuracy_target if accuracy is None else accuracy
    delta = 1.0 - (confidence if confidence is not None else chosen.confidence or DEFAULT_CONFIDENCE)
    check_levels(target, delta)
    ledger = Ledger(served.library.directory)
    asked = {"delta": delta, "per_class": every_class}
    attempt = ledger.attempt(_identity(served.library, chosen), fresh.identity, asked)
    answer, base_class, hits = _answers(served, inputs, progress)
    rows = counted(answer != base_class, fresh.copies)
    certificate = verdict(
        served.library, answer[rows], base_class[rows], target, delta, per_class=every_class,
        share=attempt.share, class_names=named.class_names,
    )  # fmt: skip
    labels = inputs.labels
    drop = (
        None
        if labels is None
        else accuracy_drop(answer, base_class, labels, delta, share=attempt.share, copies=fresh.copies)
    )
    found = Recertification(
        certificate=certificate,
        accuracy_drop=drop,
        hit_rate=hits / len(inputs),
        data=f"{given.name} {given.fingerprint}",
        previous=None if chosen.certificate is None else replace(chosen.certificate, previous=None),
        comparison=_comparison(chosen, certificate),
        attempt=attempt,
        note="; ".join(note for note in (fresh.note, named.note) if note),
    )
    ledger.conclude(attempt, {**found.to_json(), "previous": None, "composition": chosen.name}, written=write)
    if write:
        _write(served.library, chosen, found, every_class=every_class)
    return found


def _identity(library: Library, chosen: Composition) -> str:
    """Name what a composition answers by what decides it; its own name does not."""
    content = hashlib.sha256(f"{chosen.checkpoint_sha256} {chosen.backend}".encode())
    for leaving in chosen.exits:
        content.update(f"{leaving.trial_id} {leaving.threshold!r}".encode())
        content.update(library.cache_path(leaving.trial_id).read_bytes())
    return content.hexdigest()[:16]


def _answers(
    served: Served, inputs: Data, progress: Callable[[int, int], None] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Gati's class and the user's own module's [n] each, and how many left early."""
    answers: list[int] = []
    base: list[int] = []
    hits = 0
    with served.engine as engine:
        for start in range(0, len(inputs), _BATCH):
            rows = inputs.images(range(start, min(start + _BATCH, len(inputs))))
            rows = rows.to(engine.traced.device)
            predictions = engine(rows)
            answers += [prediction.class_index for prediction in predictions]
            hits += sum(prediction.exit != "base" for prediction in predictions)
            with torch.inference_mode():
                base += served.module(rows.clone()).argmax(1).tolist()
            if progress is not None:
                progress(len(answers), len(inputs))
    return np.array(answers), np.array(base), hits


def verdict(
    library: Library,
    answer: NDArray[np.int64],
    base_class: NDArray[np.int64],
    accuracy: float,
    delta: float,
    *,
    per_class: bool,
    share: float,
    class_names: Sequence[str] | None = None,
) -> Certificate:
    """Certify one composition from its classes and the base model's [n], at a share of delta."""
    if per_class:
        counts = count_by_class(answer, base_class, library.manifest.classes)
        return certify_every_class([counts], accuracy, delta, class_names or (), share=share)
    return walk([LossCounts(int((answer != base_class).sum()), len(answer))], accuracy, delta, share=share)


def _comparison(chosen: Composition, certificate: Certificate) -> str:
    from scipy.stats import fisher_exact  # slow to import, and only here needed

    before = chosen.certificate
    if before is None or not before.inputs:
        return "The composition had no certificate to compare with."
    old, new = (before.losses, before.inputs), (certificate.losses, certificate.inputs)
    table = [[losses, inputs - losses] for losses, inputs in (old, new)]
    chance = float(fisher_exact(table).pvalue)
    counts = (
        f"{old[0] / old[1]:.2%} disagreement when composed ({old[0]} of {old[1]}), "
        f"{new[0] / new[1]:.2%} now ({new[0]} of {new[1]})"
    )
    if chance > _SURPRISING:
        return f"{counts}: no more apart than chance explains (p = {chance:.2g})."
    worse = new[0] / new[1] > old[0] / old[1]
    return (
        f"{counts}: {'more' if worse else 'less'} than chance explains (p = {chance:.2g}); "
        f"{'these inputs are harder, compose on inputs like them' if worse else 'these inputs are easier'}."
    )


def _write(library: Library, chosen: Composition, found: Recertification, *, every_class: bool) -> None:
    renewed = replace(
        chosen,
        accuracy_target=found.certificate.accuracy,
        confidence=1.0 - found.certificate.delta,
        certificate=found.issued(created=datetime.now(UTC).isoformat(timespec="seconds")),
        per_class=every_class,
        note="",
    )
    replace(renewed, note=renewed.warning).save(library.composition_path(chosen.name))
