"""Settings of an adaptation process."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from services.config import AdaptationConfig
from services.process import ProcessSettings


class AdaptedModel(BaseModel):
    """One model: its library, where its samples are, and where its versions go."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    library: Path
    composition: str
    records: str
    repository: str
    share: float = Field(default=1.0, gt=0.0)  # of the processor time, relative to the other models'


class AdaptationSettings(AdaptationConfig, ProcessSettings):
    """Settings of the process; `gati serve` fills them from its configuration."""

    models: tuple[AdaptedModel, ...]
    threads: int = Field(default=1, ge=1)
    pausing: Path | None = None  # by which inference processes pause it, see `services.pausing`
