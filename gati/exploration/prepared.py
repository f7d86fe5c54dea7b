"""What is known before training: the network, its inputs and answers, and what measuring will take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from gati.caches import reads_input
from gati.exploration.augment import Augmentation
from gati.exploration.candidates import Specification
from gati.exploration.library import NetworkProbe
from gati.exploration.splits import Inputs
from gati.model.load import LoadedModel
from gati.model.segments import TracedModel
from gati.types import OutputsKind, Profile

KEPT_PICTURES_BYTES = 1 << 30  # of decoded training images


class HeldOut(NamedTuple):
    """The base model's class of every held-out input, int64 [n]."""

    base_class: npt.NDArray[np.int64]
    outputs_kind: OutputsKind
    classes: int


class MeasuringTimes(NamedTuple):
    """Seconds of each kind of measurement, estimated to reserve time at the end of a budget."""

    held_out_s: float  # all held-out inputs through the base model
    selector_s: float  # choosing one trial's selector
    lookup_s: float  # the costs of one lookup, inline and overlapped

    def of_all(self, items: Sequence[Specification], lookups: int, base_ms: float) -> tuple[float, float]:
        """Seconds to measure the trials `items` and `lookups` different lookups, and those that are certain.

        The network, which takes `base_ms`, runs on all held-out inputs only for exits. It does so for each
        group of them, but all groups except the last end within the time of training.
        """
        network = any(not reads_input(item.trial.variant) for item in items)
        passes = network + sum(item.trial.lookup_ms or 0.0 for item in items) / base_ms
        certain_s = passes * self.held_out_s + len(items) * self.selector_s
        return certain_s + passes * 0.5 * self.held_out_s + lookups * self.lookup_s, certain_s


@dataclass(frozen=True)
class Prepared:
    """What all training shares."""

    module: nn.Module  # the base model
    traced: TracedModel
    inputs: Inputs
    held_out: HeldOut
    profile: Profile
    specifications: tuple[Specification, ...]
    augmentation: Augmentation
    bold_augmentation: Augmentation  # where inputs are scarce: stronger changes teach more slowly
    device: torch.device
    expected: MeasuringTimes

    @property
    def answer_s(self) -> float:
        """Seconds in which the base model answers an input of a batch."""
        return self.expected.held_out_s / len(self.inputs.held_out)


@dataclass(frozen=True)
class PreparedModel(Prepared):
    """What `gati.exploration.prepare` returns for a network that was just loaded, with names and labels."""

    loaded: LoadedModel
    class_names: tuple[str, ...] | None
    labels: npt.NDArray[np.int64] | None  # the network's class numbers of the held-out inputs
    probe: NetworkProbe
