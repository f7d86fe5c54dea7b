"""The versions of a model that are loaded, and which of them answers."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gati.adaptation.references import is_exact
from gati.composition.composition import Composition
from gati.engine.engine import Engine
from gati.errors import CompositionError, NotFoundError, RequestError, UnavailableError
from gati.guard.standing import identity_of
from gati.guard.watch import Event, Watch
from gati.types import is_name
from services.inference.counts import Counts
from services.inference.following import Following, Shared
from services.inference.keeping import open_standing
from services.inference.line import Line
from services.inference.opening import Opened, Opener
from services.inference.queue import RequestQueue
from services.inference.settings import InferenceSettings
from services.inference.standing import Stands, needed, stands
from services.wire.gen.ttypes import ProofProgress, VersionInfo

if TYPE_CHECKING:
    from gati.composition.load import OpenedModel  # slow: brings in onnx
    from gati.samples.writer import BackgroundWriter  # needs SQLAlchemy

__all__ = ["LoadedVersion", "Versions"]

_log = logging.getLogger("gati.inference")

_CONFIDENCE = 0.95  # of compositions that name none


@dataclass(eq=False)
class LoadedVersion:
    """A loaded version: its engine, and the queue in front of it. `base` gives the reference answer."""

    name: str
    engine: Engine
    queue: RequestQueue
    following: Following
    base: RequestQueue | None
    composition: Composition | None
    retrained: bool

    @property
    def exits(self) -> tuple[str, ...]:
        """Where answers may come from, in order."""
        return (*(leaving.block for leaving in self.engine.exits), "base")

    @property
    def standing(self) -> Stands:
        """How it stands, and what is promised."""
        return stands(self.composition, self.following, retrained=self.retrained)

    def describe(self, *, active: bool, pending: bool = False) -> Any:
        """The wire's `VersionInfo`."""
        standing, watch = self.standing, self.following.watch
        certificate = None if self.composition is None or self.retrained else self.composition.certificate
        proof = None if watch is None else watch.proof
        return VersionInfo(
            version=self.name,
            active=active,
            backend=self.engine.backend,
            certificate_json=None if certificate is None else json.dumps(certificate),
            exits=list(self.exits),
            memory_bytes=sum(leaving.memory_bytes for leaving in self.engine.exits),
            state=standing.state,
            pending=pending,
            agreement=standing.agreement,
            promise=standing.sentence,
            proof=None
            if proof is None
            else ProofProgress(proof.audits, proof.losses, needed(proof.agreement, proof.delta)),
            audits=0 if watch is None else watch.audits,
            losses=0 if watch is None else watch.losses,
        )


