"""The versions of a model that are loaded, and which of them answers."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gati.compose.composition import Composition
from gati.errors import CompositionError, ConfigError, NotFoundError, RequestError, UnavailableError
from gati.runtime.engine import Engine
from gati.types import is_name
from services.inference.counts import Counts
from services.inference.following import Following, watch_for
from services.inference.queue import RequestQueue
from services.inference.runner import Runner, open_runner
from services.inference.service_times import ServiceTimes
from services.inference.settings import InferenceSettings
from services.wire.gen.ttypes import VersionInfo

if TYPE_CHECKING:
    from gati.adapt.writer import BackgroundWriter  # needs SQLAlchemy
    from gati.runtime.load import OpenedModel  # slow: brings in onnx

__all__ = ["Version", "Versions"]

_log = logging.getLogger("gati.inference")

_WARM_UP_INPUTS = 20
BASE_VERSION = "base"


@dataclass(eq=False)
class Version:
    """A loaded version: its engine, and the queue in front of it."""

    name: str
    engine: Engine
    queue: RequestQueue
    following: Following
    base: RequestQueue | None
    certificate: dict[str, Any] | None

    @property
    def exits(self) -> tuple[str, ...]:
        """Where answers may come from, in order."""
        return (*(leaving.block for leaving in self.engine.exits), "base")

    def describe(self, *, active: bool) -> Any:
        """The wire's `VersionInfo`."""
        return VersionInfo(
            version=self.name,
            active=active,
            backend=self.engine.backend,
            certificate_json=None if self.certificate is None else json.dumps(self.certificate),
            exits=list(self.exits),
            memory_bytes=sum(leaving.memory_bytes for leaving in self.engine.exits),
        )


@dataclass(frozen=True)
class _Opened:
    """What the loader's thread has made of a version."""

    engine: Engine
    runner: Runner
    composition: Composition | None
    times: ServiceTimes
    base: Runner | None = None  # the base model alone, on the same engine: for audits, and when caches stop
    base_times: ServiceTimes = field(default_factory=ServiceTimes)


