"""The calls of an inference service: `service Inference` in `thrift/gati.thrift`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gati.adaptation.recall_records import Looked
from gati.cores import core_count
from gati.engine.exits import Prediction
from gati.errors import DeadlineError, GatiError, RequestError, UnavailableError
from gati.guard.auditor import Decided
from gati.model.inputs import InputPart
from gati.model.preprocess import Preprocessing
from services.again import keep_on
from services.inference.counts import Counts, resident_bytes
from services.inference.followed import Followed
from services.inference.following import Handling
from services.inference.loaded import LoadedVersion
from services.inference.queue import Ask
from services.inference.requests import Requests, UnderWay
from services.inference.rows import LARGE_INPUT_BYTES, rows_of, spectrograms_of, tokens_of
from services.inference.settings import InferenceSettings
from services.inference.versions import Versions
from services.pausing import Pausing
from services.pool import BoundedPool
from services.states import BASE_VERSION, BROKEN, STUCK
from services.wire.gen.ttypes import (
    Answer,
    Health,
    InferResponse,
    InputArray,
    ModelInfo,
    SoundInput,
    Statistics,
    TextInput,
)
from services.wire.tensors import (
    BYTES,
    LONGEST_PLACE,
    datatype_of,
    from_tensor,
    inputs_in,
)

if TYPE_CHECKING:
    from gati.samples.writer import BackgroundWriter  # needs SQLAlchemy

_LONG_TEXT_BYTES = 8 * 1024  # the same limit for text
_HIGHEST, _LOWEST = 1, 10
_HEEDED_EVERY_S, _LONGEST_PAUSE_S = 1.0, 30.0

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _once_recorded(
    call: Callable[Concatenate[InferenceService, _P], Awaitable[_T]],
) -> Callable[Concatenate[InferenceService, _P], Coroutine[Any, Any, _T]]:
    """The call, whose result waits until the changes of state that it may rest on are written."""

    @wraps(call)
    async def done(service: InferenceService, /, *arguments: _P.args, **options: _P.kwargs) -> _T:
        found = await call(service, *arguments, **options)
        await service._versions.recorded()
        return found

    return done


class InferenceService:
    """Implements the calls for one model; `start` loads it."""

    def __init__(self, settings: InferenceSettings) -> None:
        self._settings = settings
        self._counts = Counts()
        self._writer = _open_writer(settings)
        self._versions = Versions(settings, self._counts, self._writer)
        self._polling: list[asyncio.Task[None]] = []
        self._requests = Requests()
        self._pausing = Pausing(settings.pausing, core_count())
        # It refuses nothing that a queue has admitted: each priority can fill one.
        self._pool = BoundedPool("gati-rows", waiting=_LOWEST * settings.queue_capacity)
        self._state = "starting"
        self._draining = False

    async def start(self) -> None:
        """Load the first version and let it answer. Raises what loading raises."""
        self._state = "loading"
        composition = self._settings.composition
        version = await self._versions.load(composition or BASE_VERSION, composition)
        self._versions.activate(version.name)
        self._polling.append(asyncio.create_task(self._keep_heeding()))
        if self._settings.repository is not None:
            followed = Followed(self._settings.repository, self._settings.name, self._versions)
            self._versions.on_change = followed.tidy
            await followed.look()  # start with the version that is active there
            self._polling.append(asyncio.create_task(followed.keep_looking(self._settings.poll_s)))
        self._state = "serving"

    async def drain(self) -> None:
        """Refuse new requests, answer the accepted ones, and close everything."""
        self._draining = True
        self._state = "draining"
        for each in self._polling:
            each.cancel()
        await self._versions.close()
        if self._writer is not None:
            await asyncio.to_thread(self._writer.close, self._settings.drain_timeout_s)

    # Calls ----------------------------------------------------------------------------------------------

    @_once_recorded
    async def infer(self, request: Any) -> Any:
        """Answer a request; one version answers all of its inputs."""
        try:
            return await self._infer(request)
        except GatiError as error:
            self._counts.refused[error.thrift_code] += 1
            raise

    async def cancel(self, request_id: str) -> None:
        """Cancel a request."""
        self._requests.cancel(request_id)

    @_once_recorded
    async def load(self, source: Any) -> Any:
        """Load a version while others answer; returns its `VersionInfo` once it is loaded."""
        self._refuse_when_draining()
        folder = None if source.folder is None else self._published(source.folder)
        # What is open by the time the caller is gone must be closed by someone: it stays loaded.
        loading = asyncio.ensure_future(self._versions.load(source.version, source.composition, folder))
        loading.add_done_callback(_taken_note_of)
        version = await asyncio.shield(loading)
        return next(each for each in self._versions.describe() if each.version == version.name)

    @_once_recorded
    async def activate(self, version: str) -> None:
        """Let a loaded version answer, from now on or once it is proven."""
        self._versions.activate(version)

    @_once_recorded
    async def unload(self, version: str) -> None:
        """Unload a version that is not active."""
        self._versions.unload(version)

    @_once_recorded
    async def describe(self) -> Any:
        """The model's inputs and outputs."""
        model = self._versions.model
        traced, preprocessing = model.traced, model.preprocessing
        tensors, text, sound = preprocessing.tensors, preprocessing.text, preprocessing.sound
        height, width = 0, 0
        is_picture = tensors is None and sound is None and len(traced.input_shape) == 3
        if is_picture and (preprocessing.crop, preprocessing.resize) == (None, None):
            height, width = preprocessing.size or traced.input_shape[1:3]
        channels = preprocessing.channels if tensors is None and not preprocessing.unknown else 0
        return ModelInfo(
            name=self._settings.name,
            input_shape=list(traced.input_shape),
            classes=traced.classes,
            class_names=None if model.class_names is None else list(model.class_names),
            image_shape=[height, width, channels],
            largest_batch=self._settings.most_inputs,
            versions=self._versions.describe(),
            inputs=None if tensors is None else [_array_of(part, preprocessing) for part in tensors.parts],
            text=None if text is None else TextInput(text.sha256, text.length),
            sound=None if sound is None else SoundInput(sound.sample_rate, sound.seconds),
        )

    async def health(self) -> Any:
        """Whether the service is ready: loaded, warmed up and not draining."""
        stuck = self._versions.working_s() > self._settings.stuck_timeout_s
        state = STUCK if stuck else BROKEN if self._versions.broken else self._state
        return Health(ready=state == "serving", draining=self._draining, state=state)

    @_once_recorded
    async def statistics(self) -> Any:
        """Counts since the service started, and its current state."""
        loaded, queues = self._versions.loaded, self._versions.queues
        return Statistics(
            inputs=self._counts.inputs,
            refused=dict(self._counts.refused),
            exits=self._counts.exits_on_the_wire(),
            queue_seconds=self._counts.queue.on_the_wire(),
            service_seconds=self._counts.service.on_the_wire(),
            waiting=sum(each.waiting for each in queues),
            running=sum(each.running for each in queues),
            resident_bytes=resident_bytes(),
            audits_agreed=self._counts.agreed,
            audits_disagreed=self._counts.disagreed,
            stopped=bool(loaded) and self._versions.active.following.stopped,
            versions=self._versions.describe(),
            trials_agreed=self._counts.trials_agreed,
            trials_disagreed=self._counts.trials_disagreed,
            left_out=self._counts.left_out,
            memory=self._versions.describe_memory(),
            expected_wait_ms=0.0,  # schedulers of before require it
        )

    # ----------------------------------------------------------------------------------------------------

    async def _keep_heeding(self) -> None:
        """Notice what the guards of other replicas stop, also while no request is audited here."""
        await keep_on(
            "the state of other replicas",
            self._versions.heed_replicas,
            every_s=_HEEDED_EVERY_S,
            longest_s=_LONGEST_PAUSE_S,
        )

    async def _infer(self, request: Any) -> Any:
        self._refuse_when_draining()
        arrived_s = time.monotonic()
        priority = _priority(request)
        if request.time_remaining_ms <= 0:
            raise DeadlineError("the deadline had passed when the request arrived")
        version = self._versions.get(request.version)
        inputs = inputs_in(request.input)
        if not request.input.shape:
            raise RequestError("the input has shape []; send [batch, ...], one row for each input")
        most = self._settings.most_inputs
        if not 1 <= inputs <= most:
            raise RequestError(f"a batch of {inputs} inputs; send 1 to {most} at a time")
        if request.place is not None and not 1 <= len(request.place) <= LONGEST_PLACE:
            raise RequestError(f"`place` must have 1 to {LONGEST_PLACE} characters")
        slo_s = None if request.latency_slo_ms is None else request.latency_slo_ms / 1e3
        deadline_s = arrived_s + request.time_remaining_ms / 1e3
        with (
            self._requests.begin(request.request_id) as under_way,
            version.use(),  # by the time it is prepared, another queue may answer it
            (queue := version.following.serving).reserve(inputs, priority, slo_s) as places,
            self._pausing.answering(queue.takes),
        ):
            given = await self._given(version, request.input)
            rows = await self._rows(version, given)
            under_way.check()
            places.give_back()  # for the inputs, which `_ask` puts now
            return await self._ask(version, request, under_way, given, rows, (arrived_s, deadline_s))

    async def _ask(
        self,
        version: LoadedVersion,
        request: Any,
        under_way: UnderWay,
        sent: NDArray[Any],
        rows: Sequence[Tensor],
        times_s: tuple[float, float],
    ) -> Any:
        """Answer the rows of a request; `times_s` are its arrival and deadline."""
        arrived_s, deadline_s = times_s
        priority = _priority(request)
        self._versions.follow_memory()
        pending = self._versions.pending if request.version is None else None
        memory = self._versions.memory_for(version) if request.version is None else None
        place = request.place or None
        standing = version.standing
        trial = None if pending is None else pending.post
        places, pauses = memory is not None and place is not None, self._versions.memory_pauses
        scenes, asked = self._versions.scenes_for(version), memory is not None
        looked = [None if scenes is None else scenes.recall.look(row, place, asked=asked) for row in rows]
        draws = [version.following.draw(trial, seen, places=places) for seen in looked]
        given: list[Ask | Prediction] = []
        try:
            given += [
                (None if pauses or not seen else _recalled(drawn.decided, seen))
                or drawn.queue.put(row, priority=priority, deadline_s=deadline_s)
                for row, drawn, seen in zip(rows, draws, looked, strict=True)
            ]
            await under_way.answered([each for each in given if isinstance(each, Ask)])
            response = self._response(version, draws, given, (arrived_s, time.monotonic()))
            response.state, response.promise = standing.state, standing.sentence
            response.certificate_id = version.certificate_id if standing.certified else None
            if memory is not None and not all(isinstance(each, Ask) for each in given):
                response.promise, response.certificate_id = memory.sentence, None
        finally:  # also if rows have no answer, whatever the reason: their audits must not be missing
            for drawn, row, one, seen, each in zip(draws, rows, sent, looked, given, strict=False):
                if not isinstance(each, Ask) or each.succeeded:
                    version.following.answered(drawn, row, one, _prediction(each), seen)
                else:
                    version.following.unanswered(drawn, row, one, seen)
            for drawn in draws:
                drawn.forget()
        self._versions.answered()
        return response

    def _response(
        self,
        version: LoadedVersion,
        draws: Sequence[Handling],
        given: Sequence[Ask | Prediction],
        times_s: tuple[float, float],
    ) -> Any:
        """The answers; `times_s` are the request's arrival and now. Raises the first error of an input."""
        arrived_s, now_s = times_s
        exits = version.exits
        predictions = [_prediction(each) for each in given]  # before any is counted
        answers, last_s = [], arrived_s
        for drawn, each, prediction in zip(draws, given, predictions, strict=True):
            started_s = (each.started_s if isinstance(each, Ask) else None) or arrived_s
            last_s = max(last_s, started_s)
            took_s = started_s - arrived_s, now_s - started_s
            self._counts.answered(
                version.name, prediction.exit, *took_s, exits=exits, looked_up=drawn.decided.lookups
            )
            values = prediction.probabilities.numpy().astype("<f4", copy=False)
            answers.append(Answer(prediction.class_index, values.tobytes(), prediction.exit))
        return InferResponse(answers, version.name, 1e3 * (last_s - arrived_s), 1e3 * (now_s - arrived_s))

    async def _given(self, version: LoadedVersion, tensor: Any) -> NDArray[Any]:
        """The array of a request: token ids for texts, spectrograms for recordings."""
        preprocessing = version.engine.preprocessing
        if tensor.datatype != BYTES:
            return preprocessing.padded(from_tensor(tensor))
        if preprocessing.text is None and preprocessing.sound is None:
            raise RequestError(
                "the model takes neither text nor recordings; explore it with --tokenizer FILE, or with "
                "--sample-rate and --seconds"
            )
        if preprocessing.text is not None and len(tensor.data) <= _LONG_TEXT_BYTES:
            return tokens_of(preprocessing, tensor)
        made = tokens_of if preprocessing.sound is None else spectrograms_of
        return await self._pool.run(made, preprocessing, tensor)

    async def _rows(self, version: LoadedVersion, given: NDArray[Any]) -> list[Tensor]:
        if given.nbytes <= LARGE_INPUT_BYTES:
            return rows_of(version.engine, given)
        return await self._pool.run(rows_of, version.engine, given)

    def _published(self, folder: str) -> Path:
        """The folder as a path. Raises `RequestError` if it is not in the repository that is followed."""
        repository = self._settings.repository
        if repository is not None and "://" not in repository:
            with suppress(ValueError, OSError, RuntimeError):  # a NUL in it, or links without an end
                found = Path(folder).resolve()
                if found.is_relative_to(Path(repository).resolve()):
                    return found
        raise RequestError("`folder` is not in the repository of this model; publish the version there")

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise UnavailableError(
                f"model '{self._settings.name}' is shutting down; try again", retry_after_s=1.0
            )


