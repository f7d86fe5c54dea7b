"""Settings of an inference process."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field

from gati.types import NAME_PATTERN
from services.process import ProcessSettings


class InferenceSettings(ProcessSettings):
    """Settings of one model; `gati serve` fills them from its configuration."""

    name: str = Field(pattern=NAME_PATTERN)
    library: Path | None = None
    model: str | None = None  # a plain model, instead of a library
    checkpoint: Path | None = None
    size: tuple[int, int] | None = None  # height and width of a plain model's inputs
    composition: str | None = "default"
    device: str | None = None  # default: the one the library was measured on; cpu for a plain model
    threads: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1)
    workers: int | None = Field(default=None, ge=1)
    queue_capacity: int = Field(default=128, ge=1)
    largest_batch: int = Field(default=64, ge=1)
    drain_timeout_s: float = Field(default=10.0, ge=0.0)
    audit_budget: float = Field(default=0.05, ge=0.0, le=1.0)  # of base-model time; 0: no guard
    trials: float = Field(default=0.2, gt=0.0, le=1.0)  # share of requests on which unproven caches are tried
    proof_s: float = Field(default=10.0, ge=0.0)  # least duration of a proof of caches
    memory: bool = True  # requests that name a place may be answered from memory
    places: int = Field(default=64, ge=1)  # in memory; beyond them, the least recently used is dropped
    unguarded: bool = False  # with audit_budget = 0: unproven caches answer, too
    state: Path | None = None  # folder for proofs and evidence of versions; default: LIBRARY/standing
    records: str | None = None  # URL of the record store for samples
    sampling: float = Field(default=0.2, ge=0.0, le=1.0)  # share of requests stored there
    repository: str | None = None  # URL of the model repository; its active version is followed
    most_versions: int = Field(default=8, ge=2)  # loaded at the same time
    records_max_age_s: float = Field(default=3600.0, gt=0.0)
    records_limit_bytes: int = Field(default=2**30, ge=1)
    stuck_timeout_s: float = Field(default=120.0, gt=0.0)  # an input that takes longer: the engine hangs
    poll_s: float = Field(default=2.0, gt=0.0)
    spare: bool = False  # for the supervisor: keep a second process that waits to take over
    replica: int = Field(default=0, ge=0)  # number of this service among the replicas of its model
    replicas: int = Field(default=1, ge=1)  # most that there may be; they share the error of their proofs

    @property
    def label(self) -> str:
        """The name of this replica, for files and logs; names of models contain no @."""
        return self.name if self.replica == 0 else f"{self.name}@{self.replica}"

    @property
    def state_folder(self) -> Path | None:
        """The folder for proofs and evidence of versions and the list of loaded ones; None: in memory."""
        if self.state is None and self.library is not None:
            return self.library / "standing"
        return self.state


def device_of(settings: InferenceSettings) -> str:
    """The device on which the model of these settings runs; cpu if its library is only on other machines."""
    if settings.device is not None or settings.library is None:
        return settings.device or "cpu"
    from gati.exploration.library import Library

    if not settings.library.is_dir():
        return "cpu"
    return Library.open(settings.library).manifest.profile.device
