"""`hash`: how likely a conversation goes on, from what its user wrote. Hashed words, a logistic model.

The input is that of "learned prefix caching" (LPC): the new prompt and up to four earlier ones, 3,072
characters shared equally among them, half of each from its start and half from its end, and how many prompts
there were. The new prompt counts with its words, pairs of words, groups of letters and length, those before
with their words.

What a prompt adds to the log odds does not depend on the others, so the model remembers it: of a conversation
that goes on only the new prompt is read. Weights are kept as whole numbers, so that no order of adding
changes a result: a prediction is the same alone and in any batch, remembered or not.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gati.errors import EvictError
from gati.evict.predict.hashing import HashedTexts, Places, TextHasher
from gati.evict.trace.dialogues import EARLIER, Prompts

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

__all__ = [
    "MOST",
    "ContinuationModel",
    "ContinuationSettings",
    "fit_continuation",
    "log_odds",
    "matthews",
]

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
# A text that is short enough to be read as it is however many there are, or what is read of a longer one.
_Key = str | tuple[str]

MOST = 0.999  # of a probability, and 1 - MOST the least: nothing is certain
_CHARACTERS = 3072
_READ = EARLIER + 1  # prompts
_LEAST = _CHARACTERS // _READ  # that each of them has
_TURNS = 32  # from here on, counts of prompts are alike
_ONE = 2.0**24  # of a weight as a whole number
_LARGEST = 64.0  # of a weight
_REMEMBERED, _REMEMBERED_CHARACTERS = 16_384, 2**23  # prompts, and as many that were used before these
_AT_ONCE = 16_384  # characters that are hashed together: arrays that fit into a processor's own memory


@dataclass(frozen=True)
class ContinuationSettings:
    """How `hash` reads and learns."""

    features: int = 2**17
    letters: bool = True
    text: bool = True  # or the count of prompts alone
    epochs: int = 10  # at most
    penalty: float = 1e-6
    rate: float = 0.02  # constant, and weights averaged: decaying rates made overconfident models
    validation: float = 0.15  # share of the samples, the last ones
    seed: int = 0


class ContinuationModel:
    """A logistic model: `weights` [features], `bias`. Any thread may ask it."""

    def __init__(self, weights: NDArray[np.float32], bias: float, settings: ContinuationSettings) -> None:
        self.weights = weights
        self.bias = bias
        self.settings = settings
        self._hasher = TextHasher(settings.features)
        scaled = np.clip(weights.astype(np.float64), -_LARGEST, _LARGEST) * _ONE
        self._whole = np.rint(scaled).astype(np.int32)
        counts = self._hasher.turns(range(_TURNS + 1))
        self._turns = (self._whole[counts].astype(np.int64) + round(bias * _ONE)).tolist()
        self._known = _Shown()
        self._former = _Shown()
        self._lock = threading.Lock()

    def predict(self, prompts: Sequence[Prompts]) -> Floats:
        """The probabilities that another prompt follows, [prompts], from 1 - MOST to MOST."""
        turns = self._turns
        totals = [turns[each.turn if each.turn < _TURNS else _TURNS] for each in prompts]
        if self.settings.text:
            with self._lock:
                self._add_texts(prompts, totals)
        return _probabilities(np.array(totals, dtype=np.float64) / _ONE)

    def _add_texts(self, prompts: Sequence[Prompts], totals: list[int]) -> None:
        """Add to `totals` [prompts] what the texts show: at once what is known of them, then the others."""
        new, before = self._known.new, self._known.before
        other_new: list[tuple[int, _Key]] = []
        other_before: list[tuple[int, _Key]] = []
        for row, each in enumerate(prompts):
            texts = each.texts if len(each.texts) <= _READ else each.texts[-_READ:]
            newest = new.get(texts[-1])
            if newest is None:
                other_new.append((row, _key(texts[-1], len(texts))))
            else:
                totals[row] += newest
            try:
                totals[row] += sum(map(before.__getitem__, texts[:-1]))
            except KeyError:
                other_before += [(row, _key(text, len(texts))) for text in texts[:-1]]
        if not other_new and not other_before:
            return
        self._learn_of(dict.fromkeys(key for part in (other_new, other_before) for _, key in part))
        for row, key in other_new:
            totals[row] += new[key]
        for row, key in other_before:
            totals[row] += before[key]
        self._forget()

    def _learn_of(self, keys: Iterable[_Key]) -> None:
        """Know what these texts show."""
        known, former = self._known, self._former
        unknown: list[_Key] = []
        for key in keys:
            if key in known.new:
                continue
            found = former.new.get(key)
            if found is None:
                unknown.append(key)
            else:
                known.new[key], known.before[key] = found, former.before[key]
            known.characters += len(_text(key))
        for part in _parts(unknown):
            shown_new, shown_before = self._shown(self._hasher.texts(list(map(_text, part))))
            known.new.update(zip(part, shown_new.tolist(), strict=True))
            known.before.update(zip(part, shown_before.tolist(), strict=True))

    def _forget(self) -> None:
        """Texts that were not asked for since as many others were."""
        known = self._known
        fill = max(len(known.new) / _REMEMBERED, known.characters / _REMEMBERED_CHARACTERS)
        if fill > 1.0:
            self._known, self._former = _Shown(), known if fill <= 2.0 else _Shown()

    def _shown(self, hashed: HashedTexts) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """What each text adds to the log odds as the newest prompt, and as one before, [texts]."""
        whole = self._whole
        new = _sums(whole[hashed.new], hashed.bounds[:-1], hashed.bounds[1:])
        new += _sums(whole[hashed.pairs], hashed.bounds[:-1], hashed.bounds[1:])
        new += whole[hashed.lasts]
        new += whole[hashed.lengths]
        if self.settings.letters:
            new += _sums(whole[hashed.groups], hashed.group_begins, hashed.group_ends)
        return new, _sums(whole[hashed.before], hashed.bounds[:-1], hashed.bounds[1:])


@dataclass
class _Shown:
    """What texts add to the log odds, and how many characters they have."""

    new: dict[_Key, int] = field(default_factory=dict)
    before: dict[_Key, int] = field(default_factory=dict)
    characters: int = 0


def log_odds(probability: Floats) -> Floats:
    """log(p / (1 - p)), p cut to 1 - MOST .. MOST."""
    cut = np.clip(probability, 1.0 - MOST, MOST)
    return np.asarray(np.log(cut / (1.0 - cut)), dtype=np.float64)


def matthews(predicted: Flags, actual: Flags) -> float:
    """Matthews' correlation: 1 for perfect predictions, 0 for chance or where one class is missing."""
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(actual, predicted))


