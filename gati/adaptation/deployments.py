"""The versions of one model that can serve here: the library's own, and those in a repository."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gati.adaptation.probe import can_probe
from gati.adaptation.retrain import Retrained
from gati.adaptation.scene import Signature
from gati.composition.load import Served
from gati.documents import values_of
from gati.engine.backends import GraphBackend, get_backend
from gati.errors import GatiError, RepositoryError
from gati.versions.engines import (
    Graphs,
    open_setting,
    open_settings,
    open_version,
    save_version,
)
from gati.versions.lineage import Lineage, SampleWindow
from gati.versions.repository import ModelRepository
from gati.versions.setting import Setting
from gati.versions.stricter import stricter_settings

_log = logging.getLogger(__name__)

_SCENE = "scene"  # the tag that holds the scene's signature
_MADE_FOR = "made_for"  # the tag that names the composition and its backend, as activations do
_OPEN = 4  # versions whose engines are kept, besides the one that serves
_KEEP = 20  # versions in the repository, besides the one just published; and as many of those that served


class Deployed(NamedTuple):
    """A version that can serve; number 0 is the library's own composition.

    `settings` are the ways to deploy it, from strict to loose; empty if `served` is the only one. `nested`:
    whatever a setting answers early, all looser ones answer in the same way.
    """

    number: int
    served: Served
    signature: Signature | None = None
    settings: tuple[Setting, ...] = ()
    nested: bool = False

    @property
    def promised(self) -> float:
        """The hit rate measured when it was composed."""
        return self.served.composition.expected.hit_rate


class Deployments:
    """Publishes, opens and remembers versions of `model`. `folder` holds local copies and nothing else.

    Versions may have exits at `blocks` in addition to those of `served`.
    """

    def __init__(
        self,
        served: Served,
        repository: ModelRepository,
        model: str,
        folder: Path,
        blocks: Sequence[str] = (),
    ) -> None:
        self._served = served
        self._repository = repository
        self._model = model
        self._folder = folder
        self._open: dict[int, Deployed] = {}
        self._folders: dict[int, Path] = {}  # source folders of open versions
        self._saved = 0
        self._highest = 0  # number of a version that was opened here
        self._backend = f" on {served.composition.backend}"
        self._made_for = served.composition.name + self._backend  # compositions share a repository
        backend = get_backend(served.composition.backend)
        self._graphs: Graphs | None = None
        if isinstance(backend, GraphBackend):
            self._graphs = Graphs({*blocks, *(leaving.block for leaving in served.engine.exits)})

    @cached_property
    def _first(self) -> Deployed:
        settings = stricter_settings(self._served) if can_probe(self._served) else ()
        return Deployed(0, self._served, settings=settings, nested=True)

    def active(self) -> tuple[Deployed, str]:
        """The version to start with, and the reason if it is not the repository's active one.

        That is the one activated last for this composition; without one, for another on the same backend.
        """
        actives = self._repository.actives(self._model)
        own = [number for name, number in actives.items() if name in ("", self._made_for)]
        like = [number for name, number in actives.items() if name.endswith(self._backend)]
        number = next(iter((*own, *like)), None)
        if number is None:
            return self._first, ""
        try:
            return self.open(number), ""
        except GatiError as error:
            return self._first, f"the active version cannot serve: {error}"

    def newest(self) -> tuple[Deployed | None, str]:
        """The version published last, if it has never served, and the reason if it cannot serve here.

        A version that has served was replaced since then, and is not on trial.
        """
        own = [
            stored.version
            for stored in self._repository.versions(self._model)
            if stored.lineage.tags.get(_MADE_FOR, self._made_for) == self._made_for
        ]
        number = max(own, default=None)
        served = {activation.version for activation in self._repository.history(self._model)}
        if number is None or number in served:
            return None, ""
        try:
            return self.open(number), ""
        except GatiError as error:
            return None, f"version {number} cannot serve: {error}"

    def unfinished(self) -> Deployed | None:
        """The newest version if it was made by adaptation, which ended before activating it.

        If another version was activated since, or rolled back to, that stays.
        """
        newest, _ = self.newest()
        if newest is None or newest.signature is None:
            return None
        created = self._repository.version(self._model, newest.number).created
        since_s = max(
            (
                each.time_s
                for each in self._repository.history(self._model)
                if each.made_for in ("", self._made_for)
            ),
            default=0.0,
        )
        return newest if datetime.fromisoformat(created).timestamp() >= since_s else None

    def open(self, number: int) -> Deployed:
        """Open a version.

        Raises RepositoryError or CompositionError if it cannot serve in place of this composition, and as
        `open_version`.
        """
        if number == 0:
            return self._first
        if number not in self._open:
            folder = self._folder / f"fetched-{number}"
            stored = self._repository.version(self._model, number)
            if not folder.exists():
                self._repository.fetch(self._model, number, folder)
            self._remember(self._opened(number, folder, _signature(stored.lineage.tags)), folder)
        return self._open[number]

    def at(self, number: int, level: int) -> Deployed:
        """A version at the setting `level`, counted from 1. Raises the errors of `open`."""
        deployed = self.open(number)
        if not deployed.settings:
            return deployed
        setting = deployed.settings[level - 1]
        folder = self._folders[number] if number else self._folder / "library"
        served = open_setting(self._served, folder, setting, level, graphs=self._graphs)
        return deployed._replace(served=served)

    def scenes(self) -> list[tuple[int, Signature]]:
        """The versions, each with the signature of the scene it was made for."""
        stored = self._repository.versions(self._model)
        found = ((each.version, _signature(each.lineage.tags)) for each in stored)
        return [(number, signature) for number, signature in found if signature is not None]

    def check_numbers(self) -> None:
        """Raise RepositoryError if the newest version is gone.

        The next one would get the number of one that is open here, and answer by its proof.
        """
        newest = max((each.version for each in self._repository.versions(self._model)), default=0)
        if newest < self._highest:
            raise RepositoryError(
                f"version {self._highest} of {self._model} was deleted or damaged, so no new one can be "
                "published; restart"
            )

    def publish(
        self,
        retrained: Retrained,
        *,
        parent: Deployed,
        trained: SampleWindow,
        signature: Signature,
        reason: str,
    ) -> Deployed:
        """Publish the retrained caches as the next version and open it, without activating it.

        It has no certificate: it was chosen on parts of the stream that it was trained on. Deletes the oldest
        versions, as many are never proven; those that were, and served, are kept apart from these.

        Raises RepositoryError as `check_numbers`.
        """
        self.check_numbers()
        try:
            served = (each.version for each in reversed(self._repository.history(self._model)))
            proven = list(dict.fromkeys(served))[:_KEEP]
            self._repository.collect_garbage(self._model, keep=_KEEP, besides=proven)
        except GatiError as error:  # such as a bucket where nothing may be deleted
            _log.warning("old versions of %s stay: %s", self._model, error)
        self._saved += 1
        folder = self._folder / f"saved-{self._saved}"
        lineage = Lineage(
            retrained.composition.checkpoint_sha256,
            parent=parent.number or None,
            window=trained,
            measurements={"before": values_of(retrained.before), "after": values_of(retrained.after)},
            tags={
                _SCENE: [float(value) for value in signature],
                _MADE_FOR: self._made_for,
                "reason": reason,
            },
        )
        try:
            save_version(folder, retrained.composition, retrained.exits, retrained.settings)
            opened = self._opened(0, folder, signature)
            number = self._repository.publish(self._model, folder, lineage)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        deployed = opened._replace(number=number)
        self._remember(deployed, folder)
        return deployed

    def activate(self, deployed: Deployed) -> None:
        """Make this the version that restarts begin with."""
        if deployed.number:
            self._repository.activate(self._model, deployed.number, self._made_for)

    def _opened(self, number: int, folder: Path, signature: Signature | None) -> Deployed:
        opened = open_version(self._served, folder, graphs=self._graphs)
        settings = open_settings(self._served, folder) if can_probe(opened) else ()
        return Deployed(number, opened, signature, settings)

    def _remember(self, deployed: Deployed, folder: Path) -> None:
        """Keep a version open; drop the oldest one and its local copy."""
        self._open[deployed.number] = deployed
        self._highest = max(self._highest, deployed.number)
        self._folders[deployed.number] = folder
        while len(self._open) > _OPEN + 1:
            oldest = next(iter(self._open))
            del self._open[oldest]
            shutil.rmtree(self._folders.pop(oldest), ignore_errors=True)


def _signature(tags: dict[str, Any]) -> Signature | None:
    values = tags.get(_SCENE)
    return np.array(values, dtype=np.float32) if isinstance(values, list) else None
