"""Where engines and the service that learns for them meet: one folder.

access/ENGINE/00000001.jsonl    what engines were asked for, append-only, by `gati.evict.learn.log`
versions/reuse/...              fitted predictors, a `gati.versions` repository
status.json                     what the service has read, fitted and published
"""

from __future__ import annotations

from pathlib import Path

MODEL = "reuse"  # its name in the repository


def access_of(folder: Path) -> Path:
    """Where access logs are."""
    return folder / "access"


def versions_of(folder: Path) -> Path:
    """The repository of fitted predictors."""
    return folder / "versions"


def status_of(folder: Path) -> Path:
    """What the service tells of itself."""
    return folder / "status.json"
