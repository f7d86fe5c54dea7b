"""Records in documents: each field as its annotation says, or a message that names it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NewType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gati.documents import DocumentKind, key, values_of
from gati.errors import LibraryError

Name = NewType("Name", str)
KIND = DocumentKind(2, LibraryError, "explore again")


@dataclass(frozen=True)
class Part:
    size: float
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Whole:
    name: Name
    count: int = field(metadata=key("n"))
    mode: Literal["fast", "exact"]
    parts: tuple[Part, ...] = ()
    best: Part | None = None
    by_name: dict[str, float] = field(default_factory=dict)
    sure: bool = False


parts = st.builds(
    Part, st.floats(allow_nan=False, allow_infinity=False), st.lists(st.integers(), max_size=3).map(tuple)
)
wholes = st.builds(
    Whole,
    st.text(max_size=5).map(Name),
    st.integers(),
    st.sampled_from(("fast", "exact")),
    st.lists(parts, max_size=3).map(tuple),
    st.none() | parts,
    st.dictionaries(st.text(max_size=3), st.floats(0, 1), max_size=3),
    st.booleans(),
)


@given(wholes)
def test_what_is_written_is_read(whole: Whole) -> None:
    document = KIND.parse(KIND.text_of(values_of(whole)), "x.json")
    assert KIND.record(Whole, document, "x.json") == whole
    assert document["n"] == whole.count and "count" not in document
    assert [each["size"] for each in document["parts"]] == [asdict(each)["size"] for each in whole.parts]


GOOD: dict[str, Any] = {"name": "a", "n": 1, "mode": "fast"}


def test_documents_that_were_first_written_without_a_number_have_format_1() -> None:
    unnumbered = replace(KIND, unnumbered=True, compact=True)
    assert unnumbered.parse('{"a": 1}', "x.json") == {"a": 1}
    assert unnumbered.text_of({"a": 1}) == '{"format": 2, "a": 1}\n'
    with pytest.raises(LibraryError, match="has format 3, this Gati reads up to 2"):
        unnumbered.parse('{"format": 3}', "x.json")
    with pytest.raises(LibraryError, match=r"x.json is damaged \(no 'format'\): explore again"):
        KIND.parse('{"a": 1}', "x.json")


def test_missing_fields_take_their_default_and_others_are_ignored() -> None:
    assert KIND.record(Whole, {**GOOD, "new": 1}, "x.json") == Whole(Name("a"), 1, "fast")
    assert KIND.record(Whole, {"n": 1, "mode": "exact"}, "x.json", name="b").name == "b"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "a", "mode": "fast"}, "x.json: has no field 'n'; explore again"),
        ({**GOOD, "n": True}, "x.json: field 'n' is True, expected a whole number; explore again"),
        ({**GOOD, "name": 3}, "x.json: field 'name' is 3, expected a string"),
        ({**GOOD, "mode": "slow"}, "field 'mode' is 'slow', expected 'fast' or 'exact'"),
        ({**GOOD, "mode": []}, r"field 'mode' is \[\], expected 'fast' or 'exact'"),
        ({**GOOD, "best": 1}, "field 'best' is 1, expected an object or null"),
        ({**GOOD, "sure": 0}, "field 'sure' is 0, expected true or false"),
        ({**GOOD, "by_name": {"a": "b"}}, "field 'by_name' is {'a': 'b'}, expected an object"),
        ({**GOOD, "parts": [{"size": 1}, {}]}, r"x.json: parts\[1\]: has no field 'size'"),
        (
            {**GOOD, "best": {"size": float("inf")}},
            "best: field 'size' is inf, expected a finite number",
        ),
        ({**GOOD, "best": {"size": 1, "shape": [1.5]}}, r"'shape' is \[1.5\], expected a list, each a whole"),
        ("a", "x.json: expected an object, got 'a'; explore again"),
    ],
)
def test_what_does_not_fit_is_named(values: object, message: str) -> None:
    with pytest.raises(LibraryError, match=message):
        KIND.record(Whole, values, "x.json")
