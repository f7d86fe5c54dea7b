"""Checksums of a model's files, kept by name in its document, which is written last.

If a model is replaced while it is read, or if that is interrupted, some files are new and others old. The
document shows which files belong together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


def checksum(content: bytes) -> str:
    """The SHA-256 of a file's content, as hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def check_content(name: str, content: bytes, checksums: Mapping[str, str]) -> None:
    """Raises ValueError if the file is another one; documents of older versions of Gati have no checksum."""
    if name in checksums and checksum(content) != checksums[name]:
        raise ValueError(f"{name} is of another model: it is being replaced, or that was interrupted")
