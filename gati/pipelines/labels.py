"""Labels of a stage, from a network's class probabilities.

One explored network can serve several stages: one stage needs groups of classes ("vehicle" or "animal"),
another distinguishes only some classes. Both are the same operation: sum the probabilities of each label's
classes, ignore classes without a label, and return the label with the largest sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gati.errors import DataError, PipelineError


class Labelled(NamedTuple):
    """A stage's answer: a label, and its probability among the stage's labels.

    `confidence`, the largest probability of any class of the network, says how easy the input was: a group of
    classes can be certain while the class is not.
    """

    label: str
    probability: float
    confidence: float


@dataclass(frozen=True)
class LabelMap:
    """Maps a network's outputs to labels of a stage: `labels[i]` sums the classes `columns[i]`."""

    labels: tuple[str, ...]
    columns: tuple[tuple[int, ...], ...]
    classes: int

    @classmethod
    def from_groups(cls, groups: Mapping[str, Sequence[str]], class_names: Sequence[str]) -> LabelMap:
        """Map each label to its classes.

        **Raises:** `PipelineError` for an unknown class, a class with two labels, or a label without classes.
        """
        position = {name: index for index, name in enumerate(class_names)}
        owner: dict[str, str] = {}
        for label, members in groups.items():
            if not members:
                raise PipelineError(f"label '{label}' has no classes; name at least one")
            for member in members:
                if member not in position:
                    known = ", ".join(class_names)
                    raise PipelineError(f"label '{label}': no class '{member}'; the classes are {known}")
                if member in owner:
                    raise PipelineError(
                        f"class '{member}' belongs to '{owner[member]}' and to '{label}'; name it once"
                    )
                owner[member] = label
        columns = tuple(tuple(position[member] for member in members) for members in groups.values())
        return cls(tuple(groups), columns, len(class_names))

    @property
    def by_label(self) -> dict[str, tuple[int, ...]]:
        """Indices of the classes of each label, ascending."""
        return {
            label: tuple(sorted(columns)) for label, columns in zip(self.labels, self.columns, strict=True)
        }

    @cached_property
    def by_class(self) -> npt.NDArray[np.int64]:
        """Index of the label that each class belongs to, int64 [classes]; -1 for none."""
        owner = np.full(self.classes, -1, dtype=np.int64)
        for index, columns in enumerate(self.columns):
            owner[list(columns)] = index
        return owner

    def rows(self, probabilities: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Index of the label of each answer, int64 [n], for probabilities [n, classes]; see `__call__`."""
        sums = np.stack([probabilities[:, list(columns)].sum(axis=1) for columns in self.columns], axis=1)
        best: npt.NDArray[np.int64] = sums.argmax(axis=1)
        return best

    def __call__(self, probabilities: Sequence[float] | npt.NDArray[np.floating]) -> Labelled:
        """The label of one answer, probabilities [classes]. Raises `DataError` for another number of classes.

        Of labels with equal sums, also if all are 0, the first wins.
        """
        values = np.asarray(probabilities, dtype=np.float64)
        if values.shape != (self.classes,):
            raise DataError(
                f"an answer has shape {list(values.shape)} but the pipeline names {self.classes} classes; "
                "correct class_names"
            )
        sums = [float(values[list(columns)].sum()) for columns in self.columns]
        best = int(np.argmax(sums))
        total = sum(sums)
        share = sums[best] / total if total > 0.0 else 1.0 / len(sums)
        return Labelled(self.labels[best], share, float(values.max()))
