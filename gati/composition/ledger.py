"""The ledger of a cache library: how often inputs were used to certify, and with what outcome.

A confidence of 95 % holds for one look at the data. Composing repeatedly on one certify split until the
result is good enough, or certifying on one data set after another until one passes, means many looks. So
`certify_ledger.json` records them:

* `uses` of the library's own certify split by `gati compose`, also with `--pareto` and `--latency`. Each use
  errs with probability at most its delta; the certificate says which use it is. After many uses, certify on
  fresh data.
* `attempts` on other data, by `gati certify`, whether written into the composition or not, and by `gati
  compose --certify-data`, which counts that data together with the library's own split (so it is also a use).
  A failed attempt counts, too, since it may influence what is tried next. Attempt k gets the share
  `share_of_attempt(k)` of delta, and all shares add up to 1.

Results of one attempt say which inputs to leave out of the next. So in an attempt by `gati certify` an input
that an attempt on other data has counted (`gati.composition.counted_inputs`) counts only if answers differ.
Whatever came before, the others are then independent draws for whoever chose composition and inputs without
looking at their answers: given the past, attempt k with its delta_k <= delta is false with probability at
most delta_k share(k) <= delta share(k). Summed over k, with probability at least 1 - delta none of the
certificates that attempts ever give for this library with confidence 1 - delta or more is false.

The very same data is counted again, whatever is counted with it that explore has seen: for another
composition, another confidence, or every class. Such an attempt has its own share, and is covered if it was
decided on before that data was looked at; the certificate says how many compositions have used these inputs.
Those that `gati evaluate` or `gati bench` had measured on them (`looks`) count, too: whoever certifies the
best of several on the data that they were measured on has chosen by that data. The same composition with
another accuracy is the same attempt with one lower limit of agreement. Limits from the same counts are
nested, so if any limit at delta_k <= delta errs, the loosest does.

`gati compose --certify-data` counts the library's split each time anyway. It takes inputs of earlier attempts
once more if all of them are there, so that data can grow but nothing is dropped for its answers; otherwise
they count only if answers differ, too. Each attempt errs with at most its share if results did not decide how
many were added.

Identical repetitions are not a new look and are not counted twice. Entries are never removed. A copy of a
library has its own copy of the ledger; the two do not share later entries. The file is replaced as a whole,
under a lock, before the result is shown or saved, so a killed command leaves it intact.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gati.composition.certificate import Certificate, EngineWalk, WalkedOn
from gati.composition.composition import Composition
from gati.composition.counted_inputs import CountedInputs, part_to_count, sharing_inputs
from gati.documents import DocumentKind, values_of
from gati.errors import LibraryError, StorageError
from gati.exploration.library import Library
from gati.model.identity import Identities

_LEDGER = DocumentKind(
    1,
    LibraryError,
    "restore a backup; without one, no one knows how often inputs were used to certify, "
    "so explore on other data instead of deleting it",
)
FIRST_ATTEMPT = 0.75

Values = dict[str, Any]  # JSON values that are compared, never interpreted


@dataclass(frozen=True, kw_only=True)
class EnteredUse:
    """A use of the split `split`: the verb, the time (ISO 8601), what determined the counts, the verdict."""

    key: str
    split: str
    verb: str
    at: str
    look: Values
    verdict: Values


@dataclass(frozen=True, kw_only=True)
class AttemptResult:
    """The result of an attempt, its time (ISO 8601), and whether it was written into the composition."""

    at: str
    written: bool
    certificate: Values


@dataclass(frozen=True, kw_only=True)
class EnteredAttempt:
    """An attempt to certify `composition` on `data`, both digests of their contents.

    `given` is the digest of the data as given; `data` differs if some inputs are no evidence after earlier
    attempts. `looks` is the number of looks entered before it, as clocks may be set back. An older Gati kept
    no record of the inputs, to which all were evidence: in its entries `given` is empty, and `looks` None.
    """

    key: str
    composition: str
    data: str
    at: str
    settings: Values
    results: tuple[AttemptResult, ...] = ()
    given: str = ""
    looks: int | None = None


@dataclass(frozen=True, kw_only=True)
class EnteredLook:
    """When the agreement of `composition` on `data`, both digests, was first shown without an attempt."""

    composition: str
    data: str
    at: str


@dataclass(frozen=True, kw_only=True)
class _Entries:
    """The entries of the file, oldest first."""

    uses: tuple[EnteredUse, ...]
    attempts: tuple[EnteredAttempt, ...]
    looks: tuple[EnteredLook, ...] = ()


@dataclass(frozen=True)
class Attempt:
    """The number of an attempt on other data in its library, from 1, and its share of delta.

    `compositions` is the number of compositions that these inputs were used for until then, with this one.
    `rows` are the new ones among the inputs, ascending, None for all; `note` says why not all, or what is not
    known.
    """

    key: str
    number: int
    compositions: int
    rows: NDArray[np.int64] | None = field(default=None, compare=False)
    note: str = ""

    @property
    def share(self) -> float:
        """Its share of delta, the probability of error."""
        return share_of_attempt(self.number)


def share_of_attempt(number: int) -> float:
    """Return the share of delta of attempt `number`: 3/4 for the first, then 1 / (4 k (k - 1)); the sum is 1.

    The first is nearly always the only one, and 3/4 of delta costs it almost nothing.
    """
    return FIRST_ATTEMPT if number == 1 else (1.0 - FIRST_ATTEMPT) / (number * (number - 1))


class Ledger:
    """The ledger in `directory`, a cache library."""

    def __init__(self, directory: Path, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self.path = directory / "certify_ledger.json"
        self._counted = CountedInputs(directory)
        self._clock = clock

    @property
    def uses(self) -> tuple[EnteredUse, ...]:
        """Uses of the library's certify split, oldest first. Raises LibraryError for a damaged file."""
        return self._read().uses

    @property
    def looks(self) -> tuple[EnteredLook, ...]:
        """What was shown without an attempt, oldest first. Raises LibraryError for a damaged file."""
        return self._read().looks

    @property
    def attempts(self) -> tuple[EnteredAttempt, ...]:
        """Attempts on other data, oldest first. Raises LibraryError for a damaged file."""
        return self._read().attempts

    def use(
        self,
        split: str,
        verb: str,
        look: Mapping[str, Any],
        verdict: Mapping[str, Any],
        older: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None,
    ) -> int:
        """Enter a use of the certify split `split`, and return its number, from 1.

        `look` is everything that determines the counts, such as settings and candidates; `verdict` is the
        result; `older` is both as an earlier version entered them. A repetition by any verb keeps its first
        number. Raises LibraryError, StorageError.
        """
        keys = [
            _digest({"split": split, "look": looked, "verdict": found})
            for looked, found in ((look, verdict), older or (look, verdict))
        ]
        with self._locked():
            entries = self._read()
            known = [entry.key for entry in entries.uses if entry.split == split]
            for key in keys:
                if key in known:
                    return known.index(key) + 1
            new = EnteredUse(
                key=keys[0], split=split, verb=verb, at=self._now(), look=dict(look), verdict=dict(verdict)
            )
            self._write(replace(entries, uses=(*entries.uses, new)))
            return len(known) + 1

    def attempt(
        self,
        composition: str,
        data: str,
        settings: Mapping[str, Any],
        inputs: Identities,
        *,
        grows: bool = False,
    ) -> Attempt:
        """Enter an attempt to certify `composition` on `data`, both content hashes, before counting.

        If the composition is not chosen yet, `composition` is a hash of everything that determines it.
        `inputs` are the distinct inputs of the data, of which only new ones are evidence. If the data
        `grows`, all are as long as it contains all inputs of earlier attempts.

        A repetition keeps its first number. Raises LibraryError, StorageError, and DataError without new
        inputs.
        """
        with self._locked():
            entries = self._read()
            if data in [each.data for each in entries.attempts]:
                self._counted.keep(data, inputs)  # whoever has lost the record repeats the attempt
            again = [data in (each.data, each.given) for each in entries.attempts]
            needed = again.index(True) + 1 if True in again else len(again)
            records = {each.data: self._inputs_of(each, data) for each in entries.attempts[:needed]}
            earlier = [(each.data, each.given) for each in entries.attempts]
            part = part_to_count(earlier, records, data, inputs, grows=grows)
            key = _digest({"composition": composition, "data": part.data, "settings": settings})
            own = inputs if part.rows is None else inputs[part.rows]
            self._counted.keep(part.data, own)  # before others that are lost are noticed
            records |= {each.data: self._inputs_of(each) for each in entries.looks}
            records |= {each.data: self._inputs_of(each, data) for each in entries.attempts[needed:]}
            records[part.data] = own
            if key not in [entry.key for entry in entries.attempts]:
                new = EnteredAttempt(
                    key=key, composition=composition, data=part.data, at=self._now(),
                    settings=dict(settings), given=data, looks=len(entries.looks),
                )  # fmt: skip
                entries = replace(entries, attempts=(*entries.attempts, new))
                self._write(entries)
            number = 1 + [entry.key for entry in entries.attempts].index(key)
            sharing = sharing_inputs(records, own)
            users = list(dict.fromkeys(each.composition for each in entries.attempts if each.data in sharing))
            entry = entries.attempts[number - 1]
            looks = [each for each in entries.looks if each.at <= entry.at]
            if entry.looks is not None:
                looks = list(entries.looks[: entry.looks])
            looked = {each.composition for each in looks if each.data in sharing}
            before = {*users[: users.index(composition)], *looked} - {composition}
            return Attempt(key, number, 1 + len(before), part.rows, part.note)

    def look(self, composition: str, data: str, inputs: Identities) -> None:
        """Enter that the agreement of `composition` on these inputs is shown; both names are content hashes.

        A repetition keeps its first time. Raises LibraryError, StorageError.
        """
        with self._locked():
            entries = self._read()
            self._counted.keep(data, inputs)
            if (composition, data) in [(each.composition, each.data) for each in entries.looks]:
                return
            new = EnteredLook(composition=composition, data=data, at=self._now())
            self._write(replace(entries, looks=(*entries.looks, new)))

    def conclude(self, attempt: Attempt, certificate: Mapping[str, Any], *, written: bool) -> None:
        """Record the outcome of an attempt; earlier ones are kept. Raises LibraryError, StorageError."""
        counted: Values = json.loads(json.dumps(dict(certificate)))  # as it will be read back
        with self._locked():
            entries = self._read()
            at = [entry.key for entry in entries.attempts].index(attempt.key)
            entry = entries.attempts[at]
            if (written, counted) in [(each.written, each.certificate) for each in entry.results]:
                return
            new = AttemptResult(at=self._now(), written=written, certificate=counted)
            renewed = replace(entry, results=(*entry.results, new))
            before, after = entries.attempts[:at], entries.attempts[at + 1 :]
            self._write(replace(entries, attempts=(*before, renewed, *after)))

    def _inputs_of(self, entry: EnteredAttempt | EnteredLook, given: str | None = None) -> Identities | None:
        """The inputs of an entry; None for an attempt of an older Gati, which kept no record.

        Also if the record is lost of an attempt on the data that is `given` again: it is made anew.
        """
        known = isinstance(entry, EnteredLook) or entry.given not in ("", given)
        return self._counted.of(entry.data, known=known)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # a lock on the folder needs no cleanup and is released when its process is killed
        try:
            folder = os.open(self.path.parent, os.O_RDONLY)
        except OSError as error:
            raise StorageError(
                f"cannot write {self.path}: {error.strerror}; does the library exist?"
            ) from error
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _read(self) -> _Entries:
        if not self.path.is_file():
            return _Entries(uses=(), attempts=())
        return _LEDGER.record(_Entries, _LEDGER.read(self.path), str(self.path))

    def _write(self, entries: _Entries) -> None:
        _LEDGER.write(self.path, values_of(entries))

    def _now(self) -> str:
        return self._clock().isoformat(timespec="seconds")


