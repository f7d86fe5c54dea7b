"""Versions of retrained caches: plain files, opened as an engine that can replace the serving one.

    composition.json            the exits, thresholds, certificate
    settings/N.json             where there are several: each as a composition, from strict to loose
    caches/TRIAL.safetensors    weights of predictor and selector, as in the cache library
    graphs/                     converted networks, on backends that compile graphs

The base model is the library's. Writing a version is atomic: it is written to a temporary folder, then
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
from gati.composition.engines import base_graph_file, graph_backend
from gati.composition.load import Served
from gati.engine.backends import GraphBackend, get_backend
from gati.engine.exits import EngineExit
from gati.engine.graph.convert import Converter
from gati.errors import AdaptError, CompositionError, StorageError
from gati.files import atomic_write_bytes
from gati.versions.setting import Setting, graph_in

_COMPOSITION = "composition.json"
_SETTINGS = "settings"


class Graphs:
    """Makes graphs of one network with exits at some of `blocks`, converting its pieces only once.

    Converting ResNet-56 takes 10 to 15 seconds, each lookup about one: keep this from version to version.
    Cuts at blocks without an exit cost nothing once the graph is compiled.
    """

    def __init__(self, blocks: Collection[str]) -> None:
        self._blocks = set(blocks)
        self._convert = Converter()

    def write(self, path: Path, backend: str, served: Served, exits: Sequence[EngineExit]) -> None:
        """Write the network of `served` with these exits to `path`, for that backend to load.

        Raises as `graph_backend` does: some backends are calibrated on the library's held-out inputs.
        """
        model = served.model
        self._blocks.update(leaving.block for leaving in exits)
        # A new one each time, since a calibrated backend would keep all lookups that it ever quantised.
        (graph,) = graph_backend(served.library, backend).assembled(
            model.traced, [exits], model.outputs_kind, convert=self._convert, cuts=self._blocks
        )
        self._convert.forget_lookups()
        atomic_write_bytes(path, graph)


def save_version(
    folder: str | Path,
    composition: Composition,
    exits: Sequence[EngineExit],
    settings: Sequence[Setting] = (),
) -> Path:
    """Write a version to `folder`, which must not be there yet.

    `composition.exits` and `exits` belong together one by one, as `Retrained` has them. `settings` are ways
    to deploy it, from strict to loose, and share caches by the names of their trials. Raises AdaptError for
    a folder that is there or exits without weights, StorageError when the place is full or not writable.
    """
    target = Path(folder)
    if target.exists():
        raise AdaptError(f"there is a version in {target} already; give every version a folder of its own")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error.strerror or error}") from error
    try:
        for setting in (Setting(composition, tuple(exits)), *settings):
            for described, leaving in zip(setting.composition.exits, setting.exits, strict=True):
                _save_cache(temporary / "caches" / f"{described.trial_id}.safetensors", leaving)
        for number, setting in enumerate(settings, 1):
            (temporary / _SETTINGS).mkdir(exist_ok=True)
            _unbound(setting.composition).save(temporary / _SETTINGS / f"{number}.json")
        _unbound(composition).save(temporary / _COMPOSITION)
        temporary.chmod(0o755)
        temporary.rename(target)
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _unbound(composition: Composition) -> Composition:
    """The composition without digests: caches and network are made anew, and repositories have their own."""
    exits = (replace(leaving, cache_sha256=None) for leaving in composition.exits)
    return replace(composition, exits=tuple(exits), graph_sha256=None)


def _save_cache(path: Path, leaving: EngineExit) -> None:
    if not isinstance(leaving.cache, LearnedCache):
        raise AdaptError(
            f"the cache at block '{leaving.block}' is not a learned cache, so it cannot be stored"
        )
    if not path.exists():
        save_cache(path, leaving.cache)


def open_version(served: Served, folder: str | Path, *, graphs: Graphs | None = None) -> Served:
    """Open a version in addition to the one that serves: the base model is shared, `served` is unchanged.

    `graphs`, kept by the caller, makes that faster on backends that compile graphs.

    Raises:
        CompositionError: no version there, or one of another base model or backend.
        LibraryError: its caches are missing or damaged.
    """
    place = Path(folder)
    composition = Composition.load(place / _COMPOSITION)
    if composition.backend != served.composition.backend:  # misses are judged by the precision of the latter
        raise CompositionError(
            f"'{composition.name}' was made for backend {composition.backend}, but composition "
            f"'{served.composition.name}' runs on {served.composition.backend}"
        )
    opened = Setting(composition, tuple(served.model.exits(composition, place / "caches")))
    return _opened(served, opened, graph_in(place, composition.backend), graphs)


def open_settings(served: Served, folder: str | Path) -> tuple[Setting, ...]:
    """The settings of a version, from strict to loose; empty if it has but one.

    Raises as `open_version`.
    """
    place = Path(folder)
    found: list[Setting] = []
    while (path := place / _SETTINGS / f"{len(found) + 1}.json").is_file():
        composition = Composition.load(path)
        found.append(Setting(composition, tuple(served.model.exits(composition, place / "caches"))))
    return tuple(found)


def open_setting(
    served: Served, folder: str | Path, setting: Setting, number: int, *, graphs: Graphs | None = None
) -> Served:
    """Open the setting of that number, from 1 on, of the version in `folder`, as `open_version` does."""
    kept = Path(folder) / "graphs" / f"{setting.composition.backend}-{number}.onnx"
    return _opened(served, setting, kept, graphs)


def _opened(served: Served, setting: Setting, kept: Path, graphs: Graphs | None) -> Served:
    composition, exits = setting
    backend = get_backend(composition.backend)
    if graphs is not None and isinstance(backend, GraphBackend) and not kept.is_file():
        graphs.write(kept, composition.backend, served, exits)
    kept_base = base_graph_file(served.library, composition.backend)
    engine = served.model.engine_of(
        exits, composition.name, composition.backend, (kept, kept_base), composition.lookup_cores
    )
    return replace(served, engine=engine, composition=composition)
