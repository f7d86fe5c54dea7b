"""Settings of the process that fits predictors."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from services.process import ProcessSettings


class FitterSettings(ProcessSettings):
    """Settings of the process; `gati evict serve` fills them in.

    `first_fit` is the number of samples before the first fit, and `step` the largest number between fits.
    `trial_capacities` is the length of a candidate's trial, in capacities of the caches, and `log_bytes` the
    largest size of all access logs together.
    """

    folder: Path
    first_fit: int = Field(default=2_500, ge=1)
    step: int = Field(default=20_000, ge=1)
    trial_capacities: float = Field(default=8.0, gt=0.0)
    log_bytes: int = Field(default=2**28, ge=2**16)
    look_every_s: float = Field(default=1.0, gt=0.0)
    niceness: int = Field(default=15, ge=0, le=19)