def enter_use(library: Library, verb: str, certificate: Certificate) -> Certificate:
    """Enter the counts of a certificate that `verb` made as a use; it then says which use it is.

    Without counts it is returned unchanged. Raises LibraryError, StorageError.
    """
    on = certificate.walked_on
    walks = [certificate.tested, *(each.tested or () for each in certificate.engines)]
    if on is None or not any(setting.inputs for walk in walks for setting in walk):
        return certificate
    before = replace(certificate, engines=tuple(map(_as_once_entered, certificate.engines)))
    look, verdict = _look(certificate, on), _verdict(certificate, on)
    older = _look(before, on), _verdict(before, on)
    number = Ledger(library.directory).use(split_identity(library), verb, look, verdict, older)
    return replace(certificate, use=number)


def _as_once_entered(engine: EngineWalk) -> EngineWalk:
    # earlier versions did not keep what they had counted of an engine that they refused
    return replace(engine, path_sha256=None, tested=None) if engine.reason else engine


def _look(certificate: Certificate, on: WalkedOn) -> Values:
    walked: list[list[str | float | None]] = [
        [each.backend, each.share_of_delta, each.path_sha256] for each in certificate.engines
    ] or [[on.backend, 1.0, on.path_sha256]]
    return {
        "accuracy": certificate.accuracy,
        "delta": certificate.delta,
        "per_class": bool(certificate.by_class),
        "walked": walked,
    }


def _verdict(certificate: Certificate, on: WalkedOn) -> Values:
    return {
        "backend": on.backend,
        "certified": certificate.certified,
        "deployed": certificate.deployed,
        "counted": values_of([each.tested for each in certificate.engines] or [certificate.tested]),
    }


def composition_identity(library: Library, composition: Composition) -> str:
    """Return a hash of what determines the answers of a composition, which excludes its name."""
    content = hashlib.sha256(f"{composition.checkpoint_sha256} {composition.backend}".encode())
    content.update((composition.graph_sha256 or "").encode())
    for leaving in composition.exits:
        content.update(f"{leaving.trial_id} {leaving.threshold!r}".encode())
        content.update(library.cache_path(leaving.trial_id).read_bytes())
    return content.hexdigest()[:16]


def split_identity(library: Library) -> str:
    """Return a hash of the certify split: the base model's answers to the held-out inputs, and the split."""
    base = library.base_outcomes()
    content = base.base_class.tobytes() + base.split.tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
