"""`gati evict engine`: a network, its engine and the API in one process, until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import uvloop

from gati.cores import MOST_THREADS
from gati.engine.threads import granted_threads
from gati.errors import EvictError, UnavailableError
from gati.evict.engine.access import AccessFile
from gati.evict.engine.decoder import Decoder, DecoderSettings
from gati.evict.engine.driver import EngineDriver
from gati.evict.engine.engine import PrefixEngine, PrefixEngineLimits, pool_for
from gati.evict.engine.pages import KeptPrefixes
from gati.evict.engine.stored import load_decoder
from gati.evict.engine.tokens import tokens_for
from services import logs
from services.collecting import keep_for_good
from services.completions.app import CompletionsApp
from services.config import ServeConfig
from services.process import on_signals
from services.scheduler.admission import check_exposure
from services.web import answering, listen, url_of, web_server

_log = logging.getLogger("gati.completions")


@dataclass(frozen=True)
class CompletionsSettings:
    """The network and its resources. Without a `network`, a small random one is made from `seed`."""

    network: Path | None = None
    name: str | None = None
    seed: int = 0
    budget_bytes: int = 2**28
    page_tokens: int = 16
    kept: KeptPrefixes = KeptPrefixes()
    limits: PrefixEngineLimits = PrefixEngineLimits()
    access_log: Path | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        """Raises EvictError for a number of threads that no machine can use."""
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise EvictError(f"threads is {self.threads}; give 1 to {MOST_THREADS}")


def completions_app(
    settings: CompletionsSettings, config: ServeConfig
) -> tuple[CompletionsApp, PrefixEngine]:
    """Create the network, the engine and the application. Raises GatiError for invalid settings."""
    if settings.network is None:
        decoder, name = Decoder.random(DecoderSettings(), settings.seed), f"random-{settings.seed}"
    else:
        decoder, name = load_decoder(settings.network), settings.network.resolve().name
    tokens = tokens_for(settings.network, decoder.settings.vocabulary)
    engine = PrefixEngine(
        decoder,
        pool_for(decoder, settings.budget_bytes, settings.page_tokens),
        settings.kept,
        settings.limits,
        page_tokens=settings.page_tokens,
        sink=None if settings.access_log is None else AccessFile(settings.access_log),
    )
    if settings.kept.only_logs:
        _log.info(
            "policy %s uses no predictor of the service; accesses are only logged there", settings.kept.policy
        )
    return CompletionsApp(engine, tokens, settings.name or name, config), engine


def serve_completions(
    settings: CompletionsSettings, config: ServeConfig, announce: Callable[[str, str], None]
) -> None:
    """Serve until SIGTERM or SIGINT; `announce` gets the URL and the network's name once both answer.

    Raises ConfigError if the port is taken, or if other machines could connect without a key, and
    UnavailableError if the engine fails.
    """
    logs.configure("completions", config.log_level)
    check_exposure(config)
    torch.set_num_threads(settings.threads or granted_threads())
    app, engine = completions_app(settings, config)
    listening = listen(config)
    keep_for_good()
    uvloop.run(_serve(app, engine, config, listening, announce))


async def _serve(
    app: CompletionsApp,
    engine: PrefixEngine,
    config: ServeConfig,
    listening: socket.socket,
    announce: Callable[[str, str], None],
) -> None:
    loop = asyncio.get_running_loop()
    failures: list[BaseException] = []
    stop = asyncio.Event()

    def failed(error: BaseException) -> None:
        failures.append(error)
        loop.call_soon_threadsafe(stop.set)

    driver = EngineDriver(engine, failed)
    server = web_server(config, app)
    on_signals(stop.set, reload=app.keys.reload)
    driver.start()

    async def drain() -> None:
        await app.drain(config.drain_timeout_s)
        await asyncio.to_thread(driver.stop)

    async with answering(server, listening, drain) as running:
        announce(url_of(config, listening), app.name)
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
        app.ready = False
    stopped.cancel()
    if failures:
        raise UnavailableError(f"the engine failed: {failures[0]}") from failures[0]