def _taken_note_of(loading: asyncio.Future[Any]) -> None:
    """The caller gets the error; if there is none any more, asyncio must not log it as lost."""
    if not loading.cancelled():
        loading.exception()


def _open_writer(settings: InferenceSettings) -> BackgroundWriter | None:
    if settings.records is None:
        return None
    from gati.samples.store import RecordStore
    from gati.samples.writer import BackgroundWriter

    store = RecordStore.open(
        settings.records,
        limit_bytes=settings.records_limit_bytes,
        max_age_s=settings.records_max_age_s,
        connect=False,  # the writer connects, and retries, while requests are answered
    )
    return BackgroundWriter(store)


def _prediction(given: Ask | Prediction) -> Prediction:
    """The answer, from memory or from a queue. Raises the error that the queue reports."""
    return given.answer.result() if isinstance(given, Ask) else given


def _recalled(decided: Decided[Any], looked: Looked) -> Prediction | None:
    """The answer from memory; None if memory may not answer."""
    return looked.where(alone=decided.alone).answer if decided.recalls else None


def _priority(request: Any) -> int:
    return min(max(int(request.priority), _HIGHEST), _LOWEST)


def _array_of(part: InputPart, preprocessing: Preprocessing) -> Any:
    shorter = bool(preprocessing.lengths)
    return InputArray(part.name, datatype_of(np.empty(0, part.dtype)), list(part.shape), shorter)
