"""`hash`: predicts whether a conversation continues, by logistic regression on hashed words.

The input is that of "learned prefix caching" (LPC): the new prompt, up to four earlier ones, and the number
of prompts. Prompts share 3,072 characters equally; half of each comes from its start and half from its end.
The features of the new prompt are its words, pairs of words, groups of letters and length; those of earlier
prompts are their words.

Weights are stored as whole numbers, so the order of additions does not matter: a prediction does not depend
on the batch.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gati.errors import EvictError
from gati.evict.predict.hashing import Places, TextHasher
from gati.evict.trace.dialogues import EARLIER, Prompts

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

MOST = 0.999  # of a probability, and 1 - MOST the least: nothing is certain
_CHARACTERS = 3072
_READ = EARLIER + 1  # prompts
_LEAST = _CHARACTERS // _READ  # characters for each of them
_TURNS = 32  # larger counts of prompts are treated alike
_ONE = 2.0**24  # scale of weights as whole numbers
_LARGEST = 64.0  # limit of a weight
_AT_ONCE = 1_024  # prompts per batch
_TEXTS_OF, _TURN_OF = attrgetter("texts"), attrgetter("turn")
_NEWEST = itemgetter(-1)


@dataclass(frozen=True)
class ContinuationSettings:
    """Settings of the features and of training."""

    features: int = 2**17
    text: bool = True  # if False, only the count of prompts is used
    epochs: int = 10  # at most
    penalty: float = 1e-6
    rate: float = 0.02  # constant, and weights averaged: decaying rates made overconfident models
    validation: float = 0.15  # share of the samples, taken from the end
    seed: int = 0


class ContinuationModel:
    """A logistic model: `weights` [features], `bias`. Thread-safe."""

    quick = True  # whether a server may predict on its event loop's thread

    def __init__(self, weights: NDArray[np.float32], bias: float, settings: ContinuationSettings) -> None:
        self.weights = weights
        self.bias = bias
        self.settings = settings
        self._hasher = TextHasher(settings.features)
        scaled = np.clip(weights.astype(np.float64), -_LARGEST, _LARGEST) * _ONE
        self._whole = np.rint(scaled).astype(np.int32)
        counts = self._hasher.turns(range(_TURNS + 1))
        self._turns = self._whole[counts].astype(np.int64) + round(bias * _ONE)

    def predict(self, prompts: Sequence[Prompts]) -> Floats:
        """The probabilities that another prompt follows, [prompts], from 1 - MOST to MOST.

        Raises EvictError if a conversation has no prompt.
        """
        turns = np.fromiter(map(_TURN_OF, prompts), np.int64, len(prompts))
        totals = self._turns.take(np.minimum(turns, _TURNS))
        if self.settings.text:
            for begin in range(0, len(prompts), _AT_ONCE):
                part = list(map(_TEXTS_OF, prompts[begin : begin + _AT_ONCE]))
                totals[begin : begin + _AT_ONCE] += self._shown_by(part)
        return _probabilities(totals / _ONE)

    def digest(self) -> str:
        """A hash that identifies the trained model."""
        return hashlib.sha256(self.weights.tobytes() + struct.pack("<d", self.bias)).hexdigest()

    def _shown_by(self, said: list[tuple[str, ...]]) -> NDArray[np.int64]:
        """The texts' contribution to the log odds, [prompts]; the texts of each prompt, the newest last."""
        texts, earlier = _texts_read(said)
        hashed = self._hasher.texts_within(texts, len(said), _LEAST)
        if hashed is None:  # some are too long, and are truncated
            said = [tuple(_cut(text, len(each)) for text in each) for each in _newest(said)]
            hashed = self._hasher.texts(_texts_read(said)[0], len(said))
        whole, count = self._whole, len(said)
        bounds, before_bounds = hashed.bounds[: count + 1], hashed.bounds[count:] - hashed.bounds[count]
        shown = whole.take(hashed.new)
        shown[bounds] = 0
        both = np.add(shown, whole.take(hashed.pairs), dtype=np.int64)
        found = _sums(both, bounds[:-1] + 1, bounds[1:] + 1)
        found += whole.take(hashed.lengths)
        found += _sums(whole.take(hashed.groups), hashed.group_begins, hashed.group_ends)
        shown_before = whole.take(hashed.before)
        shown_before[before_bounds] = 0
        ends = before_bounds.take(np.cumsum(earlier))
        found += _sums(shown_before, np.append(0, ends[:-1]), ends)
        return found


def log_odds(probability: Floats) -> Floats:
    """log(p / (1 - p)), with p clipped to 1 - MOST .. MOST."""
    cut = np.clip(probability, 1.0 - MOST, MOST)
    return np.asarray(np.log(cut / (1.0 - cut)), dtype=np.float64)


def matthews(predicted: Flags, actual: Flags) -> float:
    """Matthews' correlation: 1 for perfect predictions, 0 for chance or if one class is missing."""
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(actual, predicted))


