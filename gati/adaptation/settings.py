"""Settings of an adaptation, and the records of its answers, audits and changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gati.errors import AdaptError
from gati.types import name_like
from gati.variants import SCENE

if TYPE_CHECKING:
    from gati.engine.exits import Prediction
    from gati.guard.watch import State

ChangeKind = Literal[
    "alarm",
    "tightened",
    "loosened",
    "returned",
    "recalling",
    "resting",
    "retraining",
    "kept",
    "activated",
    "reused",
    "failed",
    "resumed",
    "skipped",
    "probation",
]


_LEAST_PART = 35  # samples on either side of any split, of which a retraining needs 20 (`split_window`)


@dataclass(frozen=True)
class AdaptSettings:
    """How an adaptation samples, watches and retrains. Times are seconds on the clock of requests.

    Samples: `sampling` is the share of requests drawn. More are drawn until the first retraining, and while
    far fewer hit than promised, as long as base answers are computed for no more than that share; while the
    caches are stopped, all are. At most `window_inputs` of the last `window_s` are kept, by default 700.
    `audit_budget` is the share of the base model's time spent on audits in addition to samples;
    `audits_to_false_alarm` is the mean number of audits until a false alarm. While the base model answers and
    caches are on probation, the share `probation` of requests is looked up in the background. A proof takes
    at least `proof_s`: what follows within moments is alike.

    Retraining: every `interval_s`, on alarm, and when the hit rate falls below the share `falls_to` of the
    promised one. `accuracy` and `confidence` are the composition's by default; new caches must leave `margin`
    (0..1) of the tolerated disagreement unused: at 0.5, 0.97 becomes 0.985 if there are enough samples.
    `held_share` of the samples is held out to choose settings on. New predictors of `variants` are tried at
    `blocks` (None: three early ones). `scene_tolerance` is the largest distance of a scene from the one a
    version was made for, in units of the network's input. If time is simulated, a new version serves after
    `delay_s`.

    `seed` draws the requests of a replay; a live stream uses the operating system's entropy.

    `recall` answers inputs that look like earlier ones of the same place from memory
    (`gati.adaptation.recall`), of at most `places` at a time; `rest` pauses lookups that cost more than they
    save (`gati.adaptation.rest`). `enabled` False only audits: nothing is learned.
    """

    sampling: float = 0.2
    interval_s: float = 600.0
    window_s: float = 3600.0
    window_inputs: int | None = None
    audit_budget: float = 0.05
    audits_to_false_alarm: float = 10_000.0
    probation: float = 1.0
    proof_s: float = 10.0
    accuracy: float | None = None
    confidence: float | None = None
    margin: float = 0.0
    falls_to: float = 0.5
    held_share: float = 0.25
    blocks: tuple[str, ...] | None = None
    variants: tuple[str, ...] = (SCENE,)
    original_inputs: int = 200
    scene_tolerance: float = 0.25
    recent_inputs: int = 120
    delay_s: float = 0.0
    recall: bool = True
    places: int = 64
    rest: bool = True
    enabled: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("sampling", "audit_budget", "probation"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise AdaptError(f"{name} is {getattr(self, name)!r}, must be above 0 and at most 1")
        for name in ("interval_s", "window_s", "scene_tolerance"):
            if not getattr(self, name) > 0.0:
                raise AdaptError(f"{name} is {getattr(self, name)!r}, must be a number above 0")
        if not 0.0 < self.held_share < 1.0:
            raise AdaptError(f"held_share is {self.held_share!r}, must lie strictly between 0 and 1")
        for name in ("margin", "falls_to"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise AdaptError(f"{name} is {getattr(self, name)!r}, must be from 0 to below 1")
        for name in ("delay_s", "proof_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0.0):
                raise AdaptError(f"{name} is {getattr(self, name)!r}, must be 0 or more seconds")
        for name in ("recent_inputs", "places"):
            if getattr(self, name) < 1:
                raise AdaptError(f"{name} is {getattr(self, name)!r}, must be at least 1")
        least = math.ceil(_LEAST_PART / min(self.held_share, 1.0 - self.held_share))
        if self.window_inputs is not None and self.window_inputs < least:
            raise AdaptError(
                f"window_inputs is {self.window_inputs!r}, must be at least {least} with held_share "
                f"{self.held_share:g}: less is too little to train on or to choose settings on"
            )


class Answered(NamedTuple):
    """The answer to a request, given by one version.

    `hit`: it exited early. `audited`: it is, or will be, compared with the base model's answer; `sampled`: it
    is added to the window. `latency_ms` is the time that the caller waited. `agreed`: True if it is the
    reference's own answer, None if that is not known yet.
    """

    prediction: Prediction
    hit: bool
    audited: bool
    sampled: bool
    latency_ms: float
    version: int
    agreed: bool | None = None


class Audit(NamedTuple):
    """A comparison: request number, the version, its class, and the reference's class.

    `shadow`: the version did not answer the request; this is its would-be answer.
    """

    request: int
    time_s: float
    version: int
    class_index: int
    base_class: int
    exit: str
    shadow: bool = False

    @property
    def agreed(self) -> bool:
        """Whether the classes are the same."""
        return self.class_index == self.base_class


@dataclass(frozen=True)
class Change:
    """A change of the caches, for logs, metrics and pages.

    `alarm`: they stop; `tightened`: a stricter setting answers; `loosened`: a looser one does; `returned`:
    proven again; `recalling`: memory answers from now on; `resting`: lookups that do not pay, or early
    answers whose audits are late, are left out for a while; `retraining`: begins; `probation`: a version is
    looked up in the background until it is proven; `kept`: the old ones stay, `activated` and `reused`:
    others are proven and serve; `skipped`: too little was sampled; `failed`; `resumed`: after a restart.
    `version` is the one that serves after it, 0 the library's own.
    """

    kind: ChangeKind
    time_s: float
    request: int
    version: int
    message: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


OnChange = Callable[[Change], None]
OnAudit = Callable[[Audit], None]


class OnTrial(NamedTuple):
    """A version that does not answer until it is proven, and how far its proof is.

    `needed` audits complete it if all agree. `waits`: another version answers early meanwhile.
    """

    version: int
    audits: int
    losses: int
    needed: int
    waits: bool


class Status(NamedTuple):
    """Counts since the start, and the current state; `hit_rate` covers about the last hundred requests."""

    version: int
    state: State
    requests: int
    hits: int
    recalled: int  # of the hits
    hit_rate: float | None
    audits: int
    losses: int
    left_out: int  # samples and audits skipped for lack of time
    samples: int
    retraining: bool
    proof: str = ""  # progress of the current proof
    promise: float | None = None  # the agreement promised of early answers; None while none are given
    on_trial: OnTrial | None = None
    resting: bool = False  # lookups pause, or early answers, memory's too, until audits have caught up


def model_name(directory: str | Path) -> str:
    """The name of a library's model in a repository: its folder's name, without invalid characters."""
    return name_like(Path(directory).resolve().name)
