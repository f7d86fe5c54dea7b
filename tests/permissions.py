"""Files of another user, also where tests run as root, who may read all of them."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

__all__ = ["close"]


def close(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let this user stat or open nothing in `folder`, as one that only its owner may search or list."""

    def is_inside(path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and folder in Path(os.fspath(path)).parents

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        def refused(path: Any, *arguments: Any, **options: Any) -> Any:
            if is_inside(path):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return function(path, *arguments, **options)

        return refused

    access = os.access

    def accessible(path: Any, mode: int, **options: Any) -> bool:
        own = isinstance(path, str | os.PathLike) and Path(os.fspath(path)) == folder
        return not is_inside(path) and not (own and mode != os.F_OK) and access(path, mode, **options)

    patch.setattr(os, "access", accessible)
    patch.setattr(os, "stat", refusing(os.stat))
    patch.setattr(io, "open", refusing(io.open))
