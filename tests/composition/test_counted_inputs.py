"""Inputs certify as new ones once: what an attempt counts after others, and that all keep the promise."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from gati.composition.certificate import LossCounts
from gati.composition.ledger import Ledger, share_of_attempt
from gati.composition.walk import certify as walk
from gati.errors import DataError, LibraryError

MEMORY = Path("/dev/shm")
INPUTS = np.arange(1000, 2000, dtype=np.uint64)
ACCURACY, DELTA = 0.99, 0.05


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path)


def name_of(inputs: Sequence[int] | np.ndarray) -> str:
    return "-".join(str(each) for each in sorted(np.asarray(inputs).tolist()))[:200]


def entered(ledger: Ledger, rows: slice, data: str, composition: str = "a", *, grows: bool = False):
    return ledger.attempt(composition, data, {"delta": DELTA}, INPUTS[rows], grows=grows)


def test_inputs_of_earlier_attempts_are_not_new_in_other_data(ledger: Ledger) -> None:
    assert entered(ledger, slice(0, 100), "first").rows is None
    found = entered(ledger, slice(60, 160), "second")
    assert found.number == 2 and found.compositions == 1
    assert found.rows is not None and found.rows.tolist() == list(range(40, 100))
    assert found.note == (
        "earlier attempts have counted 40 of 100 inputs as part of other data: they count only if their "
        "answers differ; leave them out if they are the same recordings"
    )
    disjoint = entered(ledger, slice(200, 300), "third")
    assert disjoint.rows is None and disjoint.note == ""
    grown = entered(ledger, slice(0, 350), "all of them and more")
    assert grown.rows is not None and grown.rows.tolist() == [*range(160, 200), *range(300, 350)]


def test_the_same_data_again_is_the_same_attempt_and_counts_the_same_inputs(ledger: Ledger) -> None:
    entered(ledger, slice(0, 100), "first")
    second = entered(ledger, slice(60, 160), "second")
    entered(ledger, slice(0, 400), "third")
    again = entered(ledger, slice(60, 160), "second")
    assert again == second and np.array_equal(again.rows, second.rows)
    other = entered(ledger, slice(60, 160), "second", "b")
    assert (other.number, other.compositions) == (4, 2) and np.array_equal(other.rows, second.rows)
    first = entered(ledger, slice(0, 100), "first", "b")
    assert first.rows is None and first.compositions == 2


def test_without_new_inputs_nothing_is_entered(ledger: Ledger) -> None:
    entered(ledger, slice(0, 100), "first")
    with pytest.raises(DataError, match="counted all of these inputs as part of other data"):
        entered(ledger, slice(10, 90), "a part of it")
    assert len(ledger.attempts) == 1
    assert entered(ledger, slice(100, 200), "new").number == 2


def test_data_that_grows_is_counted_whole_until_something_is_dropped(ledger: Ledger) -> None:
    entered(ledger, slice(0, 100), "first", grows=True)
    grown = entered(ledger, slice(0, 150), "grown", grows=True)
    assert grown.rows is None
    assert grown.note == (
        "earlier attempts have counted 100 of 150 inputs, too: the confidence holds unless their results "
        "decided how many were added"
    )
    dropped = entered(ledger, slice(1, 200), "without one", "b", grows=True)
    assert dropped.rows is not None and dropped.rows.tolist() == list(range(149, 199))
    assert entered(ledger, slice(0, 150), "grown", grows=True) == grown
    # whoever counted some of these inputs is among those that have used them
    assert entered(ledger, slice(0, 100), "first", "c", grows=True).compositions == 2


def test_data_of_which_a_part_was_counted_stays_that_part_where_it_may_grow(ledger: Ledger) -> None:
    """Counted whole, it would be data from which the inputs of later attempts were left out."""
    entered(ledger, slice(0, 100), "first")
    part = entered(ledger, slice(0, 150), "second")
    entered(ledger, slice(150, 250), "third")
    again = entered(ledger, slice(0, 150), "second", "b", grows=True)
    assert part.rows is not None and again.rows is not None
    assert again.rows.tolist() == part.rows.tolist() == list(range(100, 150))


def test_a_ledger_of_an_older_gati_is_read_and_its_inputs_may_not_be_new(ledger: Ledger) -> None:
    old = {
        "key": "k", "composition": "a", "data": "old", "at": "2026-01-01", "settings": {"delta": DELTA},
        "results": [],
    }  # fmt: skip
    ledger.path.write_text(json.dumps({"format": 1, "uses": [], "attempts": [old]}))
    found = entered(ledger, slice(0, 100), "new")
    assert found.number == 2 and found.rows is None
    assert found.note == (
        "an older Gati kept no record of the inputs of earlier attempts: these may not be new"
    )
    # its own data is known from now on, once it is counted again
    assert entered(ledger, slice(300, 400), "old", "b").rows is None
    later = entered(ledger, slice(350, 450), "later")
    assert later.rows is not None and len(later.rows) == 50 and "older Gati" not in later.note


def test_a_damaged_record_is_refused(ledger: Ledger, tmp_path: Path) -> None:
    entered(ledger, slice(0, 100), "first")
    path = tmp_path / "certify_inputs" / "first.npy"
    for content in (b"", b"not an array", path.read_bytes()[:90]):
        path.write_bytes(content)
        with pytest.raises(LibraryError, match=r"first.npy.*restore a backup"):
            entered(ledger, slice(0, 200), "second")
    np.save(path, np.arange(3.0))
    with pytest.raises(LibraryError, match="holds no identities of inputs; restore a backup"):
        entered(ledger, slice(0, 200), "second")


def test_a_record_that_is_gone_is_not_one_that_never_was(ledger: Ledger, tmp_path: Path) -> None:
    """Without it, whoever leaves out the inputs that an attempt has lost certifies on the others again."""
    entered(ledger, slice(0, 100), "first")
    ledger.look("b", "test", INPUTS[200:300])
    for name in ("first", "test"):
        path = tmp_path / "certify_inputs" / f"{name}.npy"
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(LibraryError, match=f"{name}.npy is missing, so inputs that were counted before"):
            entered(ledger, slice(10, 250), "second")
        path.write_bytes(content)
    assert len(ledger.attempts) == 1
    assert entered(ledger, slice(10, 250), "second").compositions == 2


def test_records_that_are_gone_come_back_with_the_data(ledger: Ledger, tmp_path: Path) -> None:
    entered(ledger, slice(0, 100), "first")
    ledger.look("b", "test", INPUTS[200:300])
    kept = sorted((tmp_path / "certify_inputs").iterdir())
    contents = [path.read_bytes() for path in kept]
    for path in kept:
        path.unlink()
    ledger.look("b", "test", INPUTS[200:300])
    assert entered(ledger, slice(0, 100), "first").number == 1
    assert [path.read_bytes() for path in kept] == contents


def test_a_record_of_a_part_of_the_data_comes_back_with_it(ledger: Ledger, tmp_path: Path) -> None:
    """Its error said to repeat the command, and that failed again."""
    entered(ledger, slice(0, 100), "first")
    part = entered(ledger, slice(60, 160), "second")
    (path,) = (each for each in (tmp_path / "certify_inputs").iterdir() if each.stem != "first")
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(LibraryError, match="repeat the command that counted them, with the same data"):
        entered(ledger, slice(500, 600), "third")
    again = entered(ledger, slice(60, 160), "second")
    assert again == part and np.array_equal(again.rows, part.rows)
    assert path.read_bytes() == content and len(ledger.attempts) == 2


def test_records_of_several_parts_come_back_one_after_the_other(ledger: Ledger, tmp_path: Path) -> None:
    given = {"first": slice(0, 100), "second": slice(60, 160), "third": slice(120, 300)}
    numbers = [entered(ledger, rows, name).number for name, rows in given.items()]
    kept = {path: path.read_bytes() for path in (tmp_path / "certify_inputs").iterdir()}
    for path in kept:
        path.unlink()
    for name in ("first", "second"):
        with pytest.raises(LibraryError, match="is missing"):
            entered(ledger, given[name], name)
    assert entered(ledger, given["third"], "third").number == 3
    assert {path: path.read_bytes() for path in (tmp_path / "certify_inputs").iterdir()} == kept
    assert [entered(ledger, rows, name).number for name, rows in given.items()] == numbers


def test_a_record_of_data_that_grew_comes_back_with_it(ledger: Ledger, tmp_path: Path) -> None:
    """Also if it is given to a command that counts only the part that was new then."""
    entered(ledger, slice(0, 100), "first", grows=True)
    entered(ledger, slice(0, 150), "grown", "b", grows=True)
    path = tmp_path / "certify_inputs" / "grown.npy"
    content = path.read_bytes()
    path.unlink()
    found = entered(ledger, slice(0, 150), "grown", "c")
    assert found.rows is not None and found.rows.tolist() == list(range(100, 150))
    assert found.compositions == 2 and path.read_bytes() == content


# The promise ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.frozensets(st.integers(0, 7), min_size=1), st.booleans()), min_size=1, max_size=14)
)
@settings(max_examples=100, deadline=None)
def test_nothing_is_counted_that_was_looked_at_before_its_data(
    asked: list[tuple[frozenset[int], bool]],
) -> None:
    """With data that grows among it, which may count everything once more, but not a choice of it."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        ledger = Ledger(Path(folder))
        looked_at: frozenset[int] = frozenset()
        before: dict[frozenset[int], frozenset[int]] = {}  # what was looked at when data was first given
        for number, (data, grows) in enumerate(asked):
            inputs = np.array(sorted(data), dtype=np.uint64)
            known = before.get(data, looked_at)
            try:
                attempt = ledger.attempt(f"{number}", name_of(inputs), {}, inputs, grows=grows)
            except DataError:
                assert data <= known
                continue
            before.setdefault(data, looked_at)
            counted = frozenset((inputs if attempt.rows is None else inputs[attempt.rows]).tolist())
            assert counted == data - known or (grows and counted == data and known <= data)
            looked_at |= counted


