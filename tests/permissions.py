"""Files of another user, also where tests run as root, who may read all of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

__all__ = ["close"]


def close(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let this user see nothing in `folder`, as one that only its owner may search."""
    stat = os.stat

    def refused(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if isinstance(path, str | os.PathLike) and folder in Path(os.fspath(path)).parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *arguments, **options)

    patch.setattr(os, "stat", refused)
