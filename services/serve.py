"""`gati serve`: the scheduler in this process, and an inference process for each replica of each model."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import uvloop

from gati.allocation import return_freed_memory
from gati.cores import core_count
from gati.errors import ConfigError, UnavailableError
from gati.pipelines import (
    CacheLibrary,
    LivePlanner,
    LiveSettings,
    Option,
    PlainModel,
    Planner,
    load_pipeline,
)
from gati.types import name_like
from gati.version import __version__
from services import logs
from services.adaptation.settings import AdaptationSettings, AdaptedModel
from services.collecting import keep_for_good
from services.config import ModelConfig, PipelineConfig, ServeConfig
from services.config_files import folder_name
from services.cores import own_cores
from services.hosted import Hosted, Hosting
from services.inference.settings import InferenceSettings
from services.model_settings import ModelSettings
from services.pausing import shared_memory
from services.process import on_signals
from services.scheduler.admission import check_exposure
from services.scheduler.app import create_app
from services.scheduler.front import Front
from services.scheduler.kept import KeptVersions
from services.scheduler.models import Model
from services.scheduler.pipelines import ServedPipeline
from services.scheduler.replicas import Link
from services.scheduler.scaling import Autoscaler, Bounds
from services.scheduler.scheduler import Scheduler
from services.supervisor import Supervised
from services.web import answering, listen, renew_certificate, url_of, web_server
from services.wire.handshake import client_tls, read_secret

_log = logging.getLogger("gati.serve")

_SAY_AGAIN_S = 10.0  # for which model it waits at startup
_SAMPLES_KEPT_S = 3600.0  # shortest time that samples are kept
_STUCK_FACTOR = 2.0  # an engine that takes this many times the default request timeout hangs
_LONGEST_WISH = 100  # characters of a model's name from a pipeline, before a number


def serve(config: ServeConfig, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then drain and end. `announce` gets the URL once all models are ready.

    **Raises:** `ConfigError` if the port is in use, other machines could send requests without a key, a model
    can never be served, or Ray does not answer; `PipelineError` for a pipeline that cannot be planned.
    """
    logs.configure("scheduler", config.log_level)
    check_exposure(config)
    listening = listen(config)
    return_freed_memory()
    with _hosting(config) as hosting:
        uvloop.run(_serve(config, hosting, listening, announce))


def with_pipeline_models(config: ServeConfig) -> tuple[ServeConfig, dict[tuple[str, str, str], str]]:
    """The configuration with a model added for each source of its pipelines that has none.

    Also returns the name of the model that serves each (pipeline, stage, option).
    """
    models = dict(config.models)
    serving: dict[tuple[str, str, str], str] = {}
    for name, settings in config.pipelines.items():
        pipeline = load_pipeline(settings.file)
        for stage in pipeline.stages.values():
            for option in stage.options.values():
                serving[name, stage.name, option.name] = _model_for(option, models)
    return config.model_copy(update={"models": models}), serving


