"""Reasons as clients may see them."""

from __future__ import annotations

import re

# The folders of paths in messages, which clients must not see; " / " between two texts is none.
_FOLDERS = re.compile(r"(?:/[\w.@+-][\w.@+ -]*)+/")


def without_folders(message: str) -> str:
    """Return a message for clients, without file paths of this machine."""
    return _FOLDERS.sub("", message) if "/" in message else message
