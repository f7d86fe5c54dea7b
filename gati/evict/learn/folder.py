"""The folder that engines share with the service that fits their predictors.

access/ENGINE/00000001.jsonl    requests to engines, append-only, written by `gati.evict.learn.log`
versions/reuse/...              fitted predictors, a `gati.versions` repository
status.json                     what the service has read, fitted and published
lock                            held by the one service that fits
"""

from __future__ import annotations

from pathlib import Path

MODEL = "reuse"  # its name in the repository


def access_of(folder: Path) -> Path:
    """The folder of access logs."""
    return folder / "access"


def versions_of(folder: Path) -> Path:
    """The repository of fitted predictors."""
    return folder / "versions"


def status_of(folder: Path) -> Path:
    """The file with the service's status."""
    return folder / "status.json"


def lock_of(folder: Path) -> Path:
    """The file that the service locks, so that only one fits."""
    return folder / "lock"
