"""Copies among the certify inputs, in what `gati compose` certifies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gati
from gati.composition.certified import propose
from gati.composition.composition import Composition
from gati.composition.outcomes import outcomes_of
from gati.composition.plans import Settings
from gati.composition.prospects import problem_deployed
from gati.errors import LibraryError
from gati.exploration.library import CERTIFY, SELECT, InputRecord, Library
from gati.model.identity import CopyCounts
from tests.composition.libraries import make_library

pytestmark = pytest.mark.usefixtures("unbounded")


def with_copies(directory: Path, copies: int) -> Library:
    library = make_library(directory)
    split = library.base_outcomes().split
    count = np.where(split == CERTIFY, copies, 1).astype(np.int64)
    rows = np.arange(len(split))
    identities, new = rows.astype(np.uint64), np.ones(len(rows), dtype=np.bool_)
    library.write_input_record(InputRecord(rows, identities, count, identities, new))
    return library


def with_seen(directory: Path, seen: int) -> Library:
    """A library of which copies of this many inputs to certify on trained or selected."""
    library = with_copies(directory, 1)
    record = library.input_record()
    assert record is not None
    new = record.new.copy()
    new[np.flatnonzero(library.base_outcomes().split == CERTIFY)[:seen]] = False
    library.write_input_record(record._replace(new=new))
    return library


def composed(library: Library, *, per_class: bool = False) -> Composition:
    return gati.compose(
        library.directory, accuracy=0.8, confidence=0.95, backend="torch", per_class=per_class
    )


@pytest.mark.slow
@pytest.mark.parametrize("per_class", [False, True])
def test_a_lost_input_counts_as_often_as_it_occurs(tmp_path: Path, per_class: bool) -> None:
    once = composed(with_copies(tmp_path / "once", 1), per_class=per_class).certificate
    unknown = composed(make_library(tmp_path / "unknown"), per_class=per_class).certificate
    four = composed(with_copies(tmp_path / "four", 4), per_class=per_class).certificate
    assert once is not None and four is not None and once == unknown
    drop = four.accuracy_drop  # labels are the base model's answers
    if not per_class:  # where nothing is deployed, nothing can become wrong
        assert drop is not None and (drop.became_wrong, drop.n) == (four.losses, four.inputs)
    for n, losses, copies in ((once.inputs, once.losses, 1), (four.inputs, four.losses, 4)):
        assert losses % copies == 0
        assert n == 600 + (copies - 1) * losses // copies
    strictest = [certificate.tested[0] for certificate in (once, four)]
    assert strictest[1].losses == 4 * strictest[0].losses > 0
    assert four.losses / 4 <= once.losses, "where copies disagree, less is certified"


@pytest.mark.slow
@pytest.mark.parametrize("per_class", [False, True])
def test_a_certificate_says_what_it_counted_and_compositions_warn_of_many_copies(
    tmp_path: Path, per_class: bool
) -> None:
    plain = composed(with_seen(tmp_path / "plain", 0), per_class=per_class)
    few, many = (composed(with_seen(tmp_path / str(seen), seen)) for seen in (60, 61))
    assert plain.certificate is not None and plain.certificate.new_inputs is None
    assert "inputs not used for choosing were answered" in plain.certificate.sentence()
    for found, new in ((few, 540), (many, 539)):
        counts = found.certificate
        assert counts is not None and counts.new_inputs is not None
        assert counts.new_inputs.inputs == new
        assert new - counts.new_inputs.losses == counts.inputs - counts.losses, "who agrees is new"
        assert f"{counts.losses} of {counts.inputs} counted inputs were answered" in counts.sentence()
        assert "not used for choosing" not in counts.sentence()
        assert "are counted only where answers differ." in counts.sentence()
    assert few.note == plain.note == ""
    assert many.note.startswith("61 of 600 inputs to certify on have copies that train or select")


@pytest.mark.slow
def test_the_latency_on_the_certify_split_is_that_of_new_inputs_each_once(tmp_path: Path) -> None:
    """Inputs that trained are answered early more often."""
    library = with_seen(tmp_path, 0)
    record, split = library.input_record(), library.base_outcomes().split
    assert record is not None
    scores = np.max([library.outcomes(trial.trial_id).score for trial in library.trials], axis=0)
    seen = (split == CERTIFY) & (scores > np.quantile(scores, 0.8))
    library.write_input_record(record._replace(new=~seen))
    composition = composed(library)
    certificate = composition.certificate
    assert certificate is not None and certificate.walked_on is not None
    problem = problem_deployed(composition, library)
    outcome = outcomes_of(library, CERTIFY).replay(problem, problem.candidates)
    ends_ms = np.array(
        [*outcome.exit_ms, problem.base_ms + sum(each.penalty_ms for each in problem.candidates)]
    )
    new = ~seen[split == CERTIFY]
    found = certificate.walked_on
    assert found.hit_rate == pytest.approx((outcome.left_at < len(problem.candidates))[new].mean())
    assert found.mean_latency_ms == pytest.approx(ends_ms[outcome.left_at][new].mean())
    assert found.hit_rate is not None and found.hit_rate < outcome.hit_rate


@pytest.mark.slow
def test_hopes_count_every_copy_that_is_lost(tmp_path: Path) -> None:
    library = make_library(tmp_path)
    proposal = propose(
        library, Settings(accuracy=0.8), ["inline"], outcomes_of(library, SELECT), 600
    )  # fmt: skip
    hoped = [proposal.hoped_ms(600, draws=draws) or np.inf for draws in (None, 600, 1200, 6000)]
    assert hoped[0] == hoped[1] < hoped[2] < hoped[3]


def test_a_record_of_another_library_is_refused(tmp_path: Path) -> None:
    library = with_copies(tmp_path, 1)
    record = library.input_record()
    assert record is not None
    library.write_input_record(InputRecord(*(array[:-1] for array in record)))
    with pytest.raises(LibraryError, match=r"inputs.safetensors has 1199 inputs, but the outcomes have 1200"):
        composed(library)


def test_what_explore_has_seen_becomes_no_evidence_by_an_attempt() -> None:
    """Of an attempt's inputs, those that are new after earlier ones are numbered among the evidence."""
    copies = CopyCounts(np.array([2, 1, 1, 3]), np.array([0, 1, 0, 1]))
    limited = copies.limited(np.array([1]))
    assert (limited.differs.tolist(), limited.same.tolist()) == ([2, 1, 1, 3], [0, 0, 0, 1])
    assert copies.limited(None) is copies
