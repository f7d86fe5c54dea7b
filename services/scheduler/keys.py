"""API keys: their names, rights and quotas.

The server has one key for all clients or, in a TOML file, one key for each client:

    [keys.camera-7]
    sha256 = "..."                # of the key: printf %s KEY | sha256sum; or `key`, the key itself
    rights = ["infer", "read"]    # the default; there is also "manage"
    requests_per_second = 20      # this and the two below are unlimited by default
    bytes_per_second = 2_000_000
    in_flight = 4

The key for all clients cannot manage if others can reach the server or a management key is set: then use that
key, or give a key in the file the right `manage`.

The file is read again on SIGHUP. If it is invalid then, the keys stay as they were, and the log says why.
"""

from __future__ import annotations

import hashlib
import logging
import tomllib
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from gati.errors import ConfigError, first_line
from gati.hosts import is_loopback
from gati.types import NAME_RULE, is_name
from services.config import ServeConfig
from services.invalid import checked_key, first_invalid, matching
from services.scheduler.quotas import Quota

_log = logging.getLogger("gati.keys")

Right = Literal["infer", "read", "manage"]
_Sha256 = Annotated[str, matching("[0-9a-fA-F]{64}", "64 hexadecimal digits, as sha256sum prints")]
_ClientKey = Annotated[
    str, StringConstraints(strip_whitespace=True, min_length=8), AfterValidator(checked_key)
]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    key: _ClientKey | None = Field(default=None, repr=False)
    sha256: _Sha256 | None = None
    rights: frozenset[Right] = frozenset(("infer", "read"))
    requests_per_second: float | None = Field(default=None, gt=0.0)
    bytes_per_second: float | None = Field(default=None, gt=0.0)
    in_flight: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("give exactly one of `key` and `sha256`")
        return self

    @property
    def digest(self) -> str:
        return self.sha256.lower() if self.sha256 is not None else _digest(self.key or "")


class Key:
    """One key: its name, its rights, and its quota."""

    def __init__(self, name: str, rights: frozenset[Right], quota: Quota) -> None:
        self.name = name
        self.rights = rights
        self.quota = quota


class KeyRing:
    """All keys of a server.

    `find` looks up a digest, so the time it takes does not reveal how much of a wrong key matches.
    """

    def __init__(self, config: ServeConfig) -> None:
        """Raises `ConfigError` for an invalid file."""
        self._config = config
        self._keys: dict[str, Key] = {}
        self._keys = self._read()

    @property
    def asks(self) -> bool:
        """Whether a key is required for inference and reading."""
        return self._config.api_key is not None or self._config.keys_file is not None

    @property
    def guards_management(self) -> bool:
        """Whether a key is required for management."""
        return self.asks or self._config.management_key is not None

    @property
    def manages(self) -> bool:
        """Whether anyone may manage: without a key if none is required, otherwise if a key has that right."""
        return not self.guards_management or any("manage" in key.rights for key in self._keys.values())

    def find(self, given: str) -> Key | None:
        """The key with this text, or None."""
        return self._keys.get(_digest(given)) if given else None

    def reload(self) -> None:
        """Read the file again; keys whose names remain keep their quotas."""
        try:
            self._keys = self._read()
        except ConfigError as error:
            _log.error("invalid keys file; the keys stay as they were", extra={"reason": str(error)})
            return
        _log.info("keys read", extra={"names": sorted(key.name for key in self._keys.values())})

    def _read(self) -> dict[str, Key]:
        found: dict[str, Key] = {}
        config = self._config
        trusted = is_loopback(config.host) and config.management_key is None
        own = [("api", config.api_key, _ALL if trusted else _OWN)]
        own.append(("management", config.management_key, frozenset(("manage",))))
        for name, text, rights in own:
            if text is not None:
                known = found.get(digest := _digest(text))  # one text may be both keys
                more = known.rights if known is not None else frozenset()
                found[digest] = Key(name, rights | more, Quota())
        before = {key.name: key.quota for key in self._keys.values()}
        entries = _entries(config.keys_file)
        for name, entry in entries.items():
            if entry.digest in found:
                raise ConfigError(
                    f"{config.keys_file}: '{name}' has the same key as another name; give each its own"
                )
            found[entry.digest] = Key(name, entry.rights, before.get(name, Quota()))
        for entry in entries.values():  # now that the whole file is known to be valid
            quota = found[entry.digest].quota
            quota.limit(entry.requests_per_second, entry.bytes_per_second, entry.in_flight)
        return found


_OWN: frozenset[Right] = frozenset(("infer", "read"))
_ALL: frozenset[Right] = frozenset(("infer", "read", "manage"))


def _entries(file: Path | None) -> dict[str, _Entry]:
    if file is None:
        return {}
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file}: not readable as TOML ({first_line(error)}); correct it") from error
    tables = document.get("keys")
    if not isinstance(tables, dict) or not tables or document.keys() != {"keys"}:
        raise ConfigError(f"{file}: it must have a table [keys.NAME] for each key and nothing else")
    found = {}
    for name, table in tables.items():
        if not is_name(name):
            raise ConfigError(f"{file}: {name!r} cannot be a name; use {NAME_RULE}")
        try:
            found[name] = _Entry.model_validate(table)
        except ValidationError as error:
            invalid = first_invalid(error.errors(include_input=False))
            where = ".".join(map(str, ("keys", name, *invalid.place)))
            raise ConfigError(f"{file}: {where}: {invalid.reason}") from None
    return found


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
