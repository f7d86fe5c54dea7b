"""Recertify an existing composition on inputs that were not used for any choice.

Retrying on other data would eventually pass by chance. Every attempt is therefore recorded, whether or not it
passed or was written, all attempts of a library share delta, and an input counts as new only once.
`gati.composition.ledger` describes how, and what the confidence of each attempt covers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gati.composition.accuracy import AccuracyDrop, accuracy_drop
from gati.composition.batches import in_fitting_batches
from gati.composition.binomial import check_confidence, check_levels
from gati.composition.certificate import AttemptCount, Certificate, LossCounts, NewInputs, Recount
from gati.composition.composition import Composition
from gati.composition.copies import counted
from gati.composition.engines import bound, keep_bound
from gati.composition.ledger import Attempt, Ledger, composition_identity
from gati.composition.load import Served, open_served
from gati.composition.plans import DEFAULT_CONFIDENCE
from gati.composition.walk import certify as walk
from gati.composition.walk import certify_every_class, count_by_class
from gati.engine.exits import Prediction
from gati.errors import CompositionError, GatiError
from gati.evaluation.fits import check_fit
from gati.exploration.fresh import fresh_inputs
from gati.exploration.labels import name_and_label
from gati.exploration.library import Library
from gati.model.data import load_data
from gati.model.identity import CopyCounts
from gati.model.labels import ClassNames, LabelMap
from gati.model.outputs import check_base_outputs
from gati.model.sequence import Data
from gati.types import BASE
from gati.units import percent

_SURPRISING = 0.05  # p-value below which two counts differ significantly


@dataclass(frozen=True)
class Recertification:
    """The verdict on a composition from new data, compared with its earlier certificate.

    `hit_rate` and `comparison` are about inputs that are new, each once.
    """

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
        """The lower bound on agreement that the counts prove; 0 without inputs."""
        return self.certificate.proven_agreement or 0.0

    def issued(self, created: str = "") -> Certificate:
        """Return the certificate as stored in a composition, with its data and the previous certificate."""
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
        """Return the certificate as one sentence, plus a second one if this was not the first attempt."""
        return self.issued().sentence()

    def to_json(self) -> dict[str, Any]:
        """Return strict JSON values: a certificate as `compose` writes it, with the previous one."""
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
    """Certify a composition by how often it agrees with the base model on `data`, and on nothing else.

    `accuracy`, `confidence` and `per_class` default to the composition's. Only one setting is tested, so the
    lower bound is exact if the inputs are independent draws from the data to be served. Inputs that `explore`
    has seen count only if their answers differ; for copies see `gati.composition.copies`. `write` stores the
    new certificate in the composition and keeps the old one as `previous`. Exits and thresholds stay the same
    whatever the verdict, which `Composition.certified` and its note record. `class_names` and `label_map` are
    as for `explore` and default to those stored there.

    Every attempt is recorded in the library's ledger, written or not. The k-th attempt is tested at a share
    of delta: 3/4 for the first, 1 / (4 k (k - 1)) for later ones. Repeating the same composition on the same
    data, at any accuracy, adds no evidence: it counts as the same attempt and gives the same verdict. Inputs
    that earlier attempts have counted as part of other data count only if their answers differ.

    Raises:
        DataError: there are no inputs, or `explore` or earlier attempts have seen all of them.
        LibraryError, CompositionError, BackendError: as for `load`; CompositionError if there are no exits,
            or with `write` if it would drop a per-class promise or the composition was replaced meanwhile.
        ModelError: the network returns NaN or infinity for some inputs.
    """
    if confidence is not None:
        check_confidence(confidence)
    served = open_served(directory, composition=composition, device=device)
    library, chosen = served.library, served.composition
    asked = _asked_of(chosen, accuracy, confidence, per_class)
    if write and chosen.per_class and not asked.per_class:
        raise CompositionError(
            f"composition '{composition}' promises its agreement in every class, which an overall "
            "certificate would drop; certify every class, or compose again without --per-class"
        )
    given = load_data(data, served.model.preprocessing, what="certification data", explored=True)
    fresh = fresh_inputs(library, given)
    check_fit(served.engine, fresh.inputs, "certification data")
    named = name_and_label(library, fresh.inputs, class_names, label_map)
    ledger, as_counted = Ledger(library.directory), _bound(library, chosen)
    settings: dict[str, Any] = {"delta": asked.delta, "per_class": asked.per_class}
    settings |= {"seen": fresh.seen} if fresh.seen else {}
    identity = composition_identity(library, as_counted)
    attempt = ledger.attempt(identity, fresh.identity, settings, fresh.identities)
    copies = fresh.copies.limited(attempt.rows)
    answers = _answers(served, named.data, progress)
    certificate = _certificate(library, asked, answers, copies, attempt.share, named.class_names)
    found = Recertification(
        certificate=certificate,
        accuracy_drop=_drop(answers, named.data.labels, asked.delta, copies, attempt.share),
        hit_rate=float(answers.hit[copies.same > 0].mean()),
        data=f"{given.name} {given.fingerprint}",
        previous=None if chosen.certificate is None else replace(chosen.certificate, previous=None),
        comparison=_comparison(chosen, certificate),
        attempt=attempt,
        note="; ".join(note for note in (fresh.note, attempt.note, named.note) if note),
    )
    _keep(library, ledger, chosen, as_counted, found, write=write)
    return found


class _Asked(NamedTuple):
    """What to certify: the agreement, the probability of error, and whether of every class."""

    accuracy: float
    delta: float
    per_class: bool


class _Answers(NamedTuple):
    """Gati's classes, those of the user's module, and whether each input left early, [n] each."""

    gati: NDArray[np.int64]
    base: NDArray[np.int64]
    hit: NDArray[np.bool_]


def _asked_of(
    chosen: Composition, accuracy: float | None, confidence: float | None, per_class: bool | None
) -> _Asked:
    """What is asked of a composition, by default what it promises. Raises CompositionError."""
    if not chosen.exits:
        raise CompositionError(
            f"composition '{chosen.name}' has no caches, so there is nothing to certify; compose again"
        )
    if confidence is None:
        confidence = chosen.confidence or DEFAULT_CONFIDENCE
    target = chosen.accuracy_target if accuracy is None else accuracy
    asked = _Asked(target, 1.0 - confidence, chosen.per_class if per_class is None else per_class)
    check_levels(asked.accuracy, asked.delta)
    return asked


def _keep(
    library: Library,
    ledger: Ledger,
    chosen: Composition,
    as_counted: Composition,
    found: Recertification,
    *,
    write: bool,
) -> None:
    """Record the result, and with `write` put it into the composition, unless that was replaced meanwhile."""
    result = {**found.to_json(), "previous": None, "composition": chosen.name}
    if write:
        library.check_unchanged()
        try:
            _check_same(library, chosen)
            keep_bound(library, chosen, as_counted)  # may take a while
            _check_same(library, chosen)
        except GatiError:
            ledger.conclude(found.attempt, result, written=False)
            raise
    ledger.conclude(found.attempt, result, written=write)
    if write:
        _write(library, as_counted, found)


def _check_same(library: Library, chosen: Composition) -> None:
    """Raise CompositionError if another command has replaced the composition since it was loaded."""
    if Composition.of(library, chosen.name) != chosen:
        raise CompositionError(
            f"another command has replaced composition '{chosen.name}' meanwhile: run this command again"
        )


def _bound(library: Library, chosen: Composition) -> Composition:
    """The composition with digests, which those of older versions lack: only what is counted is loaded."""
    exits = tuple(replace(each, cache_sha256=library.cache_sha256(each.trial_id)) for each in chosen.exits)
    return bound(library, replace(chosen, exits=exits))


def _answers(served: Served, inputs: Data, progress: Callable[[int, int], None] | None) -> _Answers:
    """Return Gati's classes, those of the user's module, and whether each input left early, [n] each."""
    answers: list[int] = []
    base: list[int] = []
    hit: list[bool] = []
    with served.engine as engine:

        def images(rows: NDArray[np.int64]) -> torch.Tensor:
            return inputs.images(rows).to(engine.traced.device)

        def answered(images: torch.Tensor) -> tuple[list[Prediction], list[int]]:
            predictions = engine(images)
            with torch.inference_mode():
                outputs = check_base_outputs(served.module(images.clone()))
            return predictions, outputs.argmax(1).tolist()

        for predictions, classes in in_fitting_batches(len(inputs), images, answered):
            answers += [prediction.class_index for prediction in predictions]
            hit += [prediction.exit != BASE for prediction in predictions]
            base += classes
            if progress is not None:
                progress(len(answers), len(inputs))
    return _Answers(np.array(answers), np.array(base), np.array(hit))


def _certificate(
    library: Library,
    asked: _Asked,
    answers: _Answers,
    copies: CopyCounts,
    share: float,
    class_names: Sequence[str] | None,
) -> Certificate:
    lost = answers.gati != answers.base
    rows = counted(lost, *copies)
    found = verdict(
        library, answers.gati[rows], answers.base[rows], asked.accuracy, asked.delta,
        per_class=asked.per_class, share=share, class_names=class_names,
    )  # fmt: skip
    return replace(found, new_inputs=NewInputs.of(lost, copies))


def _drop(
    answers: _Answers, labels: NDArray[np.int64] | None, delta: float, copies: CopyCounts, share: float
) -> AccuracyDrop | None:
    if labels is None:
        return None
    return accuracy_drop(answers.gati, answers.base, labels, delta, share=share, copies=copies)


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
    """Certify one composition from its classes [n] and the base model's [n], at a share of delta."""
    if per_class:
        counts = count_by_class(answer, base_class, library.manifest.classes)
        return certify_every_class([counts], accuracy, delta, class_names or (), share=share)
    return walk([LossCounts(int((answer != base_class).sum()), len(answer))], accuracy, delta, share=share)


