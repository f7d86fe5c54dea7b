"""Reads what `gati serve` is given: a TOML file, a pipeline file, a cache library, or a folder of these."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gati.errors import ConfigError
from gati.files import lasting_source

_PATHS = (
    "library",
    "checkpoint",
    "file",
    "state",
    "secret_file",
    "authority",
    "keys_file",
    "certificate",
    "certificate_key",
)
_SQLITE_FILE = re.compile(r"(sqlite(?:\+\w+)?:///)(?!/|:memory:|file:)([^?]+)(.*)", re.DOTALL)


def read_target(target: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings that `target` gives, not checked yet, and the origin of each by its name.

    Paths in a file are relative to it, and resolved here.

    **Raises:** `ConfigError`, one line, if it cannot be read or is nothing that can be served.
    """
    if os.path.isdir(target):  # Path.is_dir raises where this user may not look
        return _from_folder(target)
    document = _toml(target)
    if "stages" in document:
        return _origins({"pipelines": {_pipeline_name(document, target): {"file": target}}}, str(target))
    for table in ("models", "pipelines"):
        entries = document.get(table, {})
        if not isinstance(entries, dict):
            raise ConfigError(
                f"{target}: '{table}' must be a table with a name for each entry; write [{table}.NAME]"
            )
        for entry in entries.values():
            _resolve(entry, target.parent)
    for entry in document.get("models", {}).values():
        _resolve_sources(entry, target.parent.resolve())
    _resolve(document, target.parent)
    return _origins(document, str(target))


def _from_folder(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    if os.access(folder, os.X_OK) and (folder / "manifest.json").is_file():
        return _origins({"models": {folder_name(folder): {"library": folder}}}, str(folder))
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ConfigError(f"{folder}: cannot read the folder; check its permissions")
    models = {path.parent.name: {"library": path.parent} for path in sorted(folder.glob("*/manifest.json"))}
    pipelines: dict[str, dict[str, Path]] = {}
    for file in sorted(folder.glob("*.toml")):
        document = _toml(file)
        if "stages" in document:
            name = _pipeline_name(document, file)
            if name in pipelines:
                raise ConfigError(
                    f"{file} and {pipelines[name]['file']} are both called '{name}'; give each its own `name`"
                )
            pipelines[name] = {"file": file}
    if pipelines:
        models = {}  # the pipelines name their libraries and compositions
    if not (models or pipelines):
        raise ConfigError(
            f"{folder} contains no cache library and no pipeline; give the folder that gati explore --out "
            "wrote, or a TOML file"
        )
    return _origins({"models": models, "pipelines": pipelines}, str(folder))


def folder_name(folder: Path) -> str:
    """The name by which a folder is given: of a link its own, as it leads to another folder one day."""
    return os.path.basename(os.path.abspath(folder))


def _pipeline_name(document: Mapping[str, Any], file: Path) -> str:
    """The name of a pipeline. One that is no text is reported when the pipeline is loaded."""
    name = document.get("name")
    return name if isinstance(name, str) else file.stem


def _toml(file: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"no file or folder {file}; give a cache library or a TOML file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file}: not readable as TOML ({error}); correct it") from error
    for name, value in flat(document):
        if isinstance(value, str) and "\0" in value:  # no path can have it
            raise ConfigError(f"{file}: setting '{name}' contains a null character; remove it")
    return document


def _resolve(entry: Any, folder: Path) -> None:
    """Make the paths of a table relative to `folder`."""
    for key in _PATHS:
        if isinstance(entry, dict) and isinstance(entry.get(key), str):
            entry[key] = folder / entry[key]


def _resolve_sources(entry: Any, folder: Path) -> None:
    """Make the names of a model's network, repository and record store absolute, where they are of files."""
    for key, absolute in (
        ("model", lasting_source),
        ("repository", _folder_beside),
        ("records", _store_beside),
    ):
        if isinstance(entry, dict) and isinstance(entry.get(key), str):
            entry[key] = absolute(entry[key], folder)


def _folder_beside(place: str, folder: Path) -> str:
    return place if "://" in place else str(folder / place)


def _store_beside(url: str, folder: Path) -> str:
    """The URL of a record store, with an absolute path if it is that of an SQLite file."""
    found = _SQLITE_FILE.fullmatch(url)
    if found is None:
        return url
    began, file, query = found.groups()
    quoted = str(folder).replace("%", "%25").replace("?", "%3F")  # only the path in the URL is quoted already
    return f"{began}{quoted}/{file}{query}"


def _origins(values: dict[str, Any], origin: str) -> tuple[dict[str, Any], dict[str, str]]:
    return values, {name: origin for name, _ in flat(values)}


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return every value of nested tables, with its name: `port`, `models.NAME.library`."""
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        found += flat(value, f"{name}.") if isinstance(value, Mapping) else [(name, value)]
    return found
