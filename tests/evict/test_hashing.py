"""Features of texts against a plain way to find them: a regular expression and Python's whole numbers."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.evict.predict.hashing import TextHasher

BITS = 20
HASHER = TextHasher(2**BITS)
texts = st.lists(
    st.text(max_size=30)
    | st.lists(
        st.sampled_from(
            ["Bye", "bye", "a_b", "İx", "ΑΣ", "7", "?", "…", "é", "ÿ", "\ud800", "日本", "\t", "\0"]
        )
    ).map(" ".join),
    min_size=1,
    max_size=6,
)


class Features(NamedTuple):
    """Of one text."""

    new: list[int]  # of its words
    pairs: list[int]  # of its words and its end
    before: list[int]  # of its words
    length: int
    groups: list[int]


def features(batch: list[str], newest: int | None = None) -> list[Features]:
    """Of all texts; of those that are not among the newest only `before`, of the others all else."""
    hashed = HASHER.texts(batch, newest)
    newest = len(batch) if newest is None else newest
    found = []
    for text in range(len(batch)):
        first, end = hashed.bounds[text] + 1, hashed.bounds[text + 1]
        if text < newest:
            groups = hashed.groups[hashed.group_begins[text] : hashed.group_ends[text]].tolist()
            pairs = hashed.pairs[first : end + 1].tolist()
            found.append(
                Features(hashed.new[first:end].tolist(), pairs, [], int(hashed.lengths[text]), groups)
            )
        else:
            own = slice(first - hashed.bounds[newest], end - hashed.bounds[newest])
            found.append(Features([], [], hashed.before[own].tolist(), 0, []))
    return found


def plainly(text: str) -> Features:
    """The same, one character after the other."""
    base = 0x9E3779B97F4A7C15
    low = text.lower()
    words = [
        sum(ord(letter) * base**at for at, letter in enumerate(word)) % 2**64
        for word in re.findall(r"\w+|[^\w\s]", low)
    ]
    begin, end = 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
    pairs = [(one * base + other) % 2**64 for one, other in zip([begin, *words], [*words, end], strict=True)]
    points = [ord(letter) for letter in f" {low} "]
    groups = []
    for at in range(len(low) - 1):
        group = 0
        for point in points[at : at + 4]:
            group = (group * 0x9E3779B1 + point) % 2**32
        group = group * 0x85EBCA6B % 2**32
        groups.append((group ^ group >> 15) * 0x9E3779B1 % 2**32 >> (32 - BITS))
    return Features(
        [mixed(word, 0x2545F4914F6CDD1D) for word in words],
        [mixed(pair, 0x94D049BB133111EB) for pair in pairs],
        [mixed(word, 0x632BE59BD9B4E019) for word in words],
        mixed(min(len(words), 40) // 3, 0x85EBCA77C2B2AE63),
        groups,
    )


def mixed(number: int, salt: int) -> int:
    number = (number ^ salt) * 0xD6E8FEB86659FD93 % 2**64
    number = (number ^ number >> 32) * 0xD6E8FEB86659FD93 % 2**64
    return number >> (64 - BITS)


@given(texts, st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_features_are_those_found_plainly_in_any_batch(batch: list[str], newest: int) -> None:
    newest = min(newest, len(batch))
    for number, (found, text) in enumerate(zip(features(batch, newest), batch, strict=True)):
        plain = plainly(text)
        if number < newest:
            assert found == plain._replace(before=[])
        else:
            assert found.before == plain.before


def test_features_are_those_that_stored_models_have_weights_for() -> None:
    (new,), (before,) = features(["Good bye!"]), features(["Good bye!"], 0)
    assert new.new == [282598, 995553, 337354]
    assert new.pairs == [906418, 912136, 14478, 457919]
    assert new.length == 901394
    assert new.groups == [441389, 694248, 268035, 131393, 22770, 927768, 602232, 993518]
    assert before.before == [106264, 826396, 789230]


def test_pairs_know_both_words_their_order_and_the_ends_of_a_text() -> None:
    pairs = [each.pairs for each in features(["a b", "b a", "a", "x a b", ""])]
    assert pairs[0][1] == pairs[3][2] != pairs[1][1]  # (a, b)
    assert pairs[0][0] == pairs[2][0] != pairs[3][1]  # a at the beginning
    assert pairs[0][-1] == pairs[3][-1] != pairs[1][-1] == pairs[2][-1]  # b at the end
    assert len(pairs[4]) == 1
    assert len({each.length for each in features(["a b", "x a b", ""])}) == 2  # none to two words, and three


def test_groups_of_letters_are_of_the_text_in_lower_case() -> None:
    groups = [each.groups for each in features(["Goodbye", "goodbye", "oodb", ""])]
    assert groups[0] == groups[1]
    assert len(groups[0]) == 6 and len(set(groups[0])) == 6  # " goo" to "bye "
    assert set(groups[0]) & set(groups[2]) == {groups[0][2]}  # "oodb"
    assert groups[3] == []


@pytest.mark.parametrize("bits", [1, 12, 17])
def test_features_are_spread_over_all_numbers(bits: int) -> None:
    text = " ".join(f"word{number}" for number in range(4000))
    hashed = TextHasher(2**bits).texts([text, text], 1)
    for found in (hashed.new, hashed.before, hashed.pairs, hashed.groups):
        assert found.min() >= 0 and found.max() < 2**bits
    counts = np.bincount(hashed.new % 16 if bits > 4 else hashed.new)
    assert counts.min() > 0.8 * counts.mean()


@pytest.mark.parametrize("features", [0, 1, 3, 1000, 2**32])
def test_other_numbers_of_features_are_refused(features: int) -> None:
    with pytest.raises(ValueError, match="give a power of two"):
        TextHasher(features)
