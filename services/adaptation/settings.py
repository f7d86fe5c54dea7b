"""What an adaptation process is told when it starts."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["AdaptationSettings", "AdaptedModel"]


class AdaptedModel(BaseModel):
    """One model: its library, where its samples are, and where its versions go."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    library: Path
    composition: str
    records: str
    repository: str


class AdaptationSettings(BaseModel):
    """Settings of the process; `gati serve` fills them from its configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: tuple[AdaptedModel, ...]
    interval_s: float = Field(default=600.0, gt=0.0)
    window_s: float = Field(default=3600.0, gt=0.0)
    window_inputs: int = Field(default=1400, ge=100)
    look_every_s: float = Field(default=5.0, gt=0.0)
    threads: int = Field(default=1, ge=1)
    niceness: int = Field(default=15, ge=0, le=19)
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    end_with_stdin: bool = False
    log_level: str = "info"
