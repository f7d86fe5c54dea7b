"""The engine's part: logs accesses to the service's folder, and loads versions from there."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gati.errors import EvictError, GatiError
from gati.evict.cache import BlockCache
from gati.evict.learn.folder import MODEL, access_of, versions_of
from gati.evict.learn.log import AccessLog
from gati.evict.predict.base import Predictor
from gati.evict.predict.hazard import HazardModel, lightgbm_module
from gati.evict.predict.reuse import Reuse
from gati.evict.predict.stored import load_model
from gati.versions.repository import ModelRepository

_log = logging.getLogger("gati.evict")


def following(capacity: int, seed: int) -> Predictor:
    """A predictor that does not fit models itself: it ranks by age until it is offered one."""
    return Reuse(capacity, fits=False, seed=seed)


class LearningLink:
    """Connects a cache with the folder of `gati evict serve`, whether that runs or not.

    One thread logs accesses; another checks every `look_every_s` seconds for the active version. If a version
    cannot be read, the cache keeps its own. The cache never waits. If its policy does not use the predictor
    `following`, accesses are only logged.

    Raises EvictError for a flat cache, and for a policy that predicts only for a simulated cache.
    """

    def __init__(self, cache: BlockCache, service: str | Path, *, look_every_s: float = 1.0) -> None:
        if cache.tree.flat or (cache.policy.predicts and cache.predictor is None):
            raise EvictError(
                "a service supports only prefix caches, and only policies that predict for the cache itself: "
                "leave out service"
            )
        folder = Path(service)
        self.version: int | None = None  # in use
        self._cache = cache
        self._repository = ModelRepository(versions_of(folder))
        self._token = ""
        self._failed = ""
        self._log = AccessLog(access_of(folder), cache.capacity, self._told)
        cache.watch = self._log.requested
        self._closed = threading.Event()
        if isinstance(cache.predictor, Reuse):
            lightgbm_module()
            arguments = (cache.predictor, look_every_s)
            threading.Thread(target=self._follow, args=arguments, name="gati-versions", daemon=True).start()

    def figures(self) -> dict[str, Any]:
        """The version in use, and the number of requests missing from the log."""
        return {"version": self.version, "log_left_out": self._log.left_out}

    def close(self) -> None:
        """Stop loading versions, and write pending log entries, for two seconds at most."""
        self._closed.set()
        self._cache.watch = None
        self._log.close()

    def _told(self) -> Mapping[str, Any]:
        """The counts of this engine for the service's metrics, since it started."""
        figures = self._cache.policy.figures()
        guard = figures.get("guard", {})
        return {
            "evicted": self._cache.evicted,
            "caught": figures.get("caught", 0),
            "guard_excess": guard.get("excess", 0),
            "version": self.version or 0,
        }

    def _follow(self, predictor: Reuse, look_every_s: float) -> None:
        while not self._closed.is_set():
            try:
                self._look(predictor)
                self._failed = ""
            except Exception as error:  # of any type: the cache keeps its version, and looks again
                if repr(error) != self._failed:  # said once
                    trace = None if isinstance(error, GatiError | OSError) else error
                    _log.warning("the active version cannot be loaded: %s", error, exc_info=trace)
                    self._failed = repr(error)
            self._closed.wait(look_every_s)

    def _look(self, predictor: Reuse) -> None:
        token = self._repository.active_token(MODEL)
        if token == self._token:
            return
        number = self._repository.active(MODEL)
        if number is not None and number != self.version:
            predictor.offer(fetch_model(self._repository, number))
            self.version = number
        self._token = token


def fetch_model(repository: ModelRepository, number: int) -> HazardModel:
    """A version's model. Raises EvictError, RepositoryError, StorageError."""
    with tempfile.TemporaryDirectory(prefix="gati-version-") as folder:
        target = Path(folder) / "files"
        repository.fetch(MODEL, number, target)
        return load_model(target)
