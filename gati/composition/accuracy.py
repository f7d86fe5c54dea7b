"""The loss of true accuracy through early answers, measured where there are labels."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gati.composition.binomial import rate_upper_bound
from gati.composition.copies import counted

if TYPE_CHECKING:
    from jaxtyping import Int


@dataclass(frozen=True, kw_only=True)
class AccuracyDrop:
    """How many labelled inputs lose the right answer by leaving early, and an upper bound on their share.

    The bound is on the share of inputs that the base model has right and Gati wrong. Accuracy drops by no
    more than that, and usually by less, because some inputs are corrected. It holds with the confidence on
    its own: together with an agreement certified on the same inputs, the probabilities of error add up.
    """

    n: int
    became_wrong: int
    became_right: int
    upper_bound: float
    confidence: float

    def sentence(self) -> str:
        """Return the bound as one plain sentence."""
        return (
            f"On its own, with {100.0 * self.confidence:g} % confidence early answers cost at most "
            f"{100.0 * self.upper_bound:.2f} points of accuracy: of {self.n} labelled inputs "
            f"{self.became_wrong} became wrong and {self.became_right} right."
        )

    def to_json(self) -> dict[str, Any]:
        """Return the bound as strict JSON values."""
        return {**asdict(self), "sentence": self.sentence()}


def accuracy_drop(
    answer: Int[NDArray[np.int64], " n"],
    base_class: Int[NDArray[np.int64], " n"],
    label: Int[NDArray[np.int64], " n"],
    delta: float,
    *,
    settings: int = 1,
    copies: Int[NDArray[np.int64], " n"] | None = None,
    share: float = 1.0,
) -> AccuracyDrop:
    """Bound the drop of true accuracy with confidence 1 - `delta`.

    `settings` is how many compositions were candidates on these inputs: each gets an equal part of `share` of
    `delta` (Bonferroni), so that the bound still holds for the one chosen. `copies` is how many inputs each
    stands for; those that became wrong count as often (see `gati.composition.copies`).
    """
    became_wrong = (base_class == label) & (answer != label)
    became_right = int(((base_class != label) & (answer == label)).sum())
    rows = counted(became_wrong, np.ones(len(label), dtype=np.int64) if copies is None else copies)
    spoiled = int(became_wrong[rows].sum())
    bound = rate_upper_bound(spoiled, len(rows), share * delta / max(1, settings))
    return AccuracyDrop(
        n=len(rows),
        became_wrong=spoiled,
        became_right=became_right,
        upper_bound=bound,
        confidence=1.0 - delta,
    )
