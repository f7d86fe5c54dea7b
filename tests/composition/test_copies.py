"""Copies among the certify inputs, in what `gati compose` certifies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gati
from gati.composition.composition import Composition
from gati.errors import LibraryError
from gati.exploration.library import CERTIFY, InputRecord, Library
from tests.composition.libraries import make_library


def with_copies(directory: Path, copies: int) -> Library:
    library = make_library(directory)
    split = library.base_outcomes().split
    count = np.where(split == CERTIFY, copies, 1).astype(np.int64)
    rows = np.arange(len(split))
    identities, new = rows.astype(np.uint64), np.ones(len(rows), dtype=np.bool_)
    library.write_input_record(InputRecord(rows, identities, count, identities, new))
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
    for n, losses, copies in ((once.inputs, once.losses, 1), (four.inputs, four.losses, 4)):
        assert losses % copies == 0
        assert n == 600 + (copies - 1) * losses // copies
    strictest = [certificate.tested[0] for certificate in (once, four)]
    assert strictest[1].losses == 4 * strictest[0].losses > 0
    assert four.losses / 4 <= once.losses, "where copies disagree, less is certified"


def test_a_record_of_another_library_is_refused(tmp_path: Path) -> None:
    library = with_copies(tmp_path, 1)
    record = library.input_record()
    assert record is not None
    library.write_input_record(InputRecord(*(array[:-1] for array in record)))
    with pytest.raises(LibraryError, match=r"inputs.safetensors has 1199 inputs, but the outcomes have 1200"):
        composed(library)
