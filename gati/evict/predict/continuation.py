"""`hash`: how likely a conversation goes on, from what its user wrote. Hashed words, a logistic model.

The input is that of "learned prefix caching" (LPC): the new prompt and up to four earlier ones, 512 words
shared equally among them, and how many prompts there were. Words, pairs of words and groups of letters are
hashed into one vector, apart for the new prompt and for those before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gati.errors import EvictError
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

MOST = 0.999  # of a probability, and 1 - MOST the least: nothing is certain
_WORDS = 512
_TURNS = 32  # from here on, counts of prompts are alike
_WORD = re.compile(r"\w+|[^\w\s]")
_LETTERS = (4,)


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
    """A logistic model: `weights` [features], `bias`."""

    def __init__(self, weights: NDArray[np.float32], bias: float, settings: ContinuationSettings) -> None:
        self.weights = weights
        self.bias = bias
        self.settings = settings
        self._reader = _Reader(settings)

    def predict(self, prompts: Sequence[Prompts]) -> Floats:
        """The probabilities that another prompt follows, [prompts], from 1 - MOST to MOST."""
        return self.predict_rows(self.read(prompts)) if prompts else np.zeros(0)

    def predict_rows(self, rows: csr_matrix) -> Floats:
        """The same from what was read before, [prompts, features]."""
        odds = np.asarray(rows @ self.weights, dtype=np.float64) + self.bias
        return np.clip(1.0 / (1.0 + np.exp(-np.clip(odds, -50.0, 50.0))), 1.0 - MOST, MOST)

    def read(self, prompts: Sequence[Prompts]) -> csr_matrix:
        """What the model sees of prompts, [prompts, features]."""
        return self._reader.rows(prompts)


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
    rows = _Reader(settings).rows(prompts)
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
        loss = _log_loss(found.predict_rows(judged), actual)
        if loss >= lowest:
            break
        best, lowest = found, loss
    if best is None:
        raise EvictError("the continuation model has no finite loss: look at the dialogues")
    return best


def _log_loss(probability: Floats, actual: Flags) -> float:
    return -float(np.mean(np.log(np.where(actual, probability, 1.0 - probability))))


class _Reader:
    """Turns prompts into rows of hashed features."""

    def __init__(self, settings: ContinuationSettings) -> None:
        from sklearn.feature_extraction.text import HashingVectorizer

        self._settings = settings
        self._vectorizer = HashingVectorizer(
            analyzer=self._features, n_features=settings.features, norm=None, binary=True, dtype=np.float32
        )

    def rows(self, prompts: Sequence[Prompts]) -> csr_matrix:
        return self._vectorizer.transform(prompts)

    def _features(self, prompts: Prompts) -> Iterator[str]:
        yield f"turn {min(prompts.turn, _TURNS)}"
        if not self._settings.text:
            return
        texts = prompts.texts[-1 - EARLIER :]
        room = _WORDS // len(texts)
        for age, text in enumerate(reversed(texts)):
            words = _ends(_WORD.findall(text.lower()), room)
            where = "new" if age == 0 else "before"
            for word in words:
                yield f"{where} {word}"
            if age == 0:
                for former, later in zip(["<", *words], [*words, ">"], strict=True):
                    yield f"pair {former} {later}"
                yield f"length {min(len(words), 40) // 3}"
                if self._settings.letters:
                    joined = f" {' '.join(words)} "
                    for width in _LETTERS:
                        for begin in range(len(joined) - width + 1):
                            yield joined[begin : begin + width]


def _ends(words: list[str], room: int) -> list[str]:
    """At most `room` words, half of them from the start and half from the end."""
    if len(words) <= room:
        return words
    return words[: room - room // 2] + words[len(words) - room // 2 :]
