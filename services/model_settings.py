"""Settings of a model that the configuration of `gati serve` passes on to the process of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from gati.cores import MOST_THREADS
from services.invalid import Name, matching

_Size = Annotated[str, matching(r"\d+x\d+", "HEIGHTxWIDTH, such as 224x224")]


class ModelSettings(BaseModel):
    """What is served, and how: the same in the configuration and in the process."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    library: Path | None = None
    model: str | None = None  # a plain model, instead of a library
    checkpoint: Path | None = None
    size: _Size | None = None  # of a plain model's inputs
    composition: Name | None = "default"
    device: str | None = None  # default: the one the library was measured on; cpu for a plain model
    # default: all cores, divided by the number of replicas
    threads: int | None = Field(default=None, ge=1, le=MOST_THREADS)
    workers: int | None = Field(default=None, ge=1)
    queue_capacity: int = Field(default=128, ge=1)
    largest_batch: int = Field(default=64, ge=1)
    # Audits may take this share of the base model's time. 0 switches the guard off: certified caches then
    # answer unwatched, and other caches never answer, because nothing can prove them.
    audit_budget: float = Field(default=0.05, ge=0.0, le=1.0)
    trials: float = Field(default=0.2, gt=0.0, le=1.0)  # share of requests on which unproven caches are tried
    proof_s: float = Field(default=10.0, ge=0.0)  # least duration of their proofs, so that requests differ
    memory: bool = True  # requests that name a `place` may be answered from memory, once that is proven
    places: int = Field(default=64, ge=1)  # in memory; beyond them, the least recently used is dropped
    unguarded: bool = False  # with audit_budget = 0: unproven caches answer, too; nothing is promised
    # Folder for the proofs and evidence of versions, and the list of loaded ones; default: LIBRARY/standing.
    state: Path | None = None
    records: str | None = None  # URL of the record store for samples; sqlite:///FILE or postgresql://...
    sampling: float = Field(default=0.2, ge=0.0, le=1.0)  # share of requests stored there
    records_limit_bytes: int = Field(default=2**30, ge=1)  # of the record store; the oldest are deleted
    repository: str | None = None  # folder or URL of the model repository; its active version serves
    most_versions: int = Field(default=8, ge=2)  # loaded at the same time
    # Each replica has a second process that has imported everything: to take over, it only loads the model.
    spare: bool = False

    @property
    def height_and_width(self) -> tuple[int, int] | None:
        """`size` as numbers."""
        if self.size is None:
            return None
        height, _, width = self.size.partition("x")
        return int(height), int(width)