def _sample(certificate: Certificate) -> LossCounts:
    """The counts over new inputs, each once: others are no share of what is served."""
    counts = certificate.new_inputs or certificate
    return LossCounts(counts.losses, counts.inputs)


def _comparison(chosen: Composition, certificate: Certificate) -> str:
    from scipy.stats import fisher_exact  # slow to import, needed only here

    if chosen.certificate is None:
        return "The composition had no certificate to compare with."
    old, new = (_sample(each) for each in (chosen.certificate, certificate))
    if not old.inputs:
        return "The earlier certificate counts no new inputs, so there is nothing to compare with."
    table = [[losses, inputs - losses] for losses, inputs in (old, new)]
    chance = float(fisher_exact(table).pvalue)
    counts = (
        f"{percent(old[0] / old[1], 2)} disagreement in the earlier certificate ({old[0]} of {old[1]}), "
        f"{percent(new[0] / new[1], 2)} now ({new[0]} of {new[1]})"
    )
    if chance > _SURPRISING:
        return f"{counts}: the difference is within chance (p = {chance:.2g})."
    worse = new[0] / new[1] > old[0] / old[1]
    return (
        f"{counts}: significantly {'more' if worse else 'less'} (p = {chance:.2g}); "
        f"{'these inputs are harder, compose on inputs like these' if worse else 'these inputs are easier'}."
    )


def _write(library: Library, chosen: Composition, found: Recertification) -> None:
    renewed = replace(
        chosen,
        accuracy_target=found.certificate.accuracy,
        confidence=1.0 - found.certificate.delta,
        certificate=found.issued(created=datetime.now(UTC).isoformat(timespec="seconds")),
        per_class=bool(found.certificate.by_class),
        note="",
    )
    replace(renewed, note=renewed.warning).save(library.composition_path(chosen.name))
