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
    device: str | None = None  # the one the library was measured on unless given; cpu for a plain model
    threads: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1)
    workers: int | None = Field(default=None, ge=1)
    queue_capacity: int = Field(default=128, ge=1)
    largest_batch: int = Field(default=64, ge=1)
    drain_timeout_s: float = Field(default=10.0, ge=0.0)
    audit_budget: float = Field(default=0.05, ge=0.0, le=1.0)  # of base-model time; 0 switches the guard off
    trials: float = Field(default=0.2, gt=0.0, le=1.0)  # share of requests tried on unproven caches
    memory: bool = True  # requests that name a place may be answered from memory
    places: int = Field(default=64, ge=1)  # that memory keeps apart
    unguarded: bool = False  # without a guard, caches that nothing is proven of answer, too
    state: Path | None = None  # folder where it is kept how versions stand; LIBRARY/standing unless given
    records: str | None = None  # URL of the record store for samples
    sampling: float = Field(default=0.2, ge=0.0, le=1.0)  # share of requests kept there
    repository: str | None = None  # URL of the model repository; its active version is followed
    most_versions: int = Field(default=8, ge=2)  # loaded at a time
    records_max_age_s: float = Field(default=3600.0, gt=0.0)
    records_limit_bytes: int = Field(default=2**30, ge=1)
    stuck_timeout_s: float = Field(default=120.0, gt=0.0)  # no input takes so long: the engine hangs
    poll_s: float = Field(default=2.0, gt=0.0)
    spare: bool = False  # who starts it keeps another process that waits to take over
    replica: int = Field(default=0, ge=0)  # its number, of the services of one model
    replicas: int = Field(default=1, ge=1)  # that there may be; they share the error of their proofs

    @property
    def label(self) -> str:
        """The name of this replica, for files and logs; no model has a name with an @."""
        return self.name if self.replica == 0 else f"{self.name}@{self.replica}"

    @property
    def state_folder(self) -> Path | None:
        """Where it is kept how versions stand, and which are loaded; None for in memory."""
        if self.state is None and self.library is not None:
            return self.library / "standing"
        return self.state


def device_of(settings: InferenceSettings) -> str:
    """The device on which the model of these settings runs; cpu if its library is on other machines only."""
    if settings.device is not None or settings.library is None:
        return settings.device or "cpu"
    from gati.exploration.library import Library

    if not settings.library.is_dir():
        return "cpu"
    return Library.open(settings.library).manifest.profile.device
