"""Further inputs to certify on, given to `gati compose` in addition to those of `explore`.

They are counted as part of the library's certify split: more inputs allow a larger share of losses. Inputs
that explore has seen count only if their answers differ, copies count as everywhere, and labels are not
needed. The base model and the caches on the path are run on them, in float32 as in `explore`; an engine of
reduced precision runs itself.

Every command that counts further inputs is an attempt in the library's ledger, like `gati certify`, and the
k-th attempt gets a share of delta: inputs may be added until one attempt passes, and all attempts together
still err with probability at most delta, unless results decide how many are added. Inputs may not be dropped:
`gati.composition.ledger` says what is left out then. An attempt is entered before anything is counted; its
key covers everything that determines the counts. Uses of the library's own split are counted separately.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gati.composition.certificate import AttemptCount, Certificate, FurtherCount
from gati.composition.composition import Composition
from gati.composition.ledger import Attempt, Ledger, split_identity
from gati.composition.outcomes import EngineOutcomes, SplitOutcomes, cost_of
from gati.composition.plans import Settings
from gati.composition.problem import Candidate, Problem
from gati.composition.replay import Replay, summarise
from gati.errors import CompositionError, DataError
from gati.exploration.library import Library, TrialOutcomes
from gati.model.identity import CopyCounts, Identities
from gati.types import TrialId

if TYPE_CHECKING:
    from gati.composition.engines import EngineAnswers
    from gati.model.sequence import Data

_FEW = 64


@dataclass(kw_only=True)
class Further:
    """Distinct inputs, and the answers of base model and caches to them.

    `copies` [n] says how often each counts. `data` names the file, `identity` is a hash of the content.
    `identities` are the hashes of those that explore has not seen; `seen` is a hash of the others. `note`
    says what hardly counts. Answers are computed on first use.
    """

    inputs: Data
    copies: CopyCounts
    data: str
    identity: str
    identities: Identities
    seen: str = ""
    note: str = ""
    base_class: NDArray[np.int64] | None = None
    outcomes: dict[TrialId, TrialOutcomes] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.copies.differs)

    def answer(self, library: Library, trials: Iterable[TrialId]) -> NDArray[np.int64]:
        """Run the base model and the caches of `trials`; return the base model's classes [n].

        Raises as `load_network` and `load_cache`.
        """
        missing = sorted(set(trials) - self.outcomes.keys())
        if self.base_class is None or missing:
            self.base_class, found = _answers(library, self.inputs, missing)
            self.outcomes.update(found)
        return self.base_class

    def after(self, own: SplitOutcomes, path: Sequence[Sequence[Candidate]]) -> ExtendedOutcomes:
        """Return the outcomes of the certify split followed by these inputs, for the settings of `path`."""
        if isinstance(own, EngineOutcomes):
            return ExtendedOutcomes(own, self, self.answer(own.library, ()))
        trials = {candidate.trial_id for setting in path for candidate in setting}
        return ExtendedOutcomes(own, self, self.answer(own.library, trials))

    def enter(self, library: Library, asked: Settings, engines: Sequence[Library]) -> Attempt:
        """Enter the attempt to compose as `asked` with these inputs, before anything is counted.

        `engines` is the library with the latencies of each engine that may be tried. Inputs that are not new
        count only if their answers differ. Raises LibraryError, StorageError, and DataError if none is new.
        """
        look = {
            # the name does not affect what is counted, and threads only through the latencies of `engines`
            "asked": {
                name: value for name, value in asdict(asked).items() if name not in ("name", "threads")
            },
            "split": split_identity(library),
            "points": _digest(repr(library.operating_points)),
            "engines": [_digest(repr((each.manifest.profile, each.trials))) for each in engines],
        }
        name = _digest(json.dumps(look, sort_keys=True))
        settings = {"verb": "compose", "delta": 1.0 - (asked.confidence or 0.0), "per_class": asked.per_class}
        settings |= {"seen": self.seen} if self.seen else {}
        ledger = Ledger(library.directory)
        attempt = ledger.attempt(name, self.identity, settings, self.identities, grows=True)
        self.copies = self.copies.limited(attempt.rows)
        self.note = _joined(self.note, attempt.note)
        return attempt

    def told(self, composition: Composition, attempt: Attempt) -> Composition:
        """Return the composition with a certificate that records these inputs and the attempt."""
        if composition.certificate is not None:
            certificate = replace(
                composition.certificate,
                attempt=AttemptCount(attempt.number, attempt.compositions),
                further=FurtherCount(self.data, self.copies.evidence, self.note),
            )
            composition = composition.certified_by(certificate)
        return replace(composition, note=_joined(composition.note, self.note))


class ExtendedOutcomes(SplitOutcomes):
    """The outcomes of a certify split, followed by those of further inputs."""

    def __init__(self, own: SplitOutcomes, further: Further, base_class: NDArray[np.int64]) -> None:
        self.library = own.library
        self.inputs = own.inputs
        self.base_class = np.concatenate([own.base_class, base_class])
        unknown = np.full(len(further), -1, dtype=np.int64)
        self.label = None if own.label is None else np.concatenate([own.label, unknown])
        self.copies = own.copies.followed_by(further.copies)
        self._own = own
        self._further = further
        self._engines: tuple[EngineAnswers, EngineAnswers] | None = None
        if isinstance(own, EngineOutcomes):
            self._engines = own.answers, own.answers.elsewhere(further.inputs)

    @property
    def coarse(self) -> bool:
        """As `SplitOutcomes.coarse`."""
        return self._own.coarse

    @property
    def _lost_alone(self) -> NDArray[np.bool_]:
        if self._engines is None:
            return super()._lost_alone
        lost: NDArray[np.bool_] = self._asked(())[1] != self.base_class
        return lost

    def __len__(self) -> int:
        return len(self.base_class)

    def trial(self, trial_id: TrialId) -> TrialOutcomes:
        """As `SplitOutcomes.trial`."""
        if trial_id not in self._further.outcomes:
            self._further.answer(self.library, [trial_id])
        return _after(self._own.trial(trial_id), self._further.outcomes[trial_id])

    def expect(self, path: Sequence[Sequence[Candidate]]) -> None:
        """As `SplitOutcomes.expect`."""
        for engine in self._engines or ():
            engine.ask(path)

    def replay(self, problem: Problem, chosen: Sequence[Candidate]) -> Replay:
        """As `SplitOutcomes.replay`; an engine of reduced precision runs."""
        if self._engines is None:
            return super().replay(problem, chosen)
        left_at, answer = self._asked(chosen)
        costs = [cost_of(problem, candidate) for candidate in chosen]
        return summarise(costs, left_at, answer, self.base_class, problem.base_ms)

    def _asked(self, chosen: Sequence[Candidate]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        assert self._engines is not None
        held_out, further = (engine(chosen) for engine in self._engines)
        return (
            np.concatenate([held_out[0][self.inputs], further[0]]),
            np.concatenate([held_out[1][self.inputs], further[1]]),
        )


def further_inputs(library: Library, data: Any) -> Further:
    """Open further inputs and find what explore has seen.

    The base model answers the first ones, so that what it cannot answer costs no attempt. Raises as
    `load_network`; DataError if there are no inputs, no new ones, or inputs that the network does not take;
    ModelError if it returns NaN; and CompositionError for a library without outcomes.
    """
    from gati.exploration.fresh import fresh_inputs
    from gati.model.data import load_data

    if not library.has_outcomes:
        raise CompositionError(
            "further inputs to certify on need the library's own outcomes, which are missing (outcomes/); "
            "explore again"
        )
    given = load_data(data, library.preprocessing, what="further certification data", explored=True)
    fresh = fresh_inputs(library, given)
    shape, wanted = tuple(fresh.inputs.images([0]).shape[1:]), library.manifest.input_shape
    if shape != wanted:
        raise DataError(
            f"further certification data: {given.name} does not fit: the network takes inputs of shape "
            f"{list(wanted)}, got {list(shape)}; give inputs like those of gati explore"
        )
    _answers(library, fresh.inputs.subset(range(min(_FEW, len(fresh.inputs)))), ())
    return Further(
        inputs=fresh.inputs,
        copies=fresh.copies,
        data=f"{given.name} {given.fingerprint}",
        identity=fresh.identity,
        identities=fresh.identities,
        seen=fresh.seen,
        note=fresh.note,
    )


def conclude(
    library: Library, attempt: Attempt, certificate: Certificate | None, name: str, *, written: bool
) -> None:
    """Record the result of an attempt to compose `name`. Raises LibraryError, StorageError."""
    counted = {} if certificate is None else certificate.to_json()
    Ledger(library.directory).conclude(attempt, {**counted, "composition": name}, written=written)


def _answers(
    library: Library, inputs: Data, trials: Sequence[TrialId]
) -> tuple[NDArray[np.int64], dict[TrialId, TrialOutcomes]]:
    """Return the base model's class of each input [n], and the outcomes of each trial, from one pass."""
    import torch

    from gati.caches import load_cache
    from gati.composition.batches import in_fitting_batches
    from gati.exploration.network import load_network
    from gati.model.hooks import collect_hidden
    from gati.model.outputs import check_base_outputs

    device = torch.device(library.manifest.profile.device)
    module = load_network(library, device).module
    caches = {trial_id: load_cache(library.cache_path(trial_id)).to(device) for trial_id in trials}
    blocks = {trial.trial_id: trial.block for trial in library.trials}

    def answered(images: torch.Tensor) -> tuple[NDArray[np.int64], list[TrialOutcomes]]:
        outputs = check_base_outputs(module(images))
        found = []
        for trial_id, cache in caches.items():
            probabilities, score = cache(hidden[blocks[trial_id]])
            predicted = probabilities.argmax(1).cpu().numpy()
            found.append(TrialOutcomes(score.float().cpu().numpy(), predicted))
        return outputs.argmax(1).cpu().numpy(), found

    def images(rows: NDArray[np.int64]) -> torch.Tensor:
        return inputs.images(rows).to(device)

    with torch.inference_mode(), collect_hidden(module, sorted({blocks[each] for each in trials})) as hidden:
        base, found = zip(*in_fitting_batches(len(inputs), images, answered), strict=True)
    outcomes = (_after(*batches) for batches in zip(*found, strict=True))
    return np.concatenate(base), dict(zip(caches, outcomes, strict=True))


def _after(*parts: TrialOutcomes) -> TrialOutcomes:
    return TrialOutcomes(
        np.concatenate([part.score for part in parts]), np.concatenate([part.predicted for part in parts])
    )


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
