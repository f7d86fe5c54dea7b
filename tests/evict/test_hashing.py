"""Features of texts against a plain way to find them: a regular expression and Python's whole numbers."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.evict.predict.hashing import HashedTexts, TextHasher

HASHER = TextHasher(2**20)
texts = st.lists(
    st.text(max_size=30)
    | st.lists(st.sampled_from(["Bye", "bye", "a_b", "İx", "ΑΣ", "7", "?", "…", "\ud800", "日本", "\t"])).map(
        " ".join
    ),
    min_size=1,
    max_size=6,
)


def last(hashed: HashedTexts, text: int) -> int:
    """The pair of the last word with nothing."""
    return int(hashed.pairs[hashed.bounds[text + 1]])


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())


def rows(hashed: HashedTexts, text: int) -> tuple[list[list[int]], list[int]]:
    """Features by words (new, pairs, before) and by groups of letters."""
    own = slice(hashed.bounds[text] + 1, hashed.bounds[text + 1])
    groups = hashed.groups[hashed.group_begins[text] : hashed.group_ends[text]]
    return [each[own].tolist() for each in (hashed.new, hashed.pairs, hashed.before)], groups.tolist()


@given(texts)
@settings(max_examples=60, deadline=None)
def test_words_are_those_of_the_expression_and_alike_where_these_are(given_texts: list[str]) -> None:
    hashed = HASHER.texts(given_texts)
    seen: dict[str, set[tuple[int, int]]] = {}
    for text, said in enumerate(given_texts):
        (new, pairs, before), groups = rows(hashed, text)
        words = words_of(said)
        assert len(new) == len(pairs) == len(before) == len(words)
        assert len(groups) == max(len(said.lower()) - 1, 0)  # of four letters, with a space on either side
        for word, *numbers in zip(words, new, before, strict=True):
            seen.setdefault(word, set()).add((numbers[0], numbers[1]))
    assert all(len(numbers) == 1 for numbers in seen.values())
    assert len({next(iter(each)) for each in seen.values()}) == len(seen)  # two in 2**40 are alike


@given(texts)
@settings(max_examples=40, deadline=None)
def test_a_text_has_the_same_features_in_any_batch(given_texts: list[str]) -> None:
    hashed = HASHER.texts(given_texts)
    for text, said in enumerate(given_texts):
        alone = HASHER.texts([said])
        assert rows(alone, 0) == rows(hashed, text)
        assert (last(alone, 0), alone.lengths[0]) == (last(hashed, text), hashed.lengths[text])
        part = HASHER.texts(given_texts, text + 1)  # those after it are earlier prompts
        assert [rows(part, each) for each in range(text + 1)] == [
            rows(hashed, each) for each in range(text + 1)
        ]
        np.testing.assert_array_equal(part.before, hashed.before)
        assert len(part.lengths) == len(part.group_begins) == len(part.group_ends) == text + 1


def test_pairs_know_both_words_their_order_and_the_ends_of_a_text() -> None:
    hashed = HASHER.texts(["a b", "b a", "a", "x a b", ""])
    pairs = [rows(hashed, text)[0][1] for text in range(5)]
    assert pairs[0][1] == pairs[3][2] != pairs[1][1]  # (a, b)
    assert pairs[0][0] == pairs[2][0] != pairs[3][1]  # a at the beginning
    assert last(hashed, 0) == last(hashed, 3) != last(hashed, 1) == last(hashed, 2)  # b at the end
    assert pairs[4] == []
    assert len(set(hashed.lengths.tolist())) == 2  # none to two words, and three


def test_groups_of_letters_are_of_the_text_in_lower_case() -> None:
    groups = [rows(HASHER.texts([text]), 0)[1] for text in ("Goodbye", "goodbye", "oodb", "")]
    assert groups[0] == groups[1]
    assert len(groups[0]) == 6 and len(set(groups[0])) == 6  # " goo" to "bye "
    assert set(groups[0]) & set(groups[2]) == {groups[0][2]}  # "oodb"
    assert groups[3] == []


@pytest.mark.parametrize("bits", [1, 12, 17])
def test_features_are_spread_over_all_numbers(bits: int) -> None:
    hashed = TextHasher(2**bits).texts([" ".join(f"word{number}" for number in range(4000))])
    for found in (hashed.new, hashed.before, hashed.pairs, hashed.groups):
        assert found.min() >= 0 and found.max() < 2**bits
    counts = np.bincount(hashed.new % 16 if bits > 4 else hashed.new)
    assert counts.min() > 0.8 * counts.mean()


@pytest.mark.parametrize("features", [0, 1, 3, 1000, 2**32])
def test_other_numbers_of_features_are_refused(features: int) -> None:
    with pytest.raises(ValueError, match="give a power of two"):
        TextHasher(features)