def fit_continuation(
    prompts: Sequence[Prompts], goes_on: Flags, settings: ContinuationSettings | None = None
) -> ContinuationModel:
    """Fit to samples of which it is known whether another prompt followed, [samples].

    The last samples choose among the epochs the one of the lowest log loss, so samples of one conversation
    should stand together. Raises EvictError where there is nothing to tell apart.
    """
    from sklearn.linear_model import SGDClassifier

    settings = settings or ContinuationSettings()
    learned = len(prompts) - int(settings.validation * len(prompts))
    for part in (goes_on[:learned], goes_on[learned:]):
        if len(part) == 0 or part.all() or not part.any():
            raise EvictError(
                f"of {len(prompts)} prompts {int(goes_on.sum())} are followed by another, which "
                "leaves nothing to tell apart: give more conversations, or use the policy lru"
            )
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
        raise EvictError("the continuation model has no finite loss: look at the dialogues")
    return best


def _log_loss(probability: Floats, actual: Flags) -> float:
    return -float(np.mean(np.log(np.where(actual, probability, 1.0 - probability))))


def _probabilities(odds: Floats) -> Floats:
    return np.clip(1.0 / (1.0 + np.exp(-np.clip(odds, -50.0, 50.0))), 1.0 - MOST, MOST)


def _sums(values: NDArray[np.int32], begins: Places, ends: Places) -> NDArray[np.int64]:
    """Of the values from each begin to its end; whole numbers, so that how they are added is all the same."""
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return np.asarray(sums[ends] - sums[begins], dtype=np.int64)


def _read(text: str, count: int) -> str:
    """What is read of one of so many prompts: half from its start and half from its end."""
    room = _CHARACTERS // count
    if len(text) <= room:
        return text
    return f"{text[: room - room // 2 - 1]} {text[len(text) - room // 2 :]}"


def _key(text: str, count: int) -> _Key:
    return text if len(text) <= _LEAST else (_read(text, count),)


def _text(key: _Key) -> str:
    return key if isinstance(key, str) else key[0]


def _parts(keys: list[_Key]) -> Iterator[list[_Key]]:
    """The texts in parts that are small enough to be hashed at once."""
    part: list[_Key] = []
    characters = 0
    for key in keys:
        if part and characters + len(_text(key)) > _AT_ONCE:
            yield part
            part, characters = [], 0
        part.append(key)
        characters += len(_text(key))
    if part:
        yield part


def _features_of(prompts: Sequence[Prompts], settings: ContinuationSettings) -> csr_matrix:
    """How often each feature is shown, [prompts, features]."""
    from scipy.sparse import csr_matrix

    hasher = TextHasher(settings.features)
    turns = hasher.turns([min(each.turn, _TURNS) for each in prompts])
    rows: list[list[_Key]] = []
    for each in prompts:
        said = each.texts[-_READ:] if settings.text else ()
        rows.append([_key(text, len(said)) for text in said])
    shown: dict[_Key, tuple[Places, Places]] = {}
    for part in _parts(list(dict.fromkeys(key for keys in rows for key in keys))):
        hashed = hasher.texts(list(map(_text, part)))
        shown.update(zip(part, _by_text(hashed, letters=settings.letters), strict=True))
    found: list[Places] = []
    lengths = np.ones(len(rows) + 1, dtype=np.int64)
    lengths[0] = 0
    for row, keys in enumerate(rows):
        pieces = [turns[row : row + 1], *(shown[key][1] for key in keys[:-1])]
        pieces += [shown[key][0] for key in keys[-1:]]
        found += pieces
        lengths[row + 1] = sum(map(len, pieces))
    indices = np.concatenate(found) if found else np.zeros(0, dtype=np.intp)
    values = np.ones(len(indices), dtype=np.float32)
    matrix = csr_matrix((values, indices, np.cumsum(lengths)), shape=(len(rows), settings.features))
    matrix.sum_duplicates()
    return matrix


def _by_text(hashed: HashedTexts, *, letters: bool) -> Iterator[tuple[Places, Places]]:
    """Of each text the features as the newest prompt, and as one before."""
    for text in range(len(hashed.lasts)):
        own = slice(hashed.bounds[text], hashed.bounds[text + 1])
        one = slice(text, text + 1)
        new = [hashed.new[own], hashed.pairs[own], hashed.lasts[one], hashed.lengths[one]]
        if letters:
            new.append(hashed.groups[hashed.group_begins[text] : hashed.group_ends[text]])
        yield np.concatenate(new), hashed.before[own]