class ThisMachine:
    """Services run as processes on this machine, supervised by this process."""

    secret: bytes | None = None  # only this user can reach their sockets

    def __init__(self, pausing: Path | None = None) -> None:
        self.pausing = pausing

    def threads(self, replicas: int) -> int:
        """The number of cores that this process may use, divided by the number of replicas."""
        return max(1, core_count() // replicas)

    def host(self, settings: InferenceSettings) -> Hosted:
        """A supervised process."""
        more: dict[str, Any] = {"pausing": self.pausing}
        if settings.replicas > 1:
            more["cores"] = own_cores(settings.replica, settings.replicas)
        settings = settings.model_copy(update=more)
        return Supervised(settings.label, "services.inference", settings, spare=settings.spare)


def build_scheduler(config: ServeConfig, hosting: Hosting | None = None) -> Scheduler:
    """The scheduler of a configuration. Its models are not started yet; they run where `hosting` says."""
    config, serving = with_pipeline_models(config)
    where = hosting or ThisMachine()
    models = {name: _model(name, each, config, where) for name, each in config.models.items()}
    pipelines = {
        name: _pipeline(name, settings, models, serving) for name, settings in config.pipelines.items()
    }
    autoscalers = [
        Autoscaler(models[name], _bounds(each, each.replicas_max), config.drain_timeout_s)
        for name, each in config.models.items()
        if each.replicas_max is not None
    ]
    return Scheduler(config, models, pipelines, _adaptation(config, where.pausing), autoscalers)


# --------------------------------------------------------------------------------------------------------


@contextmanager
def _hosting(config: ServeConfig) -> Iterator[Hosting]:
    if config.ray is None:
        with ExitStack() as stack:
            pausing = None
            if config.adaptation is not None and config.adaptation.niceness:  # otherwise it need not give way
                pausing = stack.enter_context(shared_memory())
            yield ThisMachine(pausing)
        return
    if find_spec("ray") is None:
        raise ConfigError("--ray needs Ray; install it with pip install 'gati[ray]'")
    from services.ray_hosts import RayCluster

    with RayCluster.connect(config.ray) as cluster:
        yield cluster


async def _serve(
    config: ServeConfig, hosting: Hosting, listening: socket.socket, announce: Callable[[str], None]
) -> None:
    if config.ray is None:
        _check_libraries(config)
    scheduler = build_scheduler(config, hosting)
    server = web_server(scheduler.config, Front(create_app(scheduler)))  # with the models of pipelines
    stop = asyncio.Event()
    hurry = asyncio.Event()  # set by a second signal

    def reload() -> None:
        _log.info("reading keys and certificate again; other settings take a restart")
        scheduler.keys.reload()
        renew_certificate(server, config)

    on_signals(lambda: (hurry if stop.is_set() else stop).set(), reload=reload)
    served = {"models": list(scheduler.models), "pipelines": list(scheduler.pipelines)}
    _log.info("starting", extra={"version": __version__, **served})
    await scheduler.start()
    async with answering(server, listening, scheduler.drain) as running:
        announcing = asyncio.create_task(_announce(scheduler, url_of(config, listening), announce))
        stopped = asyncio.create_task(stop.wait())
        hopeless = asyncio.create_task(_hopeless(announcing))
        done, _ = await asyncio.wait((running, stopped, hopeless), return_when=asyncio.FIRST_COMPLETED)
        announcing.cancel()
        if stopped in done:
            await _leave(scheduler, hurry, config.drain_s)
        _log.info("draining")
    _log.info("ended")
    for task in (stopped, hopeless):
        task.cancel()
    if hopeless in done:
        hopeless.result()


def _check_libraries(config: ServeConfig) -> None:
    """Check that the libraries exist, before the state of a model makes a folder there.

    Raises ConfigError.
    """
    for name, own in config.models.items():
        if own.library is not None and own.address is None and not os.path.isdir(own.library):
            raise ConfigError(
                f"model '{name}' cannot be served: no cache library in {own.library}; correct the path, or "
                "run gati explore --out first"
            )


async def _leave(scheduler: Scheduler, hurry: asyncio.Event, drain_s: float) -> None:
    """Report not ready, but keep answering for `drain_s`, so that load balancers notice."""
    scheduler.leaving = True
    if drain_s > 0.0:
        _log.info("no longer ready, still answering", extra={"drain_s": drain_s})
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await hurry.wait()


async def _announce(scheduler: Scheduler, url: str, announce: Callable[[str], None]) -> None:
    """Announce the URL once every model is ready. Raises `ConfigError` if one can never be served."""
    await asyncio.gather(*(_first_ready(model) for model in scheduler.models.values()))
    keep_for_good()
    announce(url)


async def _first_ready(model: Model) -> None:
    while model.wanted and not model.ready:
        try:
            await model.wait_until_ready(_SAY_AGAIN_S)
        except UnavailableError:
            if model.wanted:
                _log.info("still waiting", extra={"model": model.name, "reason": model.cause})


async def _hopeless(announcing: asyncio.Task[None]) -> None:
    """Raise the error of `announcing`, which a restart cannot fix; without one, never return."""
    await announcing
    await asyncio.Event().wait()


def _model(name: str, own: ModelConfig, config: ServeConfig, hosting: Hosting) -> Model:
    if own.address is not None:
        link = Link(config.hang_timeout_s, read_secret(own.secret_file), client_tls(own.authority))
        return Model(name, address=own.address, link=link, kept=KeptVersions(name, own.state))
    replicas = _replicas(own, config)
    settings = _settings(name, own, config, own.replicas_max or replicas, hosting)
    return Model(
        name,
        host=lambda number: hosting.host(settings.model_copy(update={"replica": number})),
        replicas=replicas,
        link=Link(config.hang_timeout_s, hosting.secret),
        kept=KeptVersions(name, settings.state_folder),
    )


def _replicas(own: ModelConfig, config: ServeConfig) -> int:
    """How many replicas a model starts with: at least one, which shows that it can be served."""
    if own.replicas_max is not None:
        return own.replicas or max(1, own.replicas_min)
    return own.replicas or config.replicas or 1


def _bounds(own: ModelConfig, most: int) -> Bounds:
    return Bounds(
        max(1, own.replicas_min),
        most,
        own.replicas_delay_ms,
        down_s=own.replicas_cooldown_s,
        idle_s=math.inf if own.replicas_min else own.replicas_idle_s,
    )


def _settings(
    name: str, own: ModelConfig, config: ServeConfig, replicas: int, hosting: Hosting
) -> InferenceSettings:
    shared = {each: getattr(own, each) for each in ModelSettings.model_fields}
    shared |= {each: value.absolute() for each, value in shared.items() if isinstance(value, Path)}
    if own.library is not None and config.ray is None:  # a link may lead elsewhere at the next restart
        shared["library"] = own.library.resolve()
    shared["composition"] = own.served_composition
    shared["threads"] = own.threads or hosting.threads(replicas)
    return InferenceSettings(
        **shared,
        name=name,
        threads_given=own.threads is not None,
        records_max_age_s=max(_SAMPLES_KEPT_S, config.adaptation.window_s if config.adaptation else 0.0),
        stuck_timeout_s=max(_STUCK_FACTOR * config.request_timeout_ms / 1e3, config.hang_timeout_s),
        replicas=replicas,
        drain_timeout_s=config.drain_timeout_s,
        log_level=config.log_level,
    )


def _adaptation(config: ServeConfig, pausing: Path | None) -> Supervised | None:
    """The adaptation process, if it is configured. Raises `ConfigError` if it would have no model."""
    if config.adaptation is None:
        return None
    models = tuple(
        AdaptedModel(
            name=name,
            library=own.library.resolve(),
            composition=own.composition,
            records=own.records,
            repository=own.repository,
            share=own.adaptation_share,
        )
        for name, own in config.models.items()
        if own.library is not None and own.composition is not None and own.records and own.repository
    )
    if not models:
        raise ConfigError("[adaptation] has no model; give one a library, records and a repository")
    settings = AdaptationSettings(
        models=models,
        log_level=config.log_level,
        pausing=pausing,
        **config.adaptation.model_dump(),
    )
    return Supervised("adaptation", "services.adaptation", settings)


def _pipeline(
    name: str, settings: PipelineConfig, models: dict[str, Model], serving: dict[tuple[str, str, str], str]
) -> ServedPipeline:
    pipeline = load_pipeline(settings.file)
    planner: Planner | LivePlanner
    if settings.live:
        following = LiveSettings(half_life=settings.half_life, explore_every=settings.explore_every)
        planner = LivePlanner(pipeline, settings.policy, attainment=settings.attainment, settings=following)
    else:
        planner = Planner(pipeline, settings.policy, attainment=settings.attainment)
    asked = {(stage, option): models[model] for (own, stage, option), model in serving.items() if own == name}
    return ServedPipeline(pipeline, planner, asked, settings.latency_slo_ms)


def _model_for(option: Option, models: dict[str, ModelConfig]) -> str:
    """The model that serves an option's source, added to `models` if missing."""
    source = option.source
    for name, known in models.items():
        if _serves(known, source):
            return name
    if isinstance(source, CacheLibrary):
        name = folder_name(source.directory)
        if source.composition != "default":
            name += f"-{source.composition or 'base'}"
        added = ModelConfig(
            library=source.directory, composition=source.composition, caches=source.composition is not None
        )
    else:
        name = Path(source.model.rpartition(":")[2]).name  # of a callable, a file or a folder
        added = ModelConfig(model=source.model, checkpoint=source.checkpoint)
    name = _free(name, models)
    models[name] = added
    return name


def _serves(known: ModelConfig, source: CacheLibrary | PlainModel) -> bool:
    if isinstance(source, PlainModel):
        return known.model == source.model and _resolved(known.checkpoint) == _resolved(source.checkpoint)
    same = known.library is not None and Path(known.library).resolve() == source.directory.resolve()
    return same and known.served_composition == source.composition


def _resolved(path: Path | None) -> Path | None:
    return None if path is None else path.resolve()


def _free(wish: str, taken: dict[str, ModelConfig]) -> str:
    """A valid name like `wish` that is not taken."""
    name = name_like(wish, _LONGEST_WISH)
    candidate, number = name, 2
    while candidate in taken:
        candidate, number = f"{name}-{number}", number + 1
    return candidate
