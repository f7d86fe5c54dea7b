"""Records and names that cross rooms. Frozen, plain, and free of torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NewType

TrialId = NewType("TrialId", str)
OutputsKind = Literal["logits", "probabilities"]  # what a base model ends with
Placement = Literal["inline", "overlapped"]
TrialStatus = Literal["trained", "skipped", "failed", "replaced"]

BASE = "base"  # exit of a request that ran the whole network
RECALL = "recall"  # exit of an answer from memory
OTHER_EXITS = (BASE, RECALL)  # those that are at no block

NAME_RULE = "letters, digits and . _ -, beginning with a letter or digit, at most 128 characters"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


def is_name(text: str) -> bool:
    """Whether a model, version, composition or pipeline may be called so: it may stand in a path or URL.

    `NAME_RULE` says the same in words.
    """
    return _NAME.fullmatch(text) is not None


def name_like(text: str, longest: int = 128) -> str:
    """A valid name that resembles `text`, of at most `longest` characters."""
    return _NOT_IN_NAMES.sub("-", text).lstrip("._-")[:longest] or "model"


def why_no_exits(blocks: Iterable[str]) -> str | None:
    """Why no exits can be at all of these blocks: exits of other answers are called like one of them."""
    for name in blocks:
        if name in OTHER_EXITS:
            return (
                f"no exit can be at block '{name}': that name is for answers of the whole network, or from "
                "memory; explore with other --blocks"
            )
    return None


@dataclass(frozen=True)
class BlockProfile:
    """One block of the base model as measured at batch size 1.

    `latency_ms` is the block's own time (the paper's L_i); `reach_ms` the time from the start of a
    request to the end of this block, so everything before the first block is in it too.
    """

    index: int
    name: str
    kind: str
    output_shape: tuple[int, ...]  # without the batch dimension
    latency_ms: float
    reach_ms: float


@dataclass(frozen=True)
class Trial:
    """One variant at one block: one row of `trials.csv`.

    `lookup_ms` is the paper's T_ij for an inline lookup, `overlapped_lookup_ms` the time from hand-over
    to answer in parallel with the base model; `overlapped_penalty_ms` what that costs the base model.
    `agreement` counts all select inputs, hit or not. Unmeasured values are None.
    """

    trial_id: TrialId
    block_index: int
    block: str
    variant: str
    status: TrialStatus
    reason: str = ""
    selector: str = ""
    parameters: int = 0
    memory_bytes: int = 0
    lookup_ms: float | None = None
    overlapped_lookup_ms: float | None = None
    overlapped_penalty_ms: float | None = None
    images_seen: int = 0
    loss: float | None = None
    agreement: float | None = None
    hit_rate_at_97: float | None = None
    hit_rate_at_99: float | None = None

    def saves_time(self, profile: Profile) -> bool:
        """Whether a hit of an inline lookup ends before the network would, by the latencies of `profile`."""
        reach_ms = next(block.reach_ms for block in profile.blocks if block.index == self.block_index)
        return self.lookup_ms is not None and reach_ms + self.lookup_ms < profile.base_ms


@dataclass(frozen=True)
class OperatingPoint:
    """One threshold of one trial: one row of `operating_points.csv` (select split)."""

    trial_id: TrialId
    threshold: float
    hit_rate: float  # share of inputs with score >= threshold
    accuracy: float  # agreement with the base model among those; 1.0 where nothing hits


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What latencies depend on besides the network: processor, number of threads, versions of the software.

    A name is empty if an older Gati measured them, which did not store it.
    """

    processor: str
    threads: int
    software: str


@dataclass(frozen=True)
class Profile:
    """Latencies of the base model on one backend, as measured when the library was written."""

    backend: str
    device: str
    threads: int
    base_ms: float  # the whole network, one request
    blocks: tuple[BlockProfile, ...] = field(default_factory=tuple)
    disturbance: str = ""  # why these may be wrong: what else the machine did meanwhile
    processor: str = ""  # the name of the CPU or GPU; an older Gati did not store it
    # The packages that run networks, with versions; an older Gati did not store them, and ledgers know
    # profiles by their `repr`.
    software: str = field(default="", repr=False)
    lookup_cores: int = field(default=1, repr=False)  # those reserved for overlapped lookups

    @property
    def conditions(self) -> Conditions:
        """What these latencies depend on besides the network."""
        return Conditions(processor=self.processor, threads=self.threads, software=self.software)
