"""Settings of an inference process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from gati.cores import core_count
from services.invalid import Name
from services.model_settings import ModelSettings
from services.process import ProcessSettings


class InferenceSettings(ModelSettings, ProcessSettings):
    """Settings of one model; `gati serve` fills them from its configuration."""

    name: Name
    # Whether the configuration gives `threads`; else they are this process's part of the cores.
    threads_given: bool | None = None  # default: they are given if they are set here
    drain_timeout_s: float = Field(default=10.0, ge=0.0)
    records_max_age_s: float = Field(default=3600.0, gt=0.0)
    stuck_timeout_s: float = Field(default=120.0, gt=0.0)  # an input that takes longer: the engine hangs
    poll_s: float = Field(default=2.0, gt=0.0)
    replica: int = Field(default=0, ge=0)  # number of this service among the replicas of its model
    replicas: int = Field(default=1, ge=1)  # most that there may be; they share the error of their proofs
    pausing: Path | None = None  # by which it pauses the adaptation process, see `services.pausing`
    cores: tuple[int, ...] | None = None  # for engines that reserve some of them for lookups; default: all

    @field_validator("size", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:
        """Accept the two numbers that settings of earlier versions have."""
        return "x".join(map(str, value)) if isinstance(value, list | tuple) else value

    @property
    def thread_count(self) -> int:
        """The number of threads of the process: `threads`, by default one for each core it may use."""
        return self.threads or core_count()

    @property
    def most_inputs(self) -> int:
        """Number of inputs that a request may have: `largest_batch`, but no more than may wait."""
        return min(self.largest_batch, self.queue_capacity)

    @property
    def keeps_threads(self) -> bool:
        """Whether requests run on `thread_count` threads, whatever a composition was measured with."""
        return self.threads is not None if self.threads_given is None else self.threads_given

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