class Versions:
    """Loads versions beside those that serve. Its methods belong to the event loop's thread.

    A request keeps the version it began with: a version that is replaced answers what it has, then goes.
    `on_change` is told when another version answers.
    """

    def __init__(
        self,
        settings: InferenceSettings,
        counts: Counts,
        writer: BackgroundWriter | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self.on_change = on_change
        self._standing, self._unlock = open_standing(settings)
        self._line = Line(counts)
        self._shared = Shared(settings, counts, self._line, self._standing, writer)
        self._loaded: dict[str, LoadedVersion] = {}
        self._active: str | None = None
        self._pending: str | None = None
        self._opener = Opener(settings)
        self._reference_queue: RequestQueue | None = None
        # All loading is done in one thread: torch keeps a team of threads for each that it is used from.
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="gati-loader")
        self._leaving: set[asyncio.Task[None]] = set()
        self._loading = 0

    @property
    def loaded(self) -> tuple[LoadedVersion, ...]:
        """All of them."""
        return tuple(self._loaded.values())

    @property
    def active(self) -> LoadedVersion:
        """The one that answers. Raises `UnavailableError` before the first is loaded."""
        if self._active is None:
            raise UnavailableError(f"model '{self._settings.name}' is not loaded yet", retry_after_s=1.0)
        return self._loaded[self._active]

    @property
    def pending(self) -> LoadedVersion | None:
        """The one that takes over as soon as it is proven."""
        return None if self._pending is None else self._loaded[self._pending]

    def working_s(self) -> float:
        """For how long an engine has had the input that it has had for longest."""
        queues = {each for version in self._loaded.values() for each in (version.queue, version.base)}
        return max((queue.working_s() for queue in queues if queue is not None), default=0.0)

    @property
    def model(self) -> OpenedModel:
        """The base model. Raises `UnavailableError` before it is loaded."""
        if self._opener.model is None:
            raise UnavailableError(f"model '{self._settings.name}' is not loaded yet", retry_after_s=1.0)
        return self._opener.model

    def get(self, name: str | None) -> LoadedVersion:
        """The version of that name, or the active one. Raises `NotFoundError`."""
        if name is None:
            return self.active
        if name not in self._loaded:
            known = ", ".join(self._loaded) or "none"
            raise NotFoundError(f"no version '{name}' of '{self._settings.name}'; loaded: {known}")
        return self._loaded[name]

    def describe(self) -> list[Any]:
        """The wire's `VersionInfo` of each."""
        return [
            version.describe(active=name == self._active, pending=name == self._pending)
            for name, version in self._loaded.items()
        ]

    async def load(
        self, name: str, composition: str | None = None, folder: Path | None = None
    ) -> LoadedVersion:
        """Load and warm up a version, beside those that serve.

        One of that name is replaced, and if that one is active the new one answers from then on: the base
        model in its place, until it is proven.

        **Raises:** `CompositionError` where too many are loaded; what loading it raises. Nothing has changed
        then.
        """
        if not is_name(name):
            raise RequestError(f"{name!r} cannot be the name of a version; use letters, digits and . _ -")
        if composition is not None and not is_name(composition):
            raise RequestError(f"{composition!r} cannot be the name of a composition")
        self._check_room(name)
        loop = asyncio.get_running_loop()
        self._loading += 1
        try:
            opened = await loop.run_in_executor(self._loader, self._opener.open, composition, folder)
        finally:
            self._loading -= 1
        before = self._loaded.get(name)
        version = self._version(name, opened)
        self._loaded[name] = version
        if before is not None:
            self._leave(before)
        standing = version.standing
        _log.info(
            "version loaded",
            extra={"version": name, "backend": version.engine.backend, "promise": standing.sentence},
        )
        if standing.state == "probation" and not self._shared.guarded:
            _log.warning(
                "nothing is proven of these caches, and nothing can be with audit_budget = 0: "
                "the base model answers; set an audit budget, or unguarded = true",
                extra={"version": name},
            )
        return version

    def _check_room(self, name: str) -> None:
        """Memory is bounded: what is loaded stays until it is unloaded."""
        others = len(self._loaded.keys() - {name}) + self._loading
        if others >= self._settings.most_versions:
            raise CompositionError(
                f"{others} versions of '{self._settings.name}' are loaded, as many as most_versions allows; "
                f"unload one: {', '.join(self._loaded)}"
            )

    def _version(self, name: str, opened: Opened) -> LoadedVersion:
        capacity = self._settings.queue_capacity
        queue = RequestQueue(opened.runner, capacity=capacity, times=opened.times)
        base = None
        exact = is_exact(opened.engine)
        if opened.base is not None:
            base = RequestQueue(opened.base, capacity=capacity, times=opened.base_times)
        elif not exact:
            base = self._reference_answers()
        following = Following(
            name, self._watch(opened), queue, base, self._shared, exact=exact, cost=opened.cost
        )
        return LoadedVersion(
            name, opened.engine, queue, following, base, opened.composition, opened.retrained
        )

    def _reference_answers(self) -> RequestQueue:
        """The queue of the float32 network, for all versions in reduced precision."""
        if self._reference_queue is None:
            reference = self._opener.reference
            if reference is None:
                raise AssertionError("a version in reduced precision is opened with its reference")
            self._reference_queue = RequestQueue(
                reference.runner, capacity=self._settings.queue_capacity, times=reference.times
            )
        return self._reference_queue

    def _watch(self, opened: Opened) -> Watch | None:
        """The watch of a version: its own, with its own promise. None where its answers are the user's."""
        chosen = opened.composition
        if chosen is None or not (chosen.exits or not is_exact(opened.engine)):
            return None
        confidence = chosen.confidence or _CONFIDENCE
        certified = chosen.proves(chosen.accuracy_target, confidence)
        identity = identity_of(chosen)
        return self._standing.of(
            identity,
            chosen.accuracy_target,
            proven=certified and not opened.retrained,
            delta=(1.0 - confidence) / self._settings.replicas,
            on_event=lambda event: self._changed(identity, event),
        )

    def activate(self, name: str) -> None:
        """Let a loaded version answer from now on. Raises `NotFoundError`.

        One whose caches may not answer waits while another version serves, and takes over once it is proven.
        """
        version = self.get(name)
        if version.following.may_hit or self._active in (None, name):
            self._take_over(name)
            return
        self._pending = name
        _log.info(
            "version waits until it is proven",
            extra={"version": name, "serving": self._active, "promise": version.standing.sentence},
        )

    def _take_over(self, name: str) -> None:
        self._active, self._pending = name, None
        _log.info(
            "version activated", extra={"version": name, "promise": self._loaded[name].standing.sentence}
        )
        self.on_change()

    def _changed(self, identity: str, event: Event) -> None:
        """Caches were stopped, or proven: in all versions that have them."""
        names = [
            name
            for name, version in self._loaded.items()
            if version.composition is not None and identity_of(version.composition) == identity
        ]
        stopped = event.state == "stopped"
        _log.log(
            logging.WARNING if stopped else logging.INFO,
            "caches stopped by the guard" if stopped else "caches proven, they answer from now on",
            extra={"versions": names, "audits": event.audits, "disagreements": event.losses},
        )
        if not stopped and self._pending in names and self._pending is not None:
            self._take_over(self._pending)

    def unload(self, name: str) -> None:
        """Forget a version. Raises `NotFoundError`, and `RequestError` for the active one."""
        version = self.get(name)
        if name == self._active:
            raise RequestError(f"version '{name}' is the active one; activate another first")
        if name == self._pending:
            self._pending = None
        del self._loaded[name]
        self._leave(version)

    async def close(self) -> None:
        """Answer what waits, and let all versions go."""
        for version in self._loaded.values():
            self._leave(version)
        self._loaded.clear()
        self._active = self._pending = None
        if self._leaving:
            await asyncio.wait(self._leaving)
        await self._line.close()
        if self._reference_queue is not None:
            await self._reference_queue.close()
        await asyncio.to_thread(self._loader.shutdown, cancel_futures=True)  # one may be loading
        self._standing.close()
        self._unlock()

    def _leave(self, version: LoadedVersion) -> None:
        task = asyncio.create_task(self._let_go(version))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _let_go(self, version: LoadedVersion) -> None:
        await self._line.settled()
        version.following.gone = True
        own = {version.queue, version.base} - {None, self._reference_queue}
        await asyncio.gather(*(each.close() for each in own if each is not None))
        version.engine.close()
        gc.collect()  # modules and graphs refer to themselves; the next version needs their memory
        _log.info("version let go", extra={"version": version.name})
