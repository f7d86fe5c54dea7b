"""Versions of retrained caches: plain files, opened as an engine that can take the old one's place.

    composition.json            the exits, thresholds, certificate
    caches/TRIAL.safetensors    weights of predictor and selector, as in the cache library
    graphs/                     converted networks, on backends that compile graphs

The base model is the library's. A version is whole or not there: it is written next to its place, then
renamed.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from gati.caches import LearnedCache, save_cache
from gati.composition.composition import Composition
from gati.composition.load import OpenedModel, Served
from gati.engine.backends import GraphBackend, get_backend
from gati.engine.exits import EngineExit
from gati.engine.graph.convert import Converter
from gati.errors import AdaptError, StorageError
from gati.files import atomic_write_bytes

__all__ = ["Graphs", "open_version", "save_version"]

_COMPOSITION = "composition.json"


class Graphs:
    """Makes graphs of one network with exits at some of `blocks`, converting its pieces only once.

    Converting ResNet-56 takes 10 to 15 seconds, each lookup about one: keep this from version to version.
    Cuts at blocks without an exit cost nothing once the graph is compiled.
    """

    def __init__(self, blocks: Collection[str]) -> None:
        self._blocks = set(blocks)
        self._convert = Converter()

    def write(
        self, path: Path, backend: GraphBackend, model: OpenedModel, exits: Sequence[EngineExit]
    ) -> None:
        """Write the network of `model` with these exits to `path`, where its backend finds it."""
        self._blocks.update(leaving.block for leaving in exits)
        (graph,) = backend.assembled(
            model.traced, [exits], model.outputs_kind, convert=self._convert, cuts=self._blocks
        )
        self._convert.forget_lookups()
        atomic_write_bytes(path, graph)


def save_version(
    folder: str | Path,
    composition: Composition,
    exits: Sequence[EngineExit],
) -> Path:
    """Write a version to `folder`, which must not be there yet.

    `composition.exits` and `exits` belong together one by one, as `Retrained` has them. Raises AdaptError for
    a folder that is there or exits without weights, StorageError when the place is full or not writable.
    """
    target = Path(folder)
    if target.exists():
        raise AdaptError(f"there is a version in {target} already; give every version a folder of its own")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error.strerror or error}") from error
    try:
        for described, leaving in zip(composition.exits, exits, strict=True):
            if not isinstance(leaving.cache, LearnedCache):
                raise AdaptError(
                    f"the cache at block '{leaving.block}' is no learned cache: it cannot be kept"
                )
            save_cache(beside / "caches" / f"{described.trial_id}.safetensors", leaving.cache)
        composition.save(beside / _COMPOSITION)
        beside.chmod(0o755)
        beside.rename(target)
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target


def open_version(served: Served, folder: str | Path, *, graphs: Graphs | None = None) -> Served:
    """Open a version in addition to the one that serves: the base model is shared, `served` is unchanged.

    `graphs`, kept by the caller, makes that faster on backends that compile graphs.

    Raises:
        CompositionError: no version there, or one of another base model.
        LibraryError: its caches are missing or damaged.
    """
    place = Path(folder)
    composition = Composition.load(place / _COMPOSITION)
    exits = served.model.exits(composition, place / "caches")
    backend = get_backend(composition.backend)
    kept = place / "graphs" / f"{composition.backend}.onnx"
    if graphs is not None and isinstance(backend, GraphBackend) and not kept.is_file():
        graphs.write(kept, backend, served.model, exits)
    kept_base = kept.with_name(f"{composition.backend}-base.onnx")
    engine = served.model.engine_of(exits, composition.name, composition.backend, (kept, kept_base))
    return replace(served, engine=engine, composition=composition)
