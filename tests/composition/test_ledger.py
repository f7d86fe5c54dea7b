"""The ledger: how often inputs were used to certify on."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from gati import documents
from gati.composition.certificate import EngineWalk, WalkedOn, ordinal
from gati.composition.compose import compose
from gati.composition.composition import Composition
from gati.composition.ledger import (
    Ledger,
    composition_identity,
    enter_use,
    share_of_attempt,
    split_identity,
)
from gati.composition.pareto import compose_within_latency, pareto
from gati.composition.plans import Settings
from gati.composition.walk import certify as walk
from gati.documents import values_of
from gati.errors import LibraryError, StorageError
from gati.exploration.library import CERTIFY, SELECT, Library
from tests.composition.libraries import make_library
from tests.engine.served import make_served

pytestmark = pytest.mark.usefixtures("unbounded")


def hashes(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.uint64)


def noon() -> datetime:
    return datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path, clock=noon)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return make_library(tmp_path_factory.mktemp("ledger") / "library", quality=6.0)


def test_every_new_look_is_another_use_and_the_same_again_is_not(ledger: Ledger) -> None:
    assert ledger.use("split", "compose", {"accuracy": 0.99}, {"losses": 1}) == 1
    assert ledger.use("split", "compose", {"accuracy": 0.97}, {"losses": 1}) == 2
    assert ledger.use("split", "compose", {"accuracy": 0.99}, {"losses": 1}) == 1
    assert ledger.use("split", "compose", {"accuracy": 0.99}, {"losses": 2}) == 3
    assert ledger.use("another", "compose", {"accuracy": 0.99}, {"losses": 1}) == 1
    assert [entry.at for entry in ledger.uses] == ["2026-01-01T12:00:00+00:00"] * 4
    assert {entry.verb for entry in ledger.uses} == {"compose"}


def test_a_use_entered_without_the_counts_of_a_refused_engine_is_the_same_use(tmp_path: Path) -> None:
    """Earlier versions entered null for them."""
    library = make_library(tmp_path / "library", inputs=100)
    passed = walk([(1, 1000)], 0.99, 0.05)
    engines = (
        EngineWalk(
            backend="openvino-int8", share_of_delta=0.9, hoped_ms=0.5, certified=False, reason="too coarse",
            path_sha256="b", tested=walk([(101, 1000)], 0.99, 0.05).tested,
        ),
        EngineWalk(
            backend="openvino", share_of_delta=0.1, hoped_ms=1.0, certified=True, path_sha256="a",
            tested=passed.tested,
        ),
    )  # fmt: skip
    on = WalkedOn(backend="openvino", split_seed=0, path_sha256="a")
    certificate = replace(passed, engines=engines, walked_on=on)
    walked = [["openvino-int8", 0.9, None], ["openvino", 0.1, "a"]]
    look = {"accuracy": 0.99, "delta": 0.05, "per_class": False, "walked": walked}
    counted = [None, values_of(passed.tested)]
    verdict = {"backend": "openvino", "certified": True, "deployed": 0, "counted": counted}
    before = Ledger(library.directory).use(split_identity(library), "compose", look, verdict)
    assert enter_use(library, "compose", certificate).use == before
    other = replace(certificate, accuracy=0.98)
    assert [enter_use(library, "compose", other).use for _ in range(2)] == [before + 1] * 2
    lost_more = replace(engines[0], tested=walk([(150, 1000)], 0.99, 0.05).tested)
    differing = replace(other, engines=(lost_more, engines[1]))
    assert enter_use(library, "compose", differing).use == before + 2, "what was counted has been told"


def test_counts_of_an_engine_that_was_refused_are_a_use_by_themselves(tmp_path: Path) -> None:
    """Nothing was counted for the engine that serves, which has no exits."""
    library = make_library(tmp_path / "library", inputs=100)
    on = WalkedOn(backend="openvino", split_seed=0, path_sha256="a")
    nothing = replace(walk([], 0.99, 0.05), walked_on=on)
    assert enter_use(library, "compose", nothing).use is None
    refused = EngineWalk(
        backend="openvino-int8", share_of_delta=0.9, hoped_ms=0.5, certified=False, reason="too coarse",
        path_sha256="b", tested=walk([(101, 1000)], 0.99, 0.05).tested,
    )  # fmt: skip
    assert enter_use(library, "compose", replace(nothing, engines=(refused,))).use == 1


def test_attempts_are_numbered_over_the_library_and_shared_by_accuracies(ledger: Ledger) -> None:
    first = ledger.attempt("a", "data", {"delta": 0.05}, hashes(1, 2))
    assert (first.number, first.compositions) == (1, 1)
    assert ledger.attempt("a", "data", {"delta": 0.05}, hashes(1, 2)) == first
    assert ledger.attempt("a", "data", {"delta": 0.1}, hashes(1, 2)).number == 2
    assert ledger.attempt("a", "more", {"delta": 0.05}, hashes(3)).number == 3
    other = ledger.attempt("b", "data", {"delta": 0.05}, hashes(1, 2))
    assert (other.number, other.compositions, other.share) == (4, 2, share_of_attempt(4))


def test_what_came_of_an_attempt_is_never_lost(ledger: Ledger) -> None:
    for number in range(3):
        attempt = ledger.attempt("a", f"data {number}", {}, hashes(number))
        ledger.conclude(attempt, {"losses": number}, written=number == 1)
        ledger.conclude(attempt, {"losses": number}, written=number == 1)
    results = [entry.results for entry in ledger.attempts]
    assert [[each.certificate["losses"] for each in found] for found in results] == [[0], [1], [2]]
    assert [found[0].written for found in results] == [False, True, False]


def test_a_later_result_of_the_same_attempt_leaves_the_earlier_one(ledger: Ledger) -> None:
    attempt = ledger.attempt("a", "data", {}, hashes(1))
    ledger.conclude(attempt, {"accuracy": 0.99}, written=False)
    ledger.conclude(attempt, {"accuracy": 0.97}, written=True)
    (entry,) = ledger.attempts
    assert [(each.certificate["accuracy"], each.written) for each in entry.results] == [
        (0.99, False),
        (0.97, True),
    ]


def test_compositions_that_were_measured_on_the_data_before_count_as_its_users(tmp_path: Path) -> None:
    times = iter(datetime(2026, 1, 1, 12, minute, tzinfo=UTC) for minute in range(60))
    ledger = Ledger(tmp_path, clock=lambda: next(times))
    ledger.look("a", "test", hashes(1, 2, 3))
    ledger.look("a", "test", hashes(1, 2, 3))
    assert ledger.attempt("a", "data", {}, hashes(3, 4)).compositions == 1, "it was the only one"
    ledger.look("b", "test", hashes(1, 2, 3))
    assert ledger.attempt("a", "data", {}, hashes(3, 4)).compositions == 1, "as it was decided on"
    assert ledger.attempt("a", "data", {"other": 1}, hashes(3, 4)).compositions == 2
    assert ledger.attempt("a", "elsewhere", {}, hashes(7, 8)).compositions == 1
    assert ledger.attempt("c", "data", {}, hashes(3, 4)).compositions == 3
    assert ledger.attempt("a", "data", {}, hashes(3, 4)).compositions == 1, "whoever came later"
    assert [each.composition for each in ledger.looks] == ["a", "b"]


def test_a_clock_that_is_set_back_hides_no_look(tmp_path: Path) -> None:
    """Whoever certifies the best of two on the data that they were measured on is told so."""
    times = iter(datetime(year, 1, 1, tzinfo=UTC) for year in (2030, 2026, 2025))
    ledger = Ledger(tmp_path, clock=lambda: next(times))
    ledger.look("b", "test", hashes(1, 2, 3))
    assert ledger.attempt("a", "data", {}, hashes(3, 4)).compositions == 2
    ledger.look("c", "test", hashes(1, 2, 3))
    assert ledger.attempt("a", "data", {}, hashes(3, 4)).compositions == 2, "as it was decided on"


def test_a_look_in_the_same_second_after_an_attempt_is_no_earlier_one(ledger: Ledger) -> None:
    assert ledger.attempt("a", "test", {}, hashes(1, 2, 3)).compositions == 1
    ledger.look("b", "test", hashes(1, 2, 3))
    assert ledger.attempt("a", "test", {}, hashes(1, 2, 3)).compositions == 1


def test_looks_take_no_share_and_make_no_input_old(ledger: Ledger) -> None:
    ledger.look("b", "test", hashes(1, 2, 3))
    attempt = ledger.attempt("a", "test", {}, hashes(1, 2, 3))
    assert (attempt.number, attempt.rows, attempt.note) == (1, None, "")
    assert attempt.compositions == 2


def test_a_ledger_of_an_older_gati_has_no_looks(ledger: Ledger) -> None:
    ledger.path.write_text('{"format": 1, "uses": [], "attempts": []}')
    assert ledger.looks == ()


def test_whatever_determines_answers_makes_another_composition(tmp_path: Path) -> None:
    """Of one with the same identity, the same data counts as the same attempt, at no share of delta."""
    directory = make_served(tmp_path)
    library = Library(directory)
    own = Composition.load(library.composition_path())
    first, second = own.exits
    others = [
        replace(own, checkpoint_sha256="ab" * 32),
        replace(own, backend="openvino-int8"),
        replace(own, graph_sha256="cd" * 32),
        replace(own, exits=(first,)),
        replace(own, exits=(first, replace(second, threshold=float(np.nextafter(second.threshold, 1.0))))),
    ]
    found = [composition_identity(library, each) for each in (own, *others)]
    library.cache_path(first.trial_id).write_bytes(library.cache_path(second.trial_id).read_bytes())
    found.append(composition_identity(library, own))
    assert len(set(found)) == 7
    assert composition_identity(library, replace(own, name="another", note="told")) == found[-1]


def test_another_split_of_the_same_inputs_is_another_one(tmp_path: Path) -> None:
    library = make_library(tmp_path)
    base, before = library.base_outcomes(), split_identity(library)
    swapped = np.where(base.split == CERTIFY, SELECT, CERTIFY).astype(base.split.dtype)
    library.write_base_outcomes(base._replace(split=swapped))
    assert split_identity(library) != before
    library.write_base_outcomes(base._replace(base_class=base.base_class[::-1].copy()))
    assert split_identity(library) != before, "of another network, or of other inputs"


def test_shares_of_all_attempts_that_will_ever_be_add_up_to_one() -> None:
    total = sum(share_of_attempt(number) for number in range(1, 20_001))
    assert 0.9999 < total <= 1.0
    assert share_of_attempt(1) == 0.75


def test_uses_at_once_are_all_entered(ledger: Ledger) -> None:
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda i: ledger.use("split", "compose", {"i": i}, {}), range(40)))
    assert sorted(numbers) == list(range(1, 41))
    assert len(ledger.uses) == 40


def test_a_command_that_fails_while_it_writes_leaves_the_ledger_whole(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.use("split", "compose", {}, {})
    before = ledger.path.read_bytes()

    def killed(path: Path, text: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(documents, "atomic_write_text", killed)
        ledger.use("split", "compose", {"other": 1}, {})
    assert ledger.path.read_bytes() == before
    assert ledger.use("split", "compose", {"other": 1}, {}) == 2  # and its lock is free


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "certify_ledger.json is damaged"),
        ('{"format": 1, "uses": 3, "attempts": []}', "field 'uses' is 3, expected a list"),
        ('{"format": 1, "uses": []}', "has no field 'attempts'; restore a backup"),
        ('{"format": 1, "uses": [{"key": "a"}], "attempts": []}', r"uses\[0\]: has no field 'split'"),
        ('{"format": 99}', "has format 99, this Gati reads up to 1"),
    ],
)
def test_a_ledger_that_cannot_be_read_is_refused_not_forgotten(
    ledger: Ledger, content: str, message: str
) -> None:
    ledger.path.write_text(content)
    with pytest.raises(LibraryError, match=message):
        ledger.use("split", "compose", {}, {})
    assert ledger.path.read_text() == content


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write .*gone"):
        Ledger(tmp_path / "gone").use("split", "compose", {}, {})


def test_numbers_are_read_out() -> None:
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 21, 112, 122)] == (
        ["1st", "2nd", "3rd", "4th", "11th", "12th", "21st", "112th", "122nd"]
    )


@pytest.mark.slow
def test_compose_pareto_and_latency_enter_their_uses_and_certificates_say_so(library: Library) -> None:
    ledger = Ledger(library.directory)
    first = compose(library.directory, accuracy=0.95)
    again = compose(library.directory, accuracy=0.95, name="again")
    for each in (first, again):
        assert each.certificate is not None
        assert each.certificate.use == 1
        assert "certify split" not in each.certificate.sentence()
    second = compose(library.directory, accuracy=0.94)
    assert second.certificate is not None
    assert second.certificate.use == 2
    assert second.certificate.sentence().endswith(
        " This is the 2nd use of the library's certify split, and the confidence covers each use on its own: "
        "certify on fresh data with gati certify --data NEW."
    )
    assert pareto(library.directory)[0].use == 3
    fast = compose_within_latency(
        library.directory, 0.7 * library.manifest.profile.base_ms, Settings(name="fast")
    )
    assert fast.certificate is not None
    assert fast.certificate.use == 4
    assert [entry.verb for entry in ledger.uses] == ["compose", "compose", "pareto", "latency"]
    pareto(library.directory)
    assert len(ledger.uses) == 4
    stored = json.loads(library.composition_path("fast").read_text())
    assert stored["certificate"]["use"] == 4


@pytest.mark.slow
def test_without_a_confidence_nothing_is_looked_at_and_nothing_entered(tmp_path: Path) -> None:
    library = make_library(tmp_path / "library", quality=6.0)
    compose(library.directory, accuracy=0.95, confidence=None)
    assert not Ledger(library.directory).path.exists()


@pytest.mark.slow
def test_a_library_explored_anew_begins_anew(tmp_path: Path) -> None:
    library = make_library(tmp_path / "library", quality=6.0)
    compose(library.directory, accuracy=0.95)
    other = make_library(tmp_path / "library", quality=6.0, seed=1)
    other.write_manifest(replace(other.manifest, seed=1))
    composition = compose(other.directory, accuracy=0.95)
    assert composition.certificate is not None
    assert composition.certificate.use == 1
    assert len(Ledger(library.directory).uses) == 2
