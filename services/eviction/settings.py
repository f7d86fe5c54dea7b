"""Settings of the process that fits predictors."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from services.process import ProcessSettings


class FitterSettings(ProcessSettings):
    """Settings of the process; `gati evict serve` fills them in.

    `first_fit` and `step` are samples until the first fit and at most between fits; `trial_capacities` how
    long a candidate is tried, in capacities of the caches; `log_bytes` what all access logs may hold.
    """

    folder: Path
    first_fit: int = Field(default=2_500, ge=1)
    step: int = Field(default=20_000, ge=1)
    trial_capacities: float = Field(default=8.0, gt=0.0)
    log_bytes: int = Field(default=2**28, ge=2**16)
    look_every_s: float = Field(default=1.0, gt=0.0)
    niceness: int = Field(default=15, ge=0, le=19)
