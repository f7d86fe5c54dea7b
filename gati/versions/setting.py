"""One of the ways to deploy the caches of a version, and where a version keeps its network."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from gati.composition.composition import Composition
from gati.engine.exits import EngineExit


class Setting(NamedTuple):
    """One way to deploy a version's caches: a composition with its exits, one by one."""

    composition: Composition
    exits: tuple[EngineExit, ...]


def graph_in(folder: Path, backend: str) -> Path:
    """The file of the converted network of the version in `folder`, which may not be there."""
    return folder / "graphs" / f"{backend}.onnx"