@pytest.mark.parametrize("inputs", [1, 60, 299, 300, 1000, 4000])
def test_a_test_of_new_inputs_errs_with_at_most_its_share_and_all_shares_are_delta(inputs: int) -> None:
    """Exactly, by the binomial distribution, for a composition that is just below its target."""
    for number in (1, 2, 5, 20):
        share = share_of_attempt(number)
        passing = [
            losses
            for losses in range(min(inputs, 100) + 1)
            if walk([LossCounts(losses, inputs)], ACCURACY, DELTA, share=share).deployed is not None
        ]
        false = binom.cdf(passing[-1], inputs, 1.0 - ACCURACY) if passing else 0.0
        assert false <= share * DELTA * (1.0 + 1e-9)


PART, PARTS, DRAWS = 80, 40, 12


def picky(lost: np.ndarray, ledger: Ledger | None) -> bool:
    """Whether someone who certifies parts of some data, then those that had no loss together, is believed."""

    def asked(rows: np.ndarray, number: int) -> tuple[int, bool]:
        if ledger is not None:
            try:
                attempt = ledger.attempt("a", f"{number}", {}, rows.astype(np.uint64))
            except DataError:
                return 0, False
            rows = rows if attempt.rows is None else rows[attempt.rows]
            number = attempt.number
        losses = int(lost[rows].sum())
        verdict = walk([LossCounts(losses, len(rows))], ACCURACY, DELTA, share=share_of_attempt(number))
        return losses, verdict.deployed is not None

    parts = np.split(np.arange(PART * PARTS), PARTS)
    found = [asked(rows, number) for number, rows in enumerate(parts, 1)]
    without = [rows for rows, (losses, _) in zip(parts, found, strict=True) if losses == 0]
    believed = any(passed for _, passed in found)
    return believed or asked(np.concatenate([*without, np.empty(0, int)]), PARTS + 1)[1]


@pytest.mark.slow
def test_whoever_picks_the_inputs_that_were_answered_well_is_not_believed() -> None:
    """1.1 % of answers differ, 1 % may: without records most draws end with a false certificate."""
    random = np.random.default_rng(3)
    false = {True: 0, False: 0}
    for _ in range(DRAWS):
        lost = random.random(PART * PARTS) < 0.011
        with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
            false[True] += picky(lost, Ledger(Path(folder)))
        false[False] += picky(lost, None)
    assert false[True] <= DELTA * DRAWS + 2 * (DELTA * (1 - DELTA) * DRAWS) ** 0.5
    assert false[False] >= 0.5 * DRAWS
