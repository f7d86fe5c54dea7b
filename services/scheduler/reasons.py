"""Reasons as clients may see them."""

from __future__ import annotations

import re

_FOLDERS = re.compile(r"(?:/[\w.@+ -]+)+/")  # the folders of paths in messages, which clients must not see


def without_folders(message: str) -> str:
    """Return a message for clients, without file paths of this machine."""
    return _FOLDERS.sub("", message) if "/" in message else message
