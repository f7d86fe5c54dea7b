r"""Words, pairs of words and groups of letters as numbered features: many texts at once, in numpy.

A text is cut in lower case: runs of what `re` calls \w are words, and so is each other character that is no
space. Words are hashed as polynomials of their characters modulo 2**64, groups of four letters modulo 2**32,
so that those of all texts come from one running sum. The same text gives the same features in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["HashedTexts", "TextHasher"]

Places = NDArray[np.intp]
_Points = NDArray[np.uint32]
_Hashes = NDArray[np.uint64]

_SPACE, _WORD, _MARK = 0, 1, 2  # classes of characters; each mark is a word of its own
_APART = " \n "  # between texts, so that each begins and ends with a space
_LETTERS = 4  # of a group
_LONGEST = 40  # words that the length tells apart, by threes

_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 2**64)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_NEW = np.uint64(0x2545F4914F6CDD1D)
_BEFORE = np.uint64(0x632BE59BD9B4E019)
_PAIR = np.uint64(0x94D049BB133111EB)
_TURN = np.uint64(0xBF58476D1CE4E5B9)
_LENGTH = np.uint64(0x85EBCA77C2B2AE63)
_BEGIN, _END = np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)  # words around every text
_GROUP, _GROUP_SQUARED = np.uint32(0x9E3779B1), np.uint32(0x9E3779B1**2 % 2**32)
_GROUP_MIX = np.uint32(0x85EBCA6B)


@dataclass(frozen=True)
class HashedTexts:
    """Features of texts, one text after the other: those of text i are from `bounds[i]` to `bounds[i + 1]`.

    Of words [words], `new` and `pairs` (with the word before) are what the newest prompt shows, `before` what
    an earlier one does. `lasts` [texts] are pairs of the last words with nothing, `lengths` [texts] the
    numbers of words. `groups` are of letters; those of text i are from `group_begins[i]` to `group_ends[i]`.
    """

    bounds: Places  # [texts + 1]
    new: Places
    pairs: Places
    before: Places
    lasts: Places
    lengths: Places
    groups: Places
    group_begins: Places
    group_ends: Places


class TextHasher:
    """Numbers features from 0 to `features` - 1; `features` is a power of two. Not for several threads."""

    def __init__(self, features: int) -> None:
        bits = features.bit_length() - 1
        if features != 1 << max(bits, 0) or not 1 <= bits <= 31:
            raise ValueError(f"{features} features; give a power of two, from 2 to 2**31")
        self._shift, self._group_shift = np.uint64(64 - bits), np.uint32(32 - bits)
        self._powers = self._inverses = np.ones(1, dtype=np.uint64)

    def turns(self, turns: Sequence[int]) -> Places:
        """Features of counts of prompts, [counts]."""
        return self._numbers(np.asarray(turns, dtype=np.uint64), _TURN)

    def texts(self, texts: Sequence[str]) -> HashedTexts:
        """Features of texts."""
        points, sizes = _joined(texts)
        begins = np.cumsum(sizes + len(_APART)) - (sizes + len(_APART))  # of the space before each text
        kind = _classes(points)
        mark, word = kind == _MARK, kind == _WORD
        starts, ends = mark.copy(), mark.copy()  # the first and the last point is a space
        starts[1:] |= word[1:] & ~word[:-1]
        ends[:-1] |= word[:-1] & ~word[1:]
        first, last = np.flatnonzero(starts), np.flatnonzero(ends)
        words = self._words(points, first, last + 1)
        bounds = np.append(np.searchsorted(first, begins), len(first))
        counts = np.diff(bounds)
        former = np.empty_like(words)
        former[1:] = words[:-1]
        some = counts > 0
        former[bounds[:-1][some]] = _BEGIN
        final = np.full(len(texts), _BEGIN)
        final[some] = words[bounds[1:][some] - 1]
        return HashedTexts(
            bounds,
            self._numbers(words, _NEW),
            self._pairs(former, words),
            self._numbers(words, _BEFORE),
            self._pairs(final, _END),
            self._numbers((np.minimum(counts, _LONGEST) // 3).astype(np.uint64), _LENGTH),
            self._groups(points),
            begins,
            begins + np.maximum(sizes + 3 - _LETTERS, 0),
        )

    def _numbers(self, hashes: _Hashes, salt: np.uint64) -> Places:
        mixed = (hashes ^ salt) * _MIX
        mixed ^= mixed >> np.uint64(32)
        mixed *= _MIX
        return np.asarray(mixed >> self._shift, dtype=np.intp)

    def _pairs(self, former: _Hashes, later: _Hashes | np.uint64) -> Places:
        return self._numbers(former * np.uint64(_BASE) + later, _PAIR)

    def _words(self, points: _Points, first: Places, end: Places) -> _Hashes:
        """Of each word: the sum of its characters times powers of the base, from its own first on."""
        count = len(points)
        if count > len(self._powers):
            self._powers, self._inverses = _powers(_BASE, 2 * count), _powers(_INVERSE, 2 * count)
        sums = np.zeros(count + 1, dtype=np.uint64)
        np.cumsum(points * self._powers[:count], out=sums[1:])
        return np.asarray((sums[end] - sums[first]) * self._inverses[first], dtype=np.uint64)

    def _groups(self, points: _Points) -> Places:
        """The group that begins at each character."""
        pairs = points[:-1] * _GROUP + points[1:]
        mixed = (pairs[:-2] * _GROUP_SQUARED + pairs[2:]) * _GROUP_MIX
        mixed ^= mixed >> np.uint32(15)
        mixed *= _GROUP
        return np.asarray(mixed >> self._group_shift, dtype=np.intp)


def _joined(texts: Sequence[str]) -> tuple[_Points, Places]:
    """The characters of all texts in lower case, with spaces around each, and how many are each text's."""
    joined = _APART.join(texts)
    if joined.isascii():
        encoded = f" {joined.lower()} \n".encode()
        return np.frombuffer(encoded, np.uint8).astype(np.uint32), np.array([len(text) for text in texts])
    low = [text.lower() for text in texts]  # some characters become two
    encoded = f" {_APART.join(low)} \n".encode("utf-32-le", "surrogatepass")
    return np.frombuffer(encoded, np.uint32), np.array([len(text) for text in low])


def _class(character: str) -> int:
    """As `re` has it."""
    return _WORD if character == "_" or character.isalnum() else _SPACE if character.isspace() else _MARK


_ASCII = np.array([_class(chr(each)) for each in range(128)], dtype=np.uint8)


def _classes(points: _Points) -> NDArray[np.uint8]:
    """The class of each character."""
    if points.max() < len(_ASCII):
        return _ASCII.take(points)
    found = _ASCII.take(np.minimum(points, len(_ASCII) - 1))
    beyond = points >= len(_ASCII)
    different, which = np.unique(points[beyond], return_inverse=True)
    found[beyond] = np.array([_class(chr(each)) for each in different], dtype=np.uint8)[which]
    return found


def _powers(base: int, count: int) -> _Hashes:
    """The base to the power of 0..count-1."""
    powers = np.full(count, base, dtype=np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)