def fit_continuation(
    prompts: Sequence[Prompts], goes_on: Flags, settings: ContinuationSettings | None = None
) -> ContinuationModel:
    """Fit to samples and whether another prompt followed each, [samples].

    The last samples are held out to choose the epoch of the lowest log loss, so samples of one conversation
    should be adjacent. Raises EvictError if either part has only one class.
    """
    from sklearn.linear_model import SGDClassifier

    settings = settings or ContinuationSettings()
    learned = learned_from(goes_on, settings.validation)
    rows = _features_of(prompts, settings)
    kept, judged, actual = rows[:learned], rows[learned:], goes_on[learned:]
    chance = np.random.default_rng(settings.seed)
    model = SGDClassifier(
        loss="log_loss",
        alpha=settings.penalty,
        learning_rate="constant",
        eta0=settings.rate,
        average=True,
        random_state=settings.seed,
    )
    best: ContinuationModel | None = None
    lowest = np.inf
    for _ in range(settings.epochs):
        order = chance.permutation(learned)
        model.partial_fit(kept[order], goes_on[order], classes=[False, True])
        weights = np.asarray(model.coef_[0], dtype=np.float32).copy()
        found = ContinuationModel(weights, float(model.intercept_[0]), settings)
        odds = np.asarray(judged @ weights, dtype=np.float64) + found.bias
        loss = _log_loss(_probabilities(odds), actual)
        if loss >= lowest:
            break
        best, lowest = found, loss
    if best is None:
        raise EvictError("the loss of the continuation model is not finite; check the dialogues")
    return best


def learned_from(goes_on: Flags, validation: float) -> int:
    """The number of samples to learn from; the others, a share of all at the end, are held out.

    Raises EvictError if either part has only one class.
    """
    learned = len(goes_on) - int(validation * len(goes_on))
    for part in (goes_on[:learned], goes_on[learned:]):
        if len(part) == 0 or part.all() or not part.any():
            raise EvictError(
                f"{int(goes_on.sum())} of {len(goes_on)} prompts are followed by another; training needs "
                "examples of both cases: give more conversations, or use the policy lru"
            )
    return learned


def _log_loss(probability: Floats, actual: Flags) -> float:
    return -float(np.mean(np.log(np.where(actual, probability, 1.0 - probability))))


def _probabilities(odds: Floats) -> Floats:
    shares = 1.0 / (1.0 + np.exp(-np.minimum(np.maximum(odds, -50.0), 50.0)))
    return np.minimum(np.maximum(shares, 1.0 - MOST), MOST)


def _sums(values: NDArray[np.signedinteger], begins: Places, ends: Places) -> NDArray[np.int64]:
    """Sum the values from each begin to its end (exclusive).

    The values are whole numbers, so the order of additions does not matter.
    """
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    found: NDArray[np.int64] = sums.take(ends) - sums.take(begins)
    return found


def _texts_read(said: list[tuple[str, ...]]) -> tuple[list[str], NDArray[np.int64]]:
    """The newest prompt of each conversation, then the earlier ones of each, and the numbers of these.

    Raises EvictError if a conversation has no prompt.
    """
    counts = np.fromiter(map(len, said), np.int64, len(said))
    if counts.min() == 0:
        raise EvictError(f"conversation {counts.argmin()} has no prompt: leave it out")
    if counts.max() > _READ:
        said, counts = _newest(said), np.minimum(counts, _READ)
    texts = list(chain.from_iterable(said))
    earlier = np.ones(len(texts), dtype=np.bool_)
    earlier[np.cumsum(counts) - 1] = False
    return [*map(_NEWEST, said), *compress(texts, earlier.tobytes())], counts - 1


def _newest(said: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The newest prompts of each conversation, which are the only ones used."""
    return [texts[-_READ:] for texts in said]


def _cut(text: str, count: int) -> str:
    """Truncate one of several prompts: half is taken from its start and half from its end."""
    room = _CHARACTERS // count
    if len(text) <= room:
        return text
    return f"{text[: room - room // 2 - 1]} {text[len(text) - room // 2 :]}"


def _features_of(prompts: Sequence[Prompts], settings: ContinuationSettings) -> csr_matrix:
    """The count of each feature, [prompts, features]."""
    from scipy.sparse import csr_matrix

    hasher = TextHasher(settings.features)
    turns = hasher.turns([min(each.turn, _TURNS) for each in prompts])
    rows: list[list[str]] = []
    for each in prompts:
        said = each.texts[-_READ:] if settings.text else ()
        rows.append([_cut(text, len(said)) for text in said])
    shown: dict[str, tuple[Places, Places]] = {}
    different = list(dict.fromkeys(text for texts in rows for text in texts))
    for begin in range(0, len(different), _AT_ONCE):
        part = different[begin : begin + _AT_ONCE]
        shown.update(zip(part, _by_text(hasher, part), strict=True))
    found: list[Places] = []
    lengths = np.ones(len(rows) + 1, dtype=np.int64)
    lengths[0] = 0
    for row, texts in enumerate(rows):
        pieces = [turns[row : row + 1], *(shown[text][1] for text in texts[:-1])]
        pieces += [shown[text][0] for text in texts[-1:]]
        found += pieces
        lengths[row + 1] = sum(map(len, pieces))
    indices = np.concatenate(found) if found else np.zeros(0, dtype=np.intp)
    values = np.ones(len(indices), dtype=np.float32)
    matrix = csr_matrix((values, indices, np.cumsum(lengths)), shape=(len(rows), settings.features))
    matrix.sum_duplicates()
    return matrix


def _by_text(hasher: TextHasher, texts: list[str]) -> Iterator[tuple[Places, Places]]:
    """The features of each text as the newest prompt, and as an earlier one."""
    hashed, before = hasher.texts(texts), hasher.texts(texts, newest=0).before
    for text in range(len(texts)):
        first, end = hashed.bounds[text] + 1, hashed.bounds[text + 1]
        groups = hashed.groups[hashed.group_begins[text] : hashed.group_ends[text]]
        new = [hashed.new[first:end], hashed.pairs[first : end + 1], hashed.lengths[text : text + 1], groups]
        yield np.concatenate(new), before[first:end]
