"""One of the ways to deploy the caches of a version."""

from __future__ import annotations

from typing import NamedTuple

from gati.composition.composition import Composition
from gati.engine.exits import EngineExit


class Setting(NamedTuple):
    """One way to deploy a version's caches: a composition with its exits, one by one."""

    composition: Composition
    exits: tuple[EngineExit, ...]
