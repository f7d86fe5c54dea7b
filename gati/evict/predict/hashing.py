r"""Words, pairs of words and groups of letters as numbered features, vectorised over many texts with numpy.

Texts are converted to lower case. Runs of \w (as in `re`) are words, and so is every other character except
spaces. Words are hashed as polynomials of their characters modulo 2**64, groups of four letters modulo 2**32,
so one running sum gives the hashes of all texts. The same text gives the same features in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.intp]
_Points = NDArray[np.uint8] | NDArray[np.uint32]
_Hashes = NDArray[np.uint64]
_Flags = NDArray[np.bool_]

_SPACE, _WORD, _MARK, _EDGE = range(4)  # classes of characters; each mark or edge is a separate word
_EDGE_POINT = 255
_APART = chr(_EDGE_POINT)  # an edge, before and after each text, if all texts are ASCII
_LETTERS = 4  # per group
_LONGEST = 40  # lengths up to this differ, in steps of three words

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
    """Features of texts, concatenated.

    Words of text i are from `bounds[i]` + 1 to `bounds[i + 1]`; edges of texts are at the bounds. The first
    texts are newest prompts: their words have the features `new` and `pairs` (with the previous word; at the
    edge after a text, its last word alone). `lengths` [newest] are the numbers of words. `groups` are of
    letters; those of text i are from `group_begins[i]` to `group_ends[i]`. The other texts are earlier
    prompts: their words have the features `before`, which begin with the edge before them.
    """

    bounds: Places  # [texts + 1]
    new: Places
    pairs: Places
    lengths: Places
    groups: Places
    group_begins: Places
    group_ends: Places
    before: Places


class TextHasher:
    """Numbers features from 0 to `features` - 1; `features` is a power of two. Thread-safe."""

    def __init__(self, features: int) -> None:
        bits = features.bit_length() - 1
        if features != 1 << max(bits, 0) or not 1 <= bits <= 31:
            raise ValueError(f"{features} features; give a power of two, from 2 to 2**31")
        self._shift, self._group_shift = np.uint64(64 - bits), np.uint32(32 - bits)

    def turns(self, turns: Sequence[int]) -> Places:
        """Features of counts of prompts, [counts]."""
        return self._numbers(np.asarray(turns, dtype=np.uint64), _TURN)

    def texts(self, texts: Sequence[str], newest: int | None = None) -> HashedTexts:
        """Features of texts; the first `newest` (by default all) are newest prompts."""
        found = self.texts_within(texts, len(texts) if newest is None else newest)
        assert found is not None
        return found

    def texts_within(self, texts: Sequence[str], newest: int, most: int | None = None) -> HashedTexts | None:
        """As `texts`; None if a text has more than `most` characters in lower case."""
        text = _APART.join((" ", *texts, ""))
        if most is not None and len(text) > len(texts) * (most + 1) + 2:
            return None  # one is longer for certain: what follows takes as long as the texts are
        joined = _joined(text, texts)
        points, low = joined.points, joined.low
        begins = np.flatnonzero(joined.begins)
        bounds = np.flatnonzero(joined.edges.take(begins))
        edges = begins[bounds] + 1
        if most is not None and np.max(edges[1:] - edges[:-1], initial=0) > most + 1:
            return None
        words = self._words(low, begins)
        words[bounds] = _END
        first, end = bounds[:newest], bounds[1 : newest + 1]
        own = words[: bounds[newest] + 1]
        former = np.empty_like(own)
        former[1:] = own[:-1]
        former[first + 1] = _BEGIN
        read = slice(edges[newest] + 1)
        letters = (low[read] + points[read] * (low[read] == 0)).astype(np.uint32)
        letters[edges[: newest + 1]] = ord(" ")
        group_ends = edges[1 : newest + 1] - (_LETTERS - 2)
        return HashedTexts(
            bounds,
            self._numbers(own, _NEW),
            self._numbers(former * np.uint64(_BASE) + own, _PAIR),
            self._numbers((np.minimum(end - first - 1, _LONGEST) // 3).astype(np.uint64), _LENGTH),
            self._groups(letters),
            np.minimum(edges[:newest], group_ends),  # an empty text has none
            group_ends,
            self._numbers(words[bounds[newest] :], _BEFORE),
        )

    def _numbers(self, hashes: _Hashes, salt: np.uint64) -> Places:
        mixed = hashes ^ salt
        mixed *= _MIX
        mixed ^= mixed >> np.uint64(32)
        mixed *= _MIX
        mixed >>= self._shift
        return mixed.view(np.int64)

    def _words(self, low: _Points, begins: Places) -> _Hashes:
        """Hash each word: the sum of its characters times powers of the base, from its first character on.

        The first character follows `begins`. Spaces are zeros, so a word may extend to the next begin.
        """
        count = len(low)
        size = 1 << count.bit_length()
        powers, inverses = _powers(_BASE, size), _powers(_INVERSE, size)
        sums = np.zeros(count, dtype=np.uint64)
        np.multiply(low[1:], powers[: count - 1], out=sums[1:])
        to = np.cumsum(sums, out=sums).take(begins)
        words = np.zeros(len(begins), dtype=np.uint64)  # the last entry is an edge
        np.subtract(to[1:], to[:-1], out=words[:-1])
        words *= inverses.take(begins)
        return words

    def _groups(self, points: NDArray[np.uint32]) -> Places:
        """The hash of the group that begins at each character."""
        pairs = points[:-1] * _GROUP
        pairs += points[1:]
        mixed = pairs[:-2] * _GROUP_SQUARED
        mixed += pairs[2:]
        mixed *= _GROUP_MIX
        mixed ^= mixed >> np.uint32(15)
        mixed *= _GROUP
        mixed >>= self._group_shift
        return mixed.astype(np.intp)


@dataclass(frozen=True)
class _JoinedTexts:
    """The characters of all texts after a space, with an edge before each text and after the last.

    `low` is the same in lower case, with zeros for spaces and anything for edges. `begins` says for
    every place but the last whether a word, mark or edge begins right after it, `edges` whether an edge does.
    """

    points: _Points
    low: _Points
    begins: _Flags
    edges: _Flags


def _joined(text: str, texts: Sequence[str]) -> _JoinedTexts:
    try:
        encoded = text.encode("latin-1")
    except UnicodeEncodeError:
        return _joined_wide(texts)
    points = np.frombuffer(encoded, np.uint8)
    if np.count_nonzero(points > 127) != len(texts) + 1:
        return _joined_wide(texts)
    coded = np.frombuffer(encoded.translate(_ASCII_CODES), np.uint8)
    single = coded > 127
    word = coded > 0
    word &= ~single
    begins = word[1:] > word[:-1]
    begins |= single[1:]
    return _JoinedTexts(points, coded & np.uint8(127), begins, points[1:] == _EDGE_POINT)


def _joined_wide(texts: Sequence[str]) -> _JoinedTexts:
    """As `_joined`, for any characters."""
    low = [text.lower() for text in texts]  # one character may become two
    points = np.frombuffer(" ".join((" ", *low, "")).encode("utf-32-le", "surrogatepass"), np.uint32)
    kind = _classes(points)
    kind[np.cumsum([1, *(len(text) + 1 for text in low)])] = _EDGE
    word = (kind == _WORD).view(np.uint8)
    return _JoinedTexts(
        points, np.where(kind == _SPACE, np.uint32(0), points), kind[1:] > word[:-1], kind[1:] == _EDGE
    )


def _class(character: str) -> int:
    """As `re` has it."""
    return _WORD if character == "_" or character.isalnum() else _SPACE if character.isspace() else _MARK


_ASCII_CLASSES = [_class(chr(each)) for each in range(128)]
# in lower case; above 127 for marks and edges, 0 for spaces
_ASCII_CODES = bytes(
    0 if kind == _SPACE else ord(chr(each).lower()) | (0 if kind == _WORD else 128)
    for each, kind in enumerate(_ASCII_CLASSES)
).ljust(256, b"\xff")


def _classes(points: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """The class of each character."""
    found = np.array(_ASCII_CLASSES, dtype=np.uint8).take(np.minimum(points, 127))
    beyond = points > 127
    different, which = np.unique(points[beyond], return_inverse=True)
    found[beyond] = np.array([_class(chr(each)) for each in different], dtype=np.uint8)[which]
    return found


@cache
def _powers(base: int, count: int) -> _Hashes:
    """The base to the power of 0..count-1."""
    powers = np.full(count, base, dtype=np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)
