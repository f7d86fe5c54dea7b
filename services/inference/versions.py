"""The loaded versions of a model, and which of them answers."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gati.adaptation.recall_file import network_identity
from gati.adaptation.references import is_exact
from gati.composition.composition import Composition
from gati.composition.plans import DEFAULT_CONFIDENCE
from gati.engine.threads import let_others_first, work_alongside
from gati.errors import NotFoundError, RequestError, UnavailableError
from gati.guard.posts import Post
from gati.guard.standing import identity_of
from gati.guard.watch import Event, Watch
from gati.types import NAME_RULE, is_name
from services.inference.counts import Counts
from services.inference.following import Answering, Following, Shared
from services.inference.keeping import open_standing
from services.inference.line import Line
from services.inference.loaded import LoadedVersion, TooManyVersionsError, unwatched
from services.inference.opening import Opened, Opener
from services.inference.proven_settings import ProvenSettings
from services.inference.queue import RequestQueue
from services.inference.remembering import ServedMemory
from services.inference.roster import LastRun, ServedRoster
from services.inference.runner import NICENESS
from services.inference.settings import InferenceSettings
from services.inference.watching import Watching, log_change
from services.wire.gen.ttypes import VersionSource

if TYPE_CHECKING:
    from gati.composition.load import OpenedModel  # slow: brings in onnx
    from gati.samples.writer import BackgroundWriter  # needs SQLAlchemy

_log = logging.getLogger("gati.inference")


class Versions:
    """Loads versions while others serve. Not thread-safe: call from the event loop.

    A request keeps the version it started with: a replaced version answers its requests before it is closed.
    `on_change` is called when another version starts to answer.
    """

    def __init__(
        self,
        settings: InferenceSettings,
        counts: Counts,
        writer: BackgroundWriter | None = None,
    ) -> None:
        self._settings = settings
        self.on_change: Callable[[], None] = lambda: None
        self._standing = open_standing(settings)
        self.recorded, self.heed_replicas = self._standing.recorded, self._standing.look
        self.last_run = LastRun(self._standing)
        self._line = Line(counts)
        self._prober = ThreadPoolExecutor(1, "gati-prober", work_alongside, (NICENESS,))
        self._shared = Shared(settings, counts, self._line, self._standing, writer, self._prober)
        self._loaded: dict[str, LoadedVersion] = {}
        self._roster: ServedRoster | None = None  # set when the first version is activated
        self._opener = Opener(settings)
        self._reference_queue: RequestQueue | None = None
        # no lower: engines start their threads from this one, with its priority
        self._loader = ThreadPoolExecutor(1, "gati-loader", let_others_first, (NICENESS,))
        self._proven = ProvenSettings(self._opener, self._loader, settings.queue_capacity)
        self._memory: ServedMemory | None = None
        self._watching = Watching(
            self._shared,
            self._changed,
            lambda post: self._roster is not None and self._roster.is_after_memory(post),
        )
        self._leaving: dict[asyncio.Task[None], LoadedVersion] = {}
        self._loading = 0

    @property
    def loaded(self) -> tuple[LoadedVersion, ...]:
        """All loaded versions."""
        return tuple(self._loaded.values())

    @property
    def active(self) -> LoadedVersion:
        """The version that answers. Raises `UnavailableError` before the first is activated."""
        if self._active is None:
            raise UnavailableError(f"model '{self._settings.name}' is not loaded yet", retry_after_s=1.0)
        return self._loaded[self._active]

    @property
    def pending(self) -> LoadedVersion | None:
        """The version on trial, which takes over once it is proven; None without one."""
        trial = None if self._roster is None else self._roster.trial
        return None if trial is None else self._loaded[trial.version.name]

    @property
    def _active(self) -> str | None:
        return None if self._roster is None else self._roster.serving.version.name

    def scenes_for(self, version: LoadedVersion) -> ServedMemory | None:
        """The memory, which also notices new scenes among inputs of that version; None without caches."""
        similar = version.engine.traced.dtype.is_floating_point  # token ids do not show how similar texts are
        return self._memory if similar and version.following.post is not None else None

    def memory_for(self, version: LoadedVersion) -> ServedMemory | None:
        """The memory, if it promises at least the agreement of that version; else None."""
        memory = self.scenes_for(version)
        return memory if memory and memory.agreement >= version.post.of_all.agreement else None

    @property
    def memory_pauses(self) -> bool:
        """Whether memory must not answer, because it may not do so next to the version on trial.

        Next to memory, a trial is proven on the requests that memory leaves. If it then serves without
        memory, that proof says nothing about the others.
        """
        trial = self.pending
        return trial is not None and trial.following.post is not None and self.memory_for(trial) is None

    def describe_memory(self) -> Any:
        """As the wire's `MemoryInfo`; None without memory."""
        return None if self._memory is None else self._memory.describe(self._shared.counts.recalled)

    def follow_memory(self) -> None:
        """Call before each request is decided about: caches are judged by what memory leaves by then."""
        if self._roster is not None and self._memory is not None:
            memory = None if self.memory_pauses else self.memory_for(self.active)
            self._roster.follow_memory(*(None, 0) if memory is None else memory.recall.next_to_caches)

    def answered(self) -> None:
        """Call after each answered request: ends trials that have failed, and saves memory if that is due."""
        if self._roster is not None:
            self._roster.give_up()
        if self._memory is not None:
            self._memory.settled()

    def working_s(self) -> float:
        """How long the oldest running input has been executing, over all queues."""
        return max((queue.working_s() for queue in self.queues), default=0.0)

    @property
    def broken(self) -> bool:
        """Whether an engine fails for every input, its network's own example included."""
        model = self._opener.model
        if model is None:
            return False
        return any([queue.broken(lambda: model.traced.example()[:1].clone()) for queue in self.queues])

    @property
    def queues(self) -> set[RequestQueue]:
        """All queues of loaded versions, those of the reference included."""
        return {each for version in self._loaded.values() for each in version.queues}

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
        """The wire's `VersionInfo` of each loaded version."""
        active, pending = self._active, self.pending
        return [
            version.describe(active=name == active, pending=version is pending)
            for name, version in self._loaded.items()
        ]

    async def load(
        self, name: str, composition: str | None = None, folder: Path | None = None
    ) -> LoadedVersion:
        """Load and warm up a version while others serve.

        A loaded version of that name is replaced. If it was active, the new one is active, and the base model
        answers for it until its caches may answer.

        **Raises:** `RequestError` for an invalid name, `TooManyVersionsError` if too many are loaded, and
        whatever loading raises; nothing changes then.
        """
        if not is_name(name):
            raise RequestError(f"{name!r} cannot be the name of a version; use {NAME_RULE}")
        if composition is not None and not is_name(composition):
            raise RequestError(f"{composition!r} cannot be the name of a composition; use {NAME_RULE}")
        self._check_room(name)
        loop = asyncio.get_running_loop()
        self._loading += 1
        try:
            opened = await loop.run_in_executor(self._loader, self._opener.open, composition, folder)
            source = VersionSource(name, composition, None if folder is None else str(folder))
            version = self._version(source, opened)
            watches = [each.post.of_all for each in self.loaded]
            if self._roster is not None and version.post.of_all not in watches:
                self._roster.come_back(version.post)
            await self._proven.open_known(version.post)
        finally:
            self._loading -= 1
        version.following.counts_anew()
        before = self._loaded.get(name)  # another version of that name may have been loaded meanwhile
        self._loaded[name] = version
        if before is not None:
            self._replace(before, version)
        standing = version.standing
        _log.info(
            "version loaded",
            extra={"version": name, "backend": version.engine.backend, "promise": standing.sentence},
        )
        if standing.state == "probation" and not self._shared.guarded:
            _log.warning(
                "these caches are not proven, and cannot be with audit_budget = 0: the base model answers; "
                "set an audit budget, or unguarded = true",
                extra={"version": name},
            )
        return version

    def _check_room(self, name: str) -> None:
        """Raise `TooManyVersionsError` if the limit on loaded versions is reached."""
        others = len(self._loaded.keys() - {name}) + self._loading
        if others >= self._settings.most_versions:
            raise TooManyVersionsError(
                f"{others} versions of '{self._settings.name}' are loaded, as many as most_versions allows; "
                f"unload one: {', '.join(self._loaded)}"
            )

    def _version(self, source: Any, opened: Opened) -> LoadedVersion:
        name = source.version
        capacity = self._settings.queue_capacity
        queue = RequestQueue(opened.runner, capacity=capacity, times=opened.times)
        base = None
        exact = is_exact(opened.engine)
        if opened.base is not None:
            base = RequestQueue(opened.base, capacity=capacity, times=opened.base_times)
        elif not exact:
            base = self._reference_answers()
        answering = Answering(name, opened.engine, queue, opened.composition, opened.probe)
        watched = self._watching.post(answering, opened)
        remembers = self._memory is None and self._watching.remembers
        if remembers and watched is not None and opened.composition is not None:
            self._memory = self._new_memory(opened.composition, watched.of_all, alone=exact)
        post = watched or Post(answering, unwatched())
        self._proven.add(answering, opened.settings)
        following = Following(
            answering,
            watched,
            base,
            self._shared,
            exact=exact,
            cost=opened.cost,
            memory=None if self._memory is None else self._memory.recall,
            compare=self._compare,
        )
        return LoadedVersion(answering, post, following, base, opened.retrained, source)

    def _new_memory(self, composition: Composition, watch: Watch, *, alone: bool) -> ServedMemory:
        """A memory with the promise of the first version that has one."""
        return ServedMemory(
            watch.agreement,
            (1.0 - (composition.confidence or DEFAULT_CONFIDENCE)) / self._settings.replicas,
            self._standing,
            self._prober,
            network=network_identity(self.model),
            places=self._settings.places,
            alone=alone,
        )

    def _compare(self, post: Post[Answering], exits: Sequence[str], left: str | None) -> None:
        if self._roster is not None:
            self._roster.compare(post, exits, left)

    def _reference_answers(self) -> RequestQueue:
        """The queue of the float32 network, which all versions in reduced precision share."""
        if self._reference_queue is None:
            reference = self._opener.reference
            if reference is None:
                raise AssertionError("a version in reduced precision is opened with its reference")
            self._reference_queue = RequestQueue(
                reference.runner, capacity=self._settings.queue_capacity, times=reference.times
            )
        return self._reference_queue

    def activate(self, name: str) -> None:
        """Let a loaded version answer from now on. Raises `NotFoundError`.

        If another version serves, a version whose caches may not answer yet is on trial, and takes over once
        it is proven. So is a version that is brought back and was proven by audits.
        """
        version = self.get(name)
        if self._roster is None:
            self._roster = ServedRoster(
                version.post,
                settings=self._proven,
                last_run=self.last_run,
                on_change=self._counts_anew,
                on_takeover=self._taken_over,
            )
            self._standing.on_heeded = self._roster.restricted
            self._taken_over(version.post)
        elif self._roster.activate(version.post, lambda: version.following.may_hit):
            self._taken_over(version.post)
        else:
            self._standing.save()
            _log.info(
                "version is on trial until it is proven; the base model, or the current version, answers",
                extra={"version": name, "serving": self._active, "promise": version.standing.sentence},
            )

    def _counts_anew(self, post: Post[Answering]) -> None:
        version = self._loaded.get(post.version.name)
        if version is not None:
            version.following.counts_anew()

    def _taken_over(self, post: Post[Answering]) -> None:
        name = post.version.name
        self._standing.save()  # a restart continues with this version
        promise = self._loaded[name].standing.sentence
        _log.info("version activated", extra={"version": name, "promise": promise})
        self.on_change()

    def _changed(self, chosen: Composition, event: Event, of_rest: bool) -> None:
        """A guard stopped or released caches: report it to all versions that have them, and their promise."""
        versions = [
            version
            for version in self._loaded.values()
            if version.is_judged_with(chosen) and version.post.after_memory == of_rest
        ]
        log_change(event, [each.name for each in versions], rest=of_rest)
        for version in versions:
            if self._roster is not None:
                self._roster.heard(version.post, event)

    def unload(self, name: str) -> None:
        """Unload a version. Raises `NotFoundError`, and `RequestError` for the active one."""
        version = self.get(name)
        if name == self._active:
            raise RequestError(f"version '{name}' is the active one; activate another first")
        if self._roster is not None:
            self._roster.forget(version.post)
        del self._loaded[name]
        self._leave(version)

    async def close(self) -> None:
        """Answer the waiting inputs, and close all versions."""
        for version in self._loaded.values():
            self._leave(version)
        self._loaded.clear()
        self._roster, self._standing.on_heeded = None, lambda watch: None
        if self._leaving:
            await asyncio.wait(self._leaving)
        await self._proven.close()
        await self._line.close()
        if self._reference_queue is not None:
            await self._reference_queue.close()
        await asyncio.to_thread(self._loader.shutdown, cancel_futures=True)  # one may be loading
        await asyncio.to_thread(self._prober.shutdown)
        if self._memory is not None:
            self._memory.save()
        self._standing.close()

    def _replace(self, before: LoadedVersion, version: LoadedVersion) -> None:
        """Let a version take the place of a loaded one of the same name."""
        if self._roster is not None:
            self._roster.replace(before.post, version.post)
        self._leave(before)

    def _leave(self, version: LoadedVersion) -> None:
        task = asyncio.create_task(self._let_go(version))
        self._leaving[task] = version
        task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        del self._leaving[task]
        if not self._loading:  # the watches of a version that is being loaded are in use already
            used = (each.composition for each in (*self.loaded, *self._leaving.values()))
            self._standing.watch_only({identity_of(each) for each in used if each is not None})

    async def _let_go(self, version: LoadedVersion) -> None:
        await version.unused()
        await self._line.settled()
        version.answering.gone = True
        self._proven.forget(version.answering)
        if version.base not in (None, self._reference_queue):
            await version.base.close()
        await asyncio.gather(*(each.close() for each in version.answerings))
        gc.collect()  # modules and graphs contain reference cycles; free their memory now
        _log.info("version unloaded", extra={"version": version.name})