class Versions:
    """Loads versions beside those that serve. Its methods belong to the event loop's thread.

    A request keeps the version it began with: a version that is replaced answers what it has, then goes.
    """

    def __init__(
        self, settings: InferenceSettings, counts: Counts, writer: BackgroundWriter | None = None
    ) -> None:
        self._settings = settings
        self._counts = counts
        self._writer = writer
        self._loaded: dict[str, Version] = {}
        self._active: str | None = None
        self._model: OpenedModel | None = None
        # All loading is done in one thread: torch keeps a team of threads for each that it is used from.
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="gati-loader")
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def loaded(self) -> tuple[Version, ...]:
        """All of them."""
        return tuple(self._loaded.values())

    @property
    def active(self) -> Version:
        """The one that answers. Raises `UnavailableError` before the first is loaded."""
        if self._active is None:
            raise UnavailableError(f"model '{self._settings.name}' is not loaded yet", retry_after_s=1.0)
        return self._loaded[self._active]

    @property
    def model(self) -> OpenedModel:
        """The base model. Raises `UnavailableError` before it is loaded."""
        if self._model is None:
            raise UnavailableError(f"model '{self._settings.name}' is not loaded yet", retry_after_s=1.0)
        return self._model

    def get(self, name: str | None) -> Version:
        """The version of that name, or the active one. Raises `NotFoundError`."""
        if name is None:
            return self.active
        if name not in self._loaded:
            known = ", ".join(self._loaded) or "none"
            raise NotFoundError(f"no version '{name}' of '{self._settings.name}'; loaded: {known}")
        return self._loaded[name]

    async def load(self, name: str, composition: str | None = None, folder: Path | None = None) -> Version:
        """Load and warm up a version, beside those that serve.

        One of that name is replaced, and if that one is active the new one answers from then on.

        **Raises:** what loading it raises; nothing has changed then.
        """
        if not is_name(name):
            raise RequestError(f"{name!r} cannot be the name of a version; use letters, digits and . _ -")
        if composition is not None and not is_name(composition):
            raise RequestError(f"{composition!r} cannot be the name of a composition")
        loop = asyncio.get_running_loop()
        opened = await loop.run_in_executor(self._loader, self._open, composition, folder)
        before = self._loaded.get(name)
        version = self._version(name, opened, before)
        self._loaded[name] = version
        if before is not None:
            self._leave(before)
        _log.info("version loaded", extra={"version": name, "backend": version.engine.backend})
        return version

    def _version(self, name: str, opened: _Opened, before: Version | None) -> Version:
        capacity = self._settings.queue_capacity
        queue = RequestQueue(opened.runner, capacity=capacity, times=opened.times)
        base = None
        if opened.base is not None:
            base = RequestQueue(opened.base, capacity=capacity, times=opened.base_times)
        watched = before or (self._loaded[self._active] if self._active is not None else None)
        earlier = None if watched is None else watched.following.watch
        watch = watch_for(opened.composition, self._settings, earlier)
        following = Following(
            self._settings.name,
            watch,
            queue,
            base,
            sampling=self._settings.sampling,
            writer=self._writer,
            counts=self._counts,
        )
        certificate = None if opened.composition is None else opened.composition.certificate
        return Version(name, opened.engine, queue, following, base, certificate)

    def activate(self, name: str) -> None:
        """Let a loaded version answer from now on. Raises `NotFoundError`."""
        self._active = self.get(name).name
        _log.info("version activated", extra={"version": name})

    def unload(self, name: str) -> None:
        """Forget a version. Raises `NotFoundError`, and `RequestError` for the active one."""
        version = self.get(name)
        if name == self._active:
            raise RequestError(f"version '{name}' is the active one; activate another first")
        del self._loaded[name]
        self._leave(version)

    async def close(self) -> None:
        """Answer what waits, and let all versions go."""
        for version in self._loaded.values():
            self._leave(version)
        self._loaded.clear()
        self._active = None
        if self._leaving:
            await asyncio.wait(self._leaving)
        self._loader.shutdown()

    def _leave(self, version: Version) -> None:
        task = asyncio.create_task(self._let_go(version))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _let_go(self, version: Version) -> None:
        await version.following.close()
        await asyncio.gather(*(each.close() for each in (version.queue, version.base) if each is not None))
        version.engine.close()
        gc.collect()  # modules and graphs refer to themselves; the next version needs their memory
        _log.info("version let go", extra={"version": version.name})

    # In the loader's thread -----------------------------------------------------------------------------

    def _open(self, composition: str | None, folder: Path | None) -> _Opened:
        torch.set_num_threads(self._settings.threads)
        if self._model is None:
            self._model = self._open_model()
        model = self._model
        chosen = _composition(model, composition, folder)
        if chosen is None:
            engine = model.base()
        else:
            engine = model.engine(chosen, None if folder is None else folder / "caches")
        runner = open_runner(engine, workers=self._settings.workers)
        opened = _Opened(engine, runner, chosen, _warm_up(engine, runner))
        if not engine.exits or (self._settings.audit_budget == 0.0 and self._settings.records is None):
            return opened
        base = open_runner(engine, early=False, workers=self._settings.workers)
        return replace(opened, base=base, base_times=_warm_up(engine, base))

    def _open_model(self) -> OpenedModel:
        from gati.runtime.load import open_model, open_plain_model

        settings = self._settings
        if settings.library is not None:
            return open_model(settings.library, device=settings.device)
        if settings.model is None:
            raise ConfigError(f"model '{settings.name}' has neither a library nor a model")
        return open_plain_model(
            settings.model, settings.checkpoint, size=settings.size, device=settings.device
        )


def _composition(model: OpenedModel, composition: str | None, folder: Path | None) -> Composition | None:
    if folder is not None:
        return Composition.load(folder / "composition.json")
    if composition is None:
        return None
    if model.library is None:
        raise CompositionError("a plain model has no compositions; explore it to make a cache library")
    return Composition.load(model.library.composition_path(composition))


def _warm_up(engine: Engine, runner: Runner) -> ServiceTimes:
    """Let a runner answer some inputs that nobody asked for; they tell what the next will take."""
    times = ServiceTimes()
    with torch.inference_mode():
        x = engine.traced.example()[:1]
    for number in range(_WARM_UP_INPUTS):
        began_s = time.perf_counter()
        runner.submit(x).result()
        if number >= _WARM_UP_INPUTS // 2:
            times.add(time.perf_counter() - began_s, beside=1.0)
    return times
