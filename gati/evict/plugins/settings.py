"""Settings of plug-ins from the environment, because engines create policies without options."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gati.errors import EvictError
from gati.evict.live import LiveCacheSettings
from gati.evict.plugins.books import EngineBooks

VARIABLE = "GATI_EVICT_CONFIG"
HINT = "gati_continue"  # a parameter of requests: the probability that the conversation continues
_KINDS: dict[str, type] = {
    "policy": str,
    "predictor": str,
    "seed": int,
    "blocks": int,
    "service": str,
    "gap_s": float,
    "cost_growth": float,
}


@dataclass(frozen=True)
class PluginSettings(LiveCacheSettings):
    """The settings of a plug-in.

    `blocks` is the capacity, for engines that do not report it; by default, it is the number of blocks held
    when the engine first needs room.
    """

    blocks: int | None = None

    def books(self, capacity: int, *, flat: bool = False) -> EngineBooks:
        """The index of a cache of `capacity` blocks, in a prefix tree or independent.

        With a `service`, close it when the engine's cache is reset. Raises EvictError for what cannot work.
        """
        books = EngineBooks(self.make_policy(capacity, flat=flat))
        books.link = self.link(books)
        return books


def plugin_settings(environment: Mapping[str, str] = os.environ) -> PluginSettings:
    """Read `GATI_EVICT_CONFIG`: a JSON object, or the path of a file with one; defaults if unset.

        GATI_EVICT_CONFIG='{"policy": "gati", "predictor": "reuse"}'

    Raises EvictError for anything else.
    """
    text = environment.get(VARIABLE, "").strip()
    if not text:
        return PluginSettings()
    try:
        if not text.startswith("{"):
            text = Path(text).read_text(encoding="utf-8")
        given = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise EvictError(
            f"{VARIABLE} is neither a JSON object nor the path of a file with one: {error}"
        ) from error
    return _checked(given)


def _checked(given: Any) -> PluginSettings:
    names = ", ".join(_KINDS)
    if not isinstance(given, dict):
        raise EvictError(f"{VARIABLE} must hold a JSON object with {names}, not {given!r}")
    for name, value in given.items():
        if name not in _KINDS:
            raise EvictError(f"{VARIABLE}: unknown setting {name!r}; the settings are {names}")
        kind = _KINDS[name]
        if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool):
            raise EvictError(f"{VARIABLE}: {name} must be a {kind.__name__}, not {value!r}")
    settings = PluginSettings(**given)
    if settings.blocks is not None and settings.blocks < 1:
        raise EvictError(f"{VARIABLE}: blocks is {settings.blocks}; give at least 1")
    try:
        settings.maker()  # what cannot work fails when the engine starts
    except EvictError as error:
        raise EvictError(f"{VARIABLE}: {error}") from error
    return settings
