"""The loss of true accuracy through early answers, measured on labelled inputs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gati.composition.binomial import rate_upper_bound
from gati.composition.copies import counted
from gati.model.identity import CopyCounts
from gati.units import at_most

if TYPE_CHECKING:
    from jaxtyping import Int


@dataclass(frozen=True, kw_only=True)
class AccuracyDrop:
    """How many labelled inputs get a wrong answer by leaving early, and an upper bound on their share.

    The bound is on the share of inputs that the base model answers correctly and Gati does not. Accuracy
    drops by at most that, and usually by less, because some inputs are corrected. The confidence is that of
    this bound alone: if an agreement is certified on the same inputs, the error probabilities add up.
    """

    n: int
    became_wrong: int
    became_right: int
    upper_bound: float
    confidence: float

    def sentence(self) -> str:
        """Return the bound as one plain sentence."""
        return (
            f"As a separate statement, with {100.0 * self.confidence:g} % confidence early answers cost "
            f"at most {at_most(self.upper_bound)} points of accuracy: of {self.n} labelled inputs "
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
    copies: CopyCounts | None = None,
    share: float = 1.0,
) -> AccuracyDrop:
    """Bound the drop of true accuracy with confidence 1 - `delta`.

    `settings` is the number of compositions that were candidates on these inputs: each gets an equal part of
    `share` of `delta` (Bonferroni), so that the bound holds for the chosen one. `copies` says how often each
    input counts, an input that became wrong as one whose answer differs (see `gati.composition.copies`).
    """
    became_wrong = (base_class == label) & (answer != label)
    became_right = int(((base_class != label) & (answer == label)).sum())
    rows = counted(became_wrong, *(CopyCounts.once(len(label)) if copies is None else copies))
    losses = int(became_wrong[rows].sum())
    bound = rate_upper_bound(losses, len(rows), share * delta / max(1, settings))
    return AccuracyDrop(
        n=len(rows),
        became_wrong=losses,
        became_right=became_right,
        upper_bound=bound,
        confidence=1.0 - delta,
    )
