"""The origin of a version of a model, and the manifest that makes a folder of files a version.

The manifest is JSON. It lists every file with size and sha256, and contains its own sha256, so that a
truncated manifest is detected.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gati.documents import DocumentKind, values_of
from gati.errors import AdaptError, RepositoryError
from gati.types import NAME_RULE, is_name

FORMAT = 1

_MANIFEST = DocumentKind(FORMAT, RepositoryError, "the manifest was cut short or changed; publish again")

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+,@()-]{0,199}")  # one part of a path inside a version
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LONGEST_MANIFEST = 16 * 2**20  # bytes


def check_name(name: object) -> str:
    """Returns a valid model name unchanged. Raises AdaptError for names that could leave the repository."""
    if not isinstance(name, str) or not is_name(name):
        raise AdaptError(f"{str(name)[:140]!r} cannot be the name of a model; use {NAME_RULE}")
    return name


def check_file(name: object) -> str:
    """Returns a valid relative path inside a version unchanged. Raises AdaptError otherwise."""
    if not isinstance(name, str) or not all(_FILE.fullmatch(part) for part in name.split("/")):
        raise AdaptError(
            f"a version cannot hold a file called {str(name)[:140]!r}: a relative path of letters, digits "
            "and ._-=+,@() with / between its parts"
        )
    return name


@dataclass(frozen=True)
class SampleWindow:
    """The sampled inputs a version was trained on; times in seconds since 1970."""

    count: int
    from_s: float | None = None
    to_s: float | None = None
    source: str = ""


@dataclass(frozen=True)
class Lineage:
    """The origin of a version.

    `base_checkpoint_sha256` names the base model's weights, which no version ever changes. `measurements` and
    `tags` are JSON values of the publisher: what was measured, and what a version is found again by, such
    as the signature of the scene it was trained for.
    """

    base_checkpoint_sha256: str
    parent: int | None = None
    window: SampleWindow | None = None
    measurements: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _SHA256.fullmatch(self.base_checkpoint_sha256):
            raise AdaptError(
                f"base_checkpoint_sha256 is {self.base_checkpoint_sha256[:70]!r}, must be 64 hex digits"
            )
        if self.parent is not None and self.parent < 1:
            raise AdaptError(f"parent is {self.parent}, must be the number of a version, from 1")


@dataclass(frozen=True)
class StoredFile:
    """Size and digest that a file of a version must have."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Version:
    """A complete version; `created` is in UTC, ISO 8601."""

    model: str
    version: int
    created: str
    lineage: Lineage
    files: Mapping[str, StoredFile]

    def to_json(self) -> bytes:
        """The manifest. Raises AdaptError if the lineage is not JSON."""
        body = {"format": FORMAT, **values_of(self)}
        try:
            return _dump({**body, "sha256": _checksum(body)})
        except (TypeError, ValueError, RecursionError) as problem:
            raise AdaptError(f"a lineage must be JSON without NaN or infinity: {problem}") from problem

    @classmethod
    def from_json(cls, data: bytes, *, where: str) -> Version:
        """Read a manifest; `where` names it in messages.

        **Raises:** `RepositoryError` when it is cut short, changed, or of a newer format.
        """
        with _MANIFEST.reading(where):
            if len(data) > _LONGEST_MANIFEST:
                raise ValueError(f"more than {_LONGEST_MANIFEST} bytes")
            text = data.decode()
        body = _MANIFEST.parse(text, where)
        with _MANIFEST.reading(where):
            if body.pop("sha256") != _checksum(body):
                raise ValueError("its checksum does not match")
        try:
            found = _MANIFEST.record(cls, body, where)
            check_name(found.model)
            for name in found.files:
                check_file(name)
        except AdaptError as problem:
            raise RepositoryError(f"{where}: its manifest is damaged or was changed: {problem}") from problem
        return found


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(_dump(body)).hexdigest()


def _dump(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"
